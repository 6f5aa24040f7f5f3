"""What the exports that write comments and Python code share: nothing that a result file holds gets out of either."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from batchtune.errors import ResultError
from batchtune.exports.base import Tuned, choose_row
from batchtune.plain_yaml import without_commands
from batchtune.results import ReadingRecord, Row, Sweep, unproven_sizes
from batchtune.units import counted, format_length, format_number, format_seconds

_WIDTH = 100
_AGAIN = "Make it anew with `batchtune sweep-buckets`."
# What toolkits for speech count where lengths are in seconds; another rate is said to be multiplied by.
SAMPLE_RATE = 16_000
AUDIO_UNITS: dict[str | None, float] = {"s": SAMPLE_RATE, "ms": SAMPLE_RATE / 1000, "samples": 1}


def one_line(text: str) -> str:
    r"""Text on one line: what could end a comment (\n, \r, U+0085, U+2028, ...) or hide is written as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in without_commands(text)
    )


def commented(sentences: Iterable[str], *, indent: str = "") -> str:
    """Sentences as `#` comments, each on lines of its own, ended with a full stop where it has no end."""
    lines: list[str] = []
    for sentence in sentences:
        text = one_line(sentence)
        text = text if text.endswith((".", ":", "!", "?")) else f"{text}."
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )
    return "".join(f"{line.rstrip()}\n" for line in lines)


def literal(text: str) -> str:
    """Text as a Python literal in ASCII."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else ascii(text)


def about_data(sweep: Sweep) -> str:
    """What the sweep was made for, in a sentence."""
    lengths = sweep.lengths
    unit = lengths.unit or "an unknown unit"
    device = f", measured on {sweep.device_name}" if sweep.device_name else ""
    return (
        f"Tuned by batchtune for {counted(lengths.count, 'example')} with lengths in {unit} "
        f"(fingerprint {lengths.fingerprint[:12]}){device}"
    )


def about_row(row: Row, sweep: Sweep) -> str:
    """What the table is, what an epoch with it costs, and how many of its sizes are not proven, in a sentence."""
    seconds, sizes = row.estimated_epoch_seconds, unproven_sizes(row)
    unproven = "" if sizes is None else f"; {sizes} (`batchtune report` says why)"
    time = f", {format_seconds(seconds)} by the probe's step times" if seconds else ""
    ranks = sweep.world_size
    on_ranks = f" on {format_number(ranks)} ranks as batchtune's sampler deals them" if ranks > 1 else ""
    limit = format_length(sweep.max_batch_length, sweep.lengths.unit)
    sized = "sized by the frontier" if row.sizing == "frontier" else f"max_batch_length {limit}"
    return (
        f"{row.strategy} with {counted(len(row.boundaries), 'bucket')}, {sized}: {format_number(row.batches)} batches "
        f"an epoch{on_ranks}{time}, {row.padding_ratio:.1%} padding{unproven}"
    )


def padded_remark(sweep: Sweep, framework: str | None = None) -> Iterator[str]:
    """Who pads to multiples, where the sweep counted them (--multiple-of).

    Args:
        sweep: The sweep.
        framework: Its name, where it pads to the longest example; None where the user's collate function pads.
    """
    multiple = sweep.settings.get("multiple_of")
    if isinstance(multiple, (int, float)):
        who = "collate_fn must pad to them"
        if framework is not None:
            who = f"{framework} pads to the longest example unless the collate function does more"
        length = format_length(multiple, sweep.lengths.unit)
        yield f"Batches were counted as padded to multiples of {length} (--multiple-of); {who}"


def how_read(sweep: Sweep) -> Iterator[str]:
    """What `from_config` must be told to read the manifest as it was for the sweep; nothing where it finds out."""
    reading = sweep.lengths.reading or ReadingRecord()
    values = ((name, getattr(reading, name)) for name in reading.__struct_fields__)
    given = [f"{name}={literal(value)}" for name, value in values if isinstance(value, str)]
    if given:
        yield f"With the path of the manifest, from_config needs to know how it is read: {', '.join(given)}"


def beyond_measured(tuned: Tuned) -> Iterator[str]:
    """What to know where a framework cuts batches by a max_batch_length above the one that was measured to fit."""
    sweep, probe = tuned.sweep, tuned.probe
    if probe is not None and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        used, fits = (format_length(one.max_batch_length, sweep.lengths.unit) for one in (sweep, probe))
        yield f"max_batch_length {used} is more than the {fits} that was measured to fit: batches may run out of memory"


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """What the tuned lengths were limited to (--min-length, --max-length), both inclusive, in their unit.

    Attributes:
        shortest, longest: None without such a limit.
        left_out: How many examples were left out, and why, as sentences without a full stop.
    """

    shortest: float | None
    longest: float | None
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, sweep: Sweep) -> LengthLimits:
        """The limits of a sweep's lengths; none where its file is of an older batchtune.

        Raises:
            ResultError: Lengths of the sweep are beyond them: the file was edited.
        """
        lengths = sweep.lengths
        reading = lengths.reading or ReadingRecord()
        low, high = reading.min_length, reading.max_length
        if (low is not None and low > lengths.min) or (high is not None and high < lengths.max):
            raise ResultError("The sweep is damaged: its lengths are beyond --min-length or --max-length", _AGAIN)
        # An infinite limit is none, nor is one below all lengths.
        low = low if low is not None and low > 0 else None
        high = high if high is not None and math.isfinite(high) else None
        reasons = [f"{counted(count, 'example')}, {reason}" for reason, count in lengths.left_out.items()]
        told = f"Left out at tuning: {'; '.join(reasons)}. No batch with them was counted or run"
        return cls(low, high, (told,) if reasons else ())

    def __bool__(self) -> bool:
        return self.shortest is not None or self.longest is not None

    def scaled(self, factor: float) -> LengthLimits:
        """The limits in another unit; noise of floating point is rounded away."""

        def converted(limit: float | None) -> float | None:
            return None if limit is None else float(f"{limit * factor:.12g}")

        return LengthLimits(converted(self.shortest), converted(self.longest), self.left_out)

    def condition(self, name: str) -> str:
        """A Python condition that holds for what was kept: `1.0 <= name <= 30.0`."""
        low = "" if self.shortest is None else f"{self.shortest!r} <= "
        high = "" if self.longest is None else f" <= {self.longest!r}"
        return f"{low}{name}{high}"


_WITHIN = '''
def within_limits(dataset, lengths):
    """The examples that were tuned with, and their lengths; `lengths` is an array."""
    lengths = np.asarray(lengths)
    kept = np.flatnonzero(@CONDITION@)
    return Subset(dataset, kept.tolist()), lengths[kept]

'''


def _with_limits(code: str, limits: LengthLimits) -> str:
    """The code, with a function that leaves out what was left out at tuning, after its last import."""
    if not limits:
        return code
    sides = [LengthLimits(limits.shortest, None, ()), LengthLimits(None, limits.longest, ())]
    conditions = [side.condition("lengths") for side in sides if side]
    condition = conditions[0] if len(conditions) == 1 else " & ".join(f"({one})" for one in conditions)
    function = _WITHIN.replace("@CONDITION@", condition)
    imports, config, rest = code.partition("CONFIG = @CONFIG@\n")
    imports = imports.replace("import DataLoader\n", "import DataLoader, Subset\n")
    return f"import numpy as np\n{imports}{config}\n{function}{rest.removeprefix(chr(10))}"


def python_snippet(tuned: Tuned, framework: str, remarks: Iterable[str], code: str) -> str:
    """Python code around our own sampler, which can run every row: comments, then the code.

    Where examples were left out at tuning, it has a function that leaves them out of a data set.

    Args:
        tuned: The run.
        framework: Its own name.
        remarks: What to know besides.
        code: `@CONFIG@` in it becomes the path of the sampler config.

    Raises:
        ResultError: The sweep recommends nothing.
    """
    chosen = choose_row(tuned.sweep, framework, lambda row: True, "")
    limits = LengthLimits.of(tuned.sweep)
    head = [
        f"{framework}: {about_row(chosen.row, tuned.sweep)}",
        about_data(tuned.sweep),
        *chosen.remarks,
        *remarks,
        *padded_remark(tuned.sweep),
        *limits.left_out,
    ]
    if not limits:
        head += how_read(tuned.sweep)
    else:
        head.append(
            "Leave them out of training, too: dataset, lengths = within_limits(dataset, lengths), before all else; the "
            "sampler refuses longer ones. `lengths` is then an array, not the path of the manifest"
        )
    return commented(head) + _with_limits(code, limits).replace("@CONFIG@", literal(tuned.config))


def checked(sweep: Sweep) -> Sweep:
    """The sweep itself.

    Raises:
        ResultError: A length in it is none, so that nothing can be worked out from it: the file was edited.
    """
    named = {
        "max_batch_length": sweep.max_batch_length,
        "the shortest length": sweep.lengths.min,
        "the longest length": sweep.lengths.max,
        "the first quantile": sweep.quantiles[0] if sweep.quantiles else 1.0,
    }
    for name, length in named.items():
        if not (math.isfinite(length) and length > 0):
            raise ResultError(f"The sweep is damaged: {name} must be positive and finite", _AGAIN)
    if any(low > high for low, high in pairwise(sweep.quantiles)):
        raise ResultError("The sweep is damaged: its quantiles must ascend", _AGAIN)
    return sweep


def at_most(length: float, scale: float) -> int:
    """A length in whole steps of a finer unit, rounded down; noise of floating point does not cost one."""
    return math.floor(round(length * scale, 3))


def at_least(length: float, scale: float) -> int:
    """A length in whole steps of a finer unit, rounded up."""
    return math.ceil(round(length * scale, 3))


def counting_remark(unit: str | None, what: str) -> str:
    """What a toolkit's setting counts, and what to do where the data differ."""
    if unit in ("s", "ms"):
        return (
            f"{what} counts audio samples, here at {SAMPLE_RATE:,} a second: at another rate multiply by rate / "
            f"{SAMPLE_RATE:,}"
        )
    if unit in ("samples", "frames", "tokens"):
        return f"{what} counts {unit}, as the lengths do"
    return f"{what} is in the unit of the lengths, {unit or 'which is unknown'}: multiply by what one is in the toolkit"


def about_batches(sweep: Sweep, batch_size_at: Callable[[float], float]) -> str | None:
    """About how many batches an epoch has where examples are sorted and cut; None where the sweep has no quantiles.

    Args:
        sweep: Its quantiles stand for the lengths.
        batch_size_at: Length → how many examples of it are a batch.
    """
    if len(sweep.quantiles) < 2:
        return None
    middles = [(low + high) / 2 for low, high in pairwise(sweep.quantiles)]
    share = sweep.lengths.count / len(middles)
    return format_number(math.ceil(sum(share / max(1.0, batch_size_at(middle)) for middle in middles)))
