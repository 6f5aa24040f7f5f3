"""Numbers, lists and comments for exports: no text of a hostile result file gets out of its comment."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

from batchtune.errors import ResultError, without_commands
from batchtune.results import ReadingRecord, Row, StreamRow, StreamSweep, Sweep, unproven_sizes
from batchtune.units import counted, format_length, format_number, format_seconds

_WIDTH = 100


def one_line(text: str) -> str:
    r"""Put text on one line: what could end a comment (\n, \r, U+0085, U+2028, ...) or hide is written as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in without_commands(text)
    )


def commented(sentences: Iterable[str], *, indent: str = "") -> str:
    """Return sentences as `#` comments, each on lines of its own, ended with a full stop where it has no end."""
    lines: list[str] = []
    for sentence in sentences:
        text = one_line(sentence)
        text = text if text.endswith((".", ":", "!", "?")) else f"{text}."
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )
    return "".join(f"{line.rstrip()}\n" for line in lines)


class Written(str):
    """Text for a template that is ready: nothing in it is escaped."""


def from_template(name: str, **values: Any) -> str:
    """Return a file made of a template of this package, in which all other text is put on one line.

    The filter `comments` takes a text whose paragraphs are sentences, and `paragraphs` makes such a text of sentences.
    """
    return str(_environment().get_template(name).render(values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def comments(text: str, indent: str = "") -> str:
        paragraphs = (re.sub(r"\s*\n\s*", " ", part).strip() for part in text.split("\n\n"))
        return commented(filter(None, paragraphs), indent=indent)

    environment = Environment(
        loader=PackageLoader("batchtune.exports"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    environment.filters.update(
        comments=comments,
        paragraphs=lambda sentences: Written("\n\n".join(map(one_line, sentences))),
        number=number,
        flow=flow_list,
        broken=lambda line: Written(broken(line).rstrip("\n")),
        literal=lambda text: Written(literal(text)),
        python=lambda value: Written(repr(value).replace("'", '"')),
    )
    return environment


def literal(text: str) -> str:
    """Return text as a Python literal in ASCII."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else ascii(text)


def number(value: float) -> str:
    """Write a number that YAML 1.1 and 1.2 read as such, and that hyperpyyaml, which rewrites numbers, keeps exactly.

    That is why there is no exponent: ruamel.yaml's round trip drops a digit of numbers that have one.
    """
    return str(int(value)) if value == int(value) else format(Decimal(repr(float(value))), "f")


def flow_list(values: Sequence[float]) -> str:
    """Write `[3.995, 5.825, 15.0]`: all of them with a point where one needs it."""
    texts = [number(value) for value in values]
    if any("." in text for text in texts):
        texts = [text if "." in text else f"{text}.0" for text in texts]
    return f"[{', '.join(texts)}]"


def broken(line: str, *, indent: int = 4) -> str:
    """Return a list's line, broken between its entries and indented beneath where it is too long; with a line break."""
    beneath = " " * (len(line) - len(line.lstrip()) + indent)
    return textwrap.fill(line, _WIDTH, subsequent_indent=beneath, break_long_words=False, break_on_hyphens=False) + "\n"


def about_data(sweep: Sweep | StreamSweep) -> str:
    """Say what the sweep was made for, in a sentence."""
    lengths = sweep.lengths
    device = f", measured on {sweep.device_name}" if sweep.device_name else ""
    return (
        f"Tuned by batchtune for {counted(lengths.count, 'example')} with lengths in "
        f"{lengths.unit or 'an unknown unit'} (fingerprint {lengths.fingerprint[:12]}){device}"
    )


def about_row(row: Row, sweep: Sweep) -> str:
    """Say what the row is, what an epoch costs with it, and how many of its sizes are not proven, in a sentence."""
    seconds, sizes = row.estimated_epoch_seconds, unproven_sizes(row)
    unproven = "" if sizes is None else f"; {sizes} (`batchtune report` says why)"
    time = f", {format_seconds(seconds)} by the probe's step times" if seconds else ""
    ranks = sweep.world_size
    on_ranks = f" on {format_number(ranks)} ranks as batchtune's sampler deals them" if ranks > 1 else ""
    limit = format_length(sweep.max_batch_length, sweep.lengths.unit)
    sized = "sized by the frontier" if row.sizing == "frontier" else f"max_batch_length {limit}"
    which = f"{row.strategy} with {counted(len(row.boundaries), 'bucket')}"
    if row.pool_size is not None:
        which = f"pools of {counted(row.pool_size, 'example')}"
    return (
        f"{which}, {sized}: {format_number(row.batches)} batches "
        f"an epoch{on_ranks}{time}, {row.padding_ratio:.1%} padding{unproven}"
    )


def about_stream(row: StreamRow, sweep: StreamSweep) -> str:
    """Say what the row is, what an epoch costs with it, and how many of its batches are not proven, in a sentence."""
    ranks, workers, seconds = sweep.world_size, sweep.streamed.workers, row.estimated_epoch_seconds
    on = [counted(ranks, "rank")] if ranks > 1 else []
    if workers > 1:
        on.append(f"{counted(workers, 'worker')}{' each' if on else ''}")
    where = f" on {' with '.join(on)}" if on else ""
    time = f", {format_seconds(seconds)} by the probe's step times" if seconds else ""
    unproven = ""
    if row.unproven:
        unproven = f"; {format_number(row.unproven)} of them are larger than what is proven to fit"
    batches = f"{format_number(row.batches)} batches an epoch{where}{time}"
    return f"{row.name}: {batches}, {row.padding_ratio:.1%} padding{unproven}"


def padded_remark(sweep: Sweep | StreamSweep, framework: str | None = None) -> Iterator[str]:
    """Yield who pads to multiples, if the sweep counted them (--multiple-of).

    It is the user's collate function if no `framework` is one that pads to the longest example.
    """
    multiple = sweep.settings.get("multiple_of")
    if multiple is not None:
        who = "collate_fn must pad to them"
        if framework is not None:
            who = f"{framework} pads to the longest example unless the collate function does more"
        length = format_length(multiple, sweep.lengths.unit)
        yield f"Batches were counted as padded to multiples of {length} (--multiple-of); {who}"


class LengthLimits(NamedTuple):
    """The limits of the tuned lengths (--min-length, --max-length), both inclusive, in their unit; None without one.

    `left_out` says how many examples were left out, and why, as sentences without a full stop.
    """

    shortest: float | None
    longest: float | None
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, sweep: Sweep | StreamSweep) -> LengthLimits:
        """Return the limits of a sweep's lengths; none where its file is of an older batchtune.

        Raises:
            ResultError: Lengths of the sweep are beyond them: the file was edited.
        """
        lengths = sweep.lengths
        reading = lengths.reading or ReadingRecord()
        low, high = reading.min_length, reading.max_length
        if (low is not None and low > lengths.min) or (high is not None and high < lengths.max):
            raise ResultError(
                "The sweep is damaged: its lengths are beyond --min-length or --max-length",
                "Sweep again.",
            )
        # An infinite limit is none, nor is one below all lengths.
        low = low if low is not None and low > 0 else None
        high = high if high is not None and math.isfinite(high) else None
        reasons = [f"{counted(count, 'example')}, {reason}" for reason, count in lengths.left_out.items()]
        told = f"Left out at tuning: {'; '.join(reasons)}. No batch with them was counted or run"
        return cls(low, high, (told,) if reasons else ())

    def __bool__(self) -> bool:
        return self.shortest is not None or self.longest is not None

    def scaled(self, factor: float) -> LengthLimits:
        """Return the limits in another unit; noise of floating point is rounded away."""
        low, high = (None if limit is None else float(f"{limit * factor:.12g}") for limit in self[:2])
        return LengthLimits(low, high, self.left_out)

    def condition(self, name: str) -> str:
        """Return a Python condition that holds for what was kept: `1.0 <= name <= 30.0`."""
        low = "" if self.shortest is None else f"{self.shortest!r} <= "
        return low + name + ("" if self.longest is None else f" <= {self.longest!r}")
