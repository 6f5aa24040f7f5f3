"""The lengths of a data set, sorted, and of a stream, in its order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from batchtune.errors import ManifestError, shortened
from batchtune.records import HistogramBin, LengthsSummary, ReadingRecord
from batchtune.records import Unit as Unit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]

UNITS: tuple[Unit, ...] = get_args(Unit)
# The units of speech; its frameworks make bucket tables, those of text don't.
SPEECH_UNITS: tuple[Unit, ...] = ("s", "ms", "samples", "frames")
# 8 GiB of lengths: a manifest that lists more examples one by one would hardly be read.
_MOST_HELD = 1 << 30
_HASHED_AT_ONCE = 1 << 20
# Rows that a training script's batches are drawn from, and how many of these are the longest.
_MOST_ROWS = 40_000
_LONGEST_ROWS = 1000
# Rows that are kept in their order: 128 MiB of lengths.
_MOST_IN_ORDER = 1 << 24

_QUANTILES = 1000
_BINS = 60
# If the longest is more than this many times the shortest, even bins would put nearly all into the first.
_WIDE = 200.0


def ceil_div(count: int, size: int) -> int:
    """Return the quotient rounded up: how many batches of that size hold all examples."""
    return -(-count // size)


def largest_first(values: AnyArray) -> npt.NDArray[np.intp]:
    """Return the order of values from the largest on; equal ones stay in their order."""
    return np.argsort(-values, kind="stable")


def spaced(count: int) -> range:
    """Return the indices of at most 200 of this many examples, evenly spaced from the first on."""
    every = max(1, count // 200)
    return range(0, count, every)[:200]


class RowLength(NamedTuple):
    """A row of a manifest: its number, from 0, its length, and its target length, if it has one."""

    number: int
    length: float
    target: float | None


def rows_of(values: FloatArray, targets: FloatArray | None) -> tuple[RowLength, ...]:
    """Return the rows of a manifest; of very many, the `spaced` ones, others evenly, and the longest."""
    indices = np.arange(values.size)
    if values.size > _MOST_ROWS:
        every = ceil_div(values.size, _MOST_ROWS)
        chosen = [np.asarray(spaced(values.size)), indices[::every]]
        of_rows = [values] if targets is None else [values, targets]
        chosen += [
            np.argpartition(of, -_LONGEST_ROWS)[-_LONGEST_ROWS:] for of in of_rows
        ]
        indices = np.unique(np.concatenate(chosen))
    lengths = values[indices].tolist()
    longest: list[float] | list[None] = [None] * indices.size
    if targets is not None:
        longest = targets[indices].tolist()
    return tuple(map(RowLength, indices.tolist(), lengths, longest))


@dataclass(frozen=True, eq=False)
class Runs:
    """Examples in descending order of length, then of target length, with equal ones counted; arrays of shape (runs,).

    No two runs have the same length and target length.
    """

    values: FloatArray
    targets: FloatArray | None
    counts: IntArray

    @classmethod
    def of(
        cls, values: FloatArray, targets: FloatArray | None, counts: IntArray | None
    ) -> Runs:
        """Sort and count examples, arrays of one shape; each is `counts` examples, by default one."""
        if targets is None and counts is None:
            values = np.sort(values)[::-1]  # several times as fast as an order
        else:
            keys = [values]
            if targets is not None:
                keys = [targets, values]
            order = np.lexsort(keys)[::-1]
            values = values[order]
        begins = np.diff(values, prepend=np.nan) != 0
        if targets is not None:
            # No -0.0, which equals 0.0 but has another fingerprint.
            targets = targets[order] + 0.0
            begins |= np.diff(targets, prepend=np.nan) != 0
            targets = targets[begins]
        starts = np.flatnonzero(begins)
        if counts is None:
            numbers = np.diff(starts, append=values.size)
        else:
            numbers = np.add.reduceat(counts[order], starts)
        return cls(values[starts], targets, numbers.astype(np.int64))

    @cached_property
    def ends(self) -> IntArray:
        """How many examples each run and those before it hold."""
        return np.cumsum(self.counts)

    def at(self, positions: npt.ArrayLike) -> IntArray:
        """Return the runs of the examples at these positions, from 0, in descending order of length."""
        return np.searchsorted(self.ends, positions, side="right")

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal over the runs themselves."""
        digest = hashlib.sha256(np.ascontiguousarray(self.values, dtype="<f8").data)
        if self.targets is not None:
            digest.update(np.ascontiguousarray(self.targets, dtype="<f8").data)
        digest.update(np.ascontiguousarray(self.counts, dtype="<i8").data)
        return digest.hexdigest()

    def each(self, values: FloatArray) -> FloatArray:
        """Return one value for each example, shape (count,), from one for each run.

        Raises:
            ManifestError: There are too many examples to hold them all.
        """
        count = int(self.ends[-1])
        if count > _MOST_HELD:
            raise ManifestError(
                f"{count:,} examples are too many to hold each of them in memory",
                "Name a part of the data, or a sample of it, for this command.",
            )
        return np.repeat(values, self.counts)

    def _repeated(self, values: FloatArray) -> Iterator[memoryview]:
        """Yield the values of all examples as little-endian doubles, some at a time."""
        firsts = np.arange(0, self.ends[-1], _HASHED_AT_ONCE)
        for first in firsts.tolist():
            last = min(first + _HASHED_AT_ONCE, int(self.ends[-1]))
            start, stop = self.at([first, last - 1]).tolist()
            held = np.clip(self.ends[start : stop + 1], first, last)
            numbers = np.diff(held, prepend=first)
            some = np.repeat(values[start : stop + 1], numbers)
            yield np.ascontiguousarray(some, dtype="<f8").data

    def fingerprint(self) -> str:
        """Return what `Lengths.fingerprint` is; takes about a second for each 100 million examples."""
        digest = hashlib.sha256()
        for values in (self.values, self.targets):
            if values is not None:
                for some in self._repeated(values):
                    digest.update(some)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a data set's examples, in descending order.

    Build one with `Lengths.of`, which sorts and checks.

    Attributes:
        runs: The lengths, positive and finite, with the target lengths of the same examples, or None.
        left_out: Reason → number of examples that were left out ("shorter than --min-length 1" → 12).
        truncated: How many examples are longer than --truncate, and count as that long.
        rows: Rows of the manifest, by `rows_of`; empty without one.
        in_order: The lengths and target lengths of all its rows; None without one, or if there are too many.
        notes: Findings of the reader for the user, as full sentences.
        reading: How the manifest was read; None without one.
        known_fingerprint: The fingerprint, if it need not be computed.
    """

    runs: Runs
    unit: Unit | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reading: ReadingRecord | None = None
    truncated: int = 0
    rows: tuple[RowLength, ...] = ()
    in_order: tuple[FloatArray, FloatArray | None] | None = None
    known_fingerprint: str | None = None

    @classmethod
    def of(
        cls,
        values: npt.ArrayLike,
        targets: npt.ArrayLike | None = None,
        *,
        counts: IntArray | None = None,
        unit: Unit | None = None,
    ) -> Lengths:
        """Sort lengths in descending order, with their targets; each is `counts` examples, by default one.

        Raises:
            ValueError: No lengths, or one that is not positive and finite; targets of another shape, or one that is
                negative or not finite.
        """
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or array.size == 0:
            raise ValueError(
                f"lengths must be a non-empty one-dimensional array, got shape {array.shape}"
            )
        if not (np.isfinite(array).all() and array.min() > 0):
            raise ValueError("lengths must be positive and finite")
        target_lengths = None
        if targets is not None:
            target_lengths = np.asarray(targets, dtype=np.float64)
            if target_lengths.shape != array.shape:
                raise ValueError(
                    f"{target_lengths.size} targets for {array.size} lengths"
                )
            if not (np.isfinite(target_lengths).all() and target_lengths.min() >= 0):
                raise ValueError("target lengths must be finite and not negative")
        return cls(Runs.of(array, target_lengths, counts), unit)

    def with_rows(self, values: FloatArray, targets: FloatArray | None) -> Lengths:
        """Return the same lengths, and the rows of the manifest that they come from."""
        in_order = None
        if values.size <= _MOST_IN_ORDER:
            in_order = (values, targets)
        return replace(self, rows=rows_of(values, targets), in_order=in_order)

    @cached_property
    def values(self) -> FloatArray:
        """The length of each example, shape (count,). Raises as `Runs.each` does."""
        return self.runs.each(self.runs.values)

    @cached_property
    def targets(self) -> FloatArray | None:
        """The target length of each example, shape (count,), or None. Raises as `Runs.each` does."""
        if self.runs.targets is None:
            return None
        return self.runs.each(self.runs.targets)

    @property
    def has_targets(self) -> bool:
        """Whether the examples have target lengths."""
        return self.runs.targets is not None

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.runs.ends[-1])

    @property
    def longest(self) -> float:
        """The longest length."""
        return float(self.runs.values[0])

    @property
    def shortest(self) -> float:
        """The shortest length."""
        return float(self.runs.values[-1])

    @cached_property
    def total(self) -> float:
        """The true length of all examples together."""
        return float(np.sum(self.runs.values * self.runs.counts))

    @cached_property
    def histogram(self) -> Histogram:
        """The distinct lengths in ascending order, and how often each occurs."""
        return Histogram.of(self.runs.values, self.runs.counts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal over the lengths in descending order (then the targets), as little-endian doubles."""
        return self.known_fingerprint or self.runs.fingerprint()

    def sample(self, positions: npt.ArrayLike) -> Lengths:
        """Return the examples at these positions, from 0, in descending order of length."""
        runs = self.runs
        counts = np.bincount(runs.at(positions), minlength=runs.counts.size)
        chosen = counts > 0
        targets = runs.targets
        if targets is not None:
            targets = targets[chosen]
        return Lengths(Runs(runs.values[chosen], targets, counts[chosen]), self.unit)

    def evenly(self, most: int) -> Lengths:
        """Return at most this many examples, evenly spaced in order of length, each the middle of its neighbours."""
        if most >= self.count:
            return self
        return self.sample((2 * np.arange(most) + 1) * self.count // (2 * most))

    def padded_to(self, multiple_of: float) -> Lengths:
        """Return these lengths rounded up to a multiple, as batches are padded. See the function `padded_to`."""
        runs = self.runs
        return Lengths.of(
            padded_to(runs.values, multiple_of),
            runs.targets,
            counts=runs.counts,
            unit=self.unit,
        )

    def worst_target(self, length: float) -> float | None:
        """Return the longest target of the examples that are at most `length` long; None without targets."""
        if not self.has_targets:
            return None
        up_to = int(np.searchsorted(self.runs.values[::-1], length, side="right"))
        if not up_to:
            raise ValueError(f"no example is at most {length} long")
        return float(self._worst_targets[up_to - 1])

    @cached_property
    def _worst_targets(self) -> FloatArray:
        """The longest target of the 1, 2, … runs of the shortest examples, shape (runs,)."""
        assert self.runs.targets is not None
        return np.maximum.accumulate(self.runs.targets[::-1])

    def count_within(self, length: float, target_length: float | None) -> int:
        """Return how many examples are at most `length` long, with a target of at most `target_length` where given."""
        targets = self.runs.targets
        if targets is None or target_length is None:
            return self.histogram.count_up_to(length)
        within = (self.runs.values <= length) & (targets <= target_length)
        return int(self.runs.counts[within].sum())

    def count_beyond(self, length: float) -> int:
        """Return how many examples are longer than `length`."""
        return self.count - self.histogram.count_up_to(length)

    def summary(self) -> LengthsSummary:
        """Return the record that every result file carries."""
        return LengthsSummary(
            count=self.count,
            total=self.total,
            min=self.shortest,
            max=self.longest,
            unit=self.unit,
            fingerprint=self.fingerprint,
            reading=self.reading,
            left_out=self.left_out,
            truncated=self.truncated,
        )

    def bins(self, count: int = _BINS) -> list[HistogramBin]:
        """Return ascending bins that cover all: even, or of even ratio where lengths span more than 200 times."""
        shortest = self.shortest
        longest = self.longest
        below = math.nextafter(shortest, 0)
        if shortest == longest:
            return [HistogramBin(from_=below, to=longest, count=self.count)]
        space = np.geomspace if longest > _WIDE * shortest else np.linspace
        edges = space(shortest, longest, count + 1)
        edges[0] = below
        edges[-1] = longest
        numbers = np.diff(self.histogram.counts_up_to(edges)).tolist()
        return [
            HistogramBin(from_=low, to=high, count=number)
            for (low, high), number in zip(
                pairwise(edges.tolist()), numbers, strict=True
            )
        ]

    def quantiles(self) -> list[float]:
        """Return the quantiles i / 1000, ascending, shape (1001,), by nearest rank: each is a length of the data."""
        ranks = np.ceil(np.arange(_QUANTILES + 1) / _QUANTILES * self.count)
        places = np.maximum(ranks.astype(np.int64), 1) - 1
        quantiles: list[float] = self.histogram.at(places).tolist()
        return quantiles


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a stream: how many examples it holds, its size in bytes, and whether it breaks off."""

    label: str
    count: int
    size: int
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamLengths:
    """The lengths of a data set in their stored order, shard after shard.

    Attributes:
        lengths: The same, sorted, with their unit, notes and the number left out.
        values, targets: In the order of the data set, shape (count,); no targets without target lengths.
        shards: In their order; empty if the data set is not a set of shards.
        repeated_ids: How many keys occur more than once; None if samples have no keys.
    """

    lengths: Lengths
    values: FloatArray
    targets: FloatArray | None
    shards: Sequence[Shard]
    repeated_ids: int | None


def padded_to(lengths: npt.ArrayLike, multiple_of: float) -> FloatArray:
    """Return the smallest multiples that are not below the lengths, which are of any shape and positive.

    Multiples of a decimal fraction have rounding errors: a length that lies within a billionth of a multiple counts as
    one, and multiples are given with twelve digits, or as the length itself where that is more.
    """
    if not (np.isfinite(multiple_of) and multiple_of > 0):
        raise ValueError(f"multiple_of must be positive and finite, got {multiple_of}")
    values = np.asarray(lengths, dtype=np.float64)
    multiples = (
        np.maximum(1.0, np.ceil(values / multiple_of * (1 - 1e-9))) * multiple_of
    )
    digits = 10.0 ** (11 - np.floor(np.log10(multiples)))
    return np.maximum(np.round(multiples * digits) / digits, values)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Distinct lengths, strictly ascending, and how often each occurs; shape (distinct,)."""

    lengths: FloatArray
    counts: IntArray

    @classmethod
    def of(cls, values: FloatArray, counts: IntArray) -> Histogram:
        """Sort and count values, each of which occurs `counts` times."""
        runs = Runs.of(values, None, counts)
        return cls(runs.values[::-1], runs.counts[::-1])

    @cached_property
    def cumulative(self) -> IntArray:
        """Shape (distinct,): number of examples at most that long."""
        return np.cumsum(self.counts)

    @cached_property
    def cumulative_total(self) -> FloatArray:
        """Shape (distinct,): true length of the examples at most that long."""
        return np.cumsum(self.lengths * self.counts)

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.cumulative[-1])

    def at(self, positions: npt.ArrayLike) -> FloatArray:
        """Return the lengths of the examples at these positions, from 0, in ascending order of length."""
        return self.lengths[np.searchsorted(self.cumulative, positions, side="right")]

    def total_of(self, counts: IntArray) -> FloatArray:
        """Return the true length of each number of the shortest examples."""
        last = np.searchsorted(self.cumulative, counts)
        beyond = self.cumulative[last] - counts
        return self.cumulative_total[last] - self.lengths[last] * beyond

    def count_up_to(self, length: float) -> int:
        """Return how many examples are at most `length` long."""
        return int(self.counts_up_to(np.array(length)))

    def counts_up_to(self, lengths: FloatArray) -> IntArray:
        """Return how many examples are at most as long as each of these lengths, of any shape."""
        up_to = np.concatenate(([0], self.cumulative))
        return up_to[np.searchsorted(self.lengths, lengths, side="right")]


# Numbers that users give as arguments of the Python interface.

# Counters have 64 bits, and there are further epochs and batches after the largest.
_LARGEST = 2**62


def whole(name: str, value: float, lowest: int = 0, *, highest: int = _LARGEST) -> int:
    """Return the value as an int; raise ValueError unless it is a whole number from `lowest` to `highest`.

    Floats count, as a size may have been computed.
    """
    if not is_number(value) or value != value // 1 or value < lowest:
        raise ValueError(
            f"{name} must be a whole number, at least {lowest}, got {shortened(value)}"
        )
    if value > highest:
        raise ValueError(f"{name} must be at most {highest:,}, got {shortened(value)}")
    return int(value)


def is_number(value: object) -> bool:
    """Return whether the value is a number of Python or NumPy."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
