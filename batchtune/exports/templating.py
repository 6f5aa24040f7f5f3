"""Fills the templates of exports: what they say of the data, the row, what was left out and the data loader.

No text of a hostile result file gets out of its comment.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

from batchtune.errors import without_commands
from batchtune.exports.base import Chosen, Tuned, batches_per_rank
from batchtune.loaders import kind_of
from batchtune.results import (
    TORCH_ARGUMENTS,
    EpochFigures,
    PackedRow,
    PackingSweep,
    ReadingRecord,
    Row,
    StreamRow,
    StreamSweep,
    Swept,
    argument_text,
    unproven_sizes,
)
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_seconds,
    format_size,
    with_full_stop,
)

_WIDTH = 100


def one_line(text: str) -> str:
    r"""Put text on one line: characters that end a comment (\n, \r, U+0085, U+2028, ...) or hide become escapes."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in without_commands(text)
    )


class Written(str):
    """Text that a template inserts as it is, without escapes."""


def from_template(name: str, **values: Any) -> str:
    """Fill a template of this package; `one_line` makes all values that are text harmless, except `Written`.

    The filter `comments` makes a comment of each paragraph of a text; `paragraphs` joins sentences to such a text.
    """
    return str(_environment().get_template(name).render(values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchtune.exports"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    environment.filters.update(
        comments=_comments,
        paragraphs=_paragraphs,
        number=number,
        in_unit=format_length,
        thousands="{:,}".format,
        counted=counted,
        argument=argument_text,
        compact=format_number,
        percent="{:.1%}".format,
        seconds=format_seconds,
        flow=flow_list,
        broken=broken,
        literal=_literal,
    )
    return environment


def _comments(text: str) -> str:
    """Return each paragraph of a text as a `#` comment."""
    comments = []
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words:
            comments += textwrap.wrap(
                with_full_stop(words),
                _WIDTH,
                initial_indent="# ",
                subsequent_indent="# ",
                break_on_hyphens=False,
            )
    return "".join(f"{line.rstrip()}\n" for line in comments)


def _paragraphs(sentences: Iterable[str]) -> Written:
    return Written("\n\n".join(map(one_line, sentences)))


def broken(line: str, beneath: str = "    ") -> Written:
    """Wrap a list's line between its entries; the next lines begin with `beneath`."""
    return Written(
        textwrap.fill(
            line,
            _WIDTH,
            subsequent_indent=beneath,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _literal(value: object) -> Written:
    """Return a text, number or truth value as a Python literal in ASCII."""
    text = ascii(value)
    if text == f"'{value}'" and '"' not in text:
        text = f'"{value}"'
    return Written(text)


def number(value: float) -> str:
    """Write a number as YAML 1.1 and 1.2 read it, without an exponent.

    hyperpyyaml rewrites numbers, and ruamel.yaml's round trip drops a digit of those with an exponent.
    """
    if value == int(value):
        return str(int(value))
    return format(Decimal(repr(float(value))), "f")


def flow_list(values: Sequence[float]) -> str:
    """Write `[3.995, 5.825, 15.0]`: with a decimal point in all numbers, if one needs it."""
    texts = [number(value) for value in values]
    if any("." in text for text in texts):
        texts = [text if "." in text else f"{text}.0" for text in texts]
    return f"[{', '.join(texts)}]"


class LengthLimits(NamedTuple):
    """The limits of the tuned lengths (--min-length, --max-length), both inclusive, in their unit; None without one.

    `positive`: lengths of 0 are left out, too.
    """

    shortest: float | None
    longest: float | None
    positive: bool = False

    @classmethod
    def of(cls, sweep: Swept[Any]) -> LengthLimits:
        """Return the limits of a sweep's lengths."""
        reading = sweep.lengths.reading or ReadingRecord()
        return cls(reading.min_length or None, reading.max_length)

    @classmethod
    def of_stream(cls, sweep: StreamSweep) -> LengthLimits:
        """Return the limits of a stream's lengths, up to the longest that was tuned with, unless longer are truncated.

        A stream may hold examples that the sweep has not seen. No batch with a longer one was counted or run.
        """
        limits = cls.of(sweep)._replace(positive=True)
        reading = sweep.lengths.reading
        if limits.longest is not None or (
            reading is not None and reading.truncate is not None
        ):
            return limits
        return limits._replace(longest=sweep.lengths.max)

    @property
    def known(self) -> bool:
        """Whether there is any limit."""
        return self.positive or self.shortest is not None or self.longest is not None

    def scaled(self, factor: float) -> LengthLimits:
        """Return the limits in another unit, without floating-point noise."""
        return self._replace(
            shortest=_scaled(self.shortest, factor),
            longest=_scaled(self.longest, factor),
        )

    def named(self, shortest: str, longest: str) -> dict[str, float]:
        """Return those limits that there are, by a framework's names for them."""
        limits = {shortest: self.shortest, longest: self.longest}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def condition(self, name: str) -> str:
        """Return a Python condition that keeps what was tuned with: `1.0 <= name <= 30.0`, `0 < name <= 24.5`."""
        condition = name
        if self.shortest is not None:
            condition = f"{self.shortest!r} <= {condition}"
        elif self.positive:
            condition = f"0 < {condition}"
        if self.longest is not None:
            condition += f" <= {self.longest!r}"
        return condition


def _scaled(limit: float | None, factor: float) -> float | None:
    return None if limit is None else float(f"{limit * factor:.12g}")


def _loader_fields(tuned: Tuned, expresses: Collection[str]) -> dict[str, Any]:
    """Return the recommended arguments of torch's DataLoader: those that a framework can express, and those `beyond`.

    `loader_row` is the recommended row, None without a recommendation.
    """
    loader = tuned.loader
    if loader is None or not kind_of(loader.kind).IS_DATALOADER:
        return {"loader": {}, "loader_row": None}
    row = loader.recommended_row
    if row is None:
        return {"loader": {}, "loader_row": None}
    arguments = {
        name: value for name, value in row.arguments.items() if value is not None
    }
    return {
        "loader": {name: arguments[name] for name in expresses if name in arguments},
        "loader_row": row,
        "beyond": {
            name: value for name, value in arguments.items() if name not in expresses
        },
    }


def table_fields(
    chosen: Chosen[Row], tuned: Tuned, expresses: Collection[str] = TORCH_ARGUMENTS
) -> dict[str, Any]:
    """Return what the templates of bucket tables have in common.

    `expresses` are the arguments of the DataLoader that the framework can set.
    """
    sweep = tuned.needed_sweep
    return {
        **_fields(chosen.row, chosen.remarks, sweep, tuned, expresses),
        "unproven_sizes": unproven_sizes(chosen.row),
    }


def packed_fields(
    tuned: Tuned, packing: PackingSweep, expresses: Collection[str] = TORCH_ARGUMENTS
) -> dict[str, Any]:
    """Return what the templates of packed micro-batches have in common; arguments and keys as for `table_fields`."""
    sweep = tuned.needed_sweep
    return {
        **_fields(packing.row, (), sweep, tuned, expresses),
        "packing": packing,
        "accumulate": sweep.settings.accumulate or 1,
    }


def stream_fields(
    chosen: Chosen[StreamRow],
    tuned: Tuned,
    expresses: Collection[str] = TORCH_ARGUMENTS,
) -> dict[str, Any]:
    """Return what the templates of streams have in common; arguments as for `table_fields`."""
    sweep = tuned.needed_stream
    row = chosen.row
    settings = sweep.settings
    workers = max(1, settings.workers)
    fields = _fields(row, chosen.remarks, sweep, tuned, expresses)
    return {
        **fields,
        "workers": workers,
        "limits": LengthLimits.of_stream(sweep),
        "batches": batches_per_rank(row, sweep),
        "memory": format_size(row.buffer_bytes),
        "shard_shuffle": settings.shuffle_shards or False,
        "sample_shuffle": settings.shuffle_buffer or False,
        "loader": fields["loader"] or {"num_workers": workers},
    }


def _fields(
    row: EpochFigures | PackedRow,
    remarks: Iterable[str],
    sweep: Swept[Any],
    tuned: Tuned,
    expresses: Collection[str],
) -> dict[str, Any]:
    """Return what all templates have in common."""
    return {
        "row": row,
        "sweep": sweep,
        "lengths": sweep.lengths,
        "unit": sweep.lengths.unit,
        "ranks": sweep.world_size,
        "remarks": [*tuned.training_notes, *remarks],
        "limits": LengthLimits.of(sweep),
        "seed": sweep.settings.seed,
        **_loader_fields(tuned, expresses),
    }
