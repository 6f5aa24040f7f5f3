"""The lengths of a data set, sorted, and of a stream, in its order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast, get_args

import numpy as np
import numpy.typing as npt

from batchtune.results import LengthsSummary, ReadingRecord
from batchtune.results import Unit as Unit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

UNITS: tuple[Unit, ...] = get_args(Unit)
# The units of speech; its frameworks make bucket tables, those of text don't.
SPEECH_UNITS: tuple[Unit, ...] = ("s", "ms", "samples", "frames")


def spaced(count: int) -> range:
    """Return the indices of at most 200 of so many examples, evenly spaced from the first on."""
    every = max(1, count // 200)
    return range(0, count, every)[:200]


def rows_of(
    values: FloatArray, targets: FloatArray | None
) -> tuple[tuple[float, float | None], ...]:
    """Return the lengths and target lengths of the `spaced` rows of a manifest."""
    indices = spaced(values.size)
    if targets is None:
        return tuple((float(values[index]), None) for index in indices)
    return tuple((float(values[index]), float(targets[index])) for index in indices)


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of a data set's examples, in descending order.

    Build one with `Lengths.of`, which sorts and checks.

    Attributes:
        values: Shape (count,), positive and finite.
        targets: Shape (count,), the target length of the same example, or None. Within equal lengths, descending too.
        left_out: Reason → number of examples that were left out ("shorter than --min-length 1" → 12).
        truncated: How many examples are longer than --truncate, and count as that long.
        rows: Lengths and target lengths of some rows of the manifest, by `rows_of`; empty without one.
        notes: Findings of the reader for the user, as full sentences.
        reading: How the manifest was read; None without one.
    """

    values: FloatArray
    targets: FloatArray | None = None
    unit: Unit | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reading: ReadingRecord | None = None
    truncated: int = 0
    rows: tuple[tuple[float, float | None], ...] = ()

    @classmethod
    def of(
        cls,
        values: npt.ArrayLike,
        targets: npt.ArrayLike | None = None,
        *,
        unit: Unit | None = None,
        left_out: dict[str, int] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Lengths:
        """Sort lengths in descending order, with their targets.

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
        if targets is None:
            return cls(np.sort(array)[::-1].copy(), None, unit, left_out or {}, notes)
        target_lengths = np.asarray(targets, dtype=np.float64)
        if target_lengths.shape != array.shape:
            raise ValueError(f"{target_lengths.size} targets for {array.size} lengths")
        if not (np.isfinite(target_lengths).all() and target_lengths.min() >= 0):
            raise ValueError("target lengths must be finite and not negative")
        order = np.lexsort((target_lengths, array))[::-1]
        return cls(array[order], target_lengths[order], unit, left_out or {}, notes)

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.values.size)

    @property
    def longest(self) -> float:
        """The longest length."""
        return float(self.values[0])

    @property
    def shortest(self) -> float:
        """The shortest length."""
        return float(self.values[-1])

    @cached_property
    def total(self) -> float:
        """The true length of all examples together."""
        return float(self.values.sum())

    @cached_property
    def histogram(self) -> Histogram:
        """The distinct lengths in ascending order, and how often each occurs."""
        lengths, counts = np.unique(self.values, return_counts=True)
        return Histogram(lengths, counts.astype(np.int64))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal over the lengths in descending order (then the targets), as little-endian doubles."""
        digest = hashlib.sha256(np.ascontiguousarray(self.values, dtype="<f8").data)
        if self.targets is not None:
            digest.update(np.ascontiguousarray(self.targets, dtype="<f8").data)
        return digest.hexdigest()

    def padded_to(self, multiple_of: float) -> Lengths:
        """Return these lengths rounded up to a multiple, as batches are padded. See the function `padded_to`."""
        return Lengths.of(
            padded_to(self.values, multiple_of), self.targets, unit=self.unit
        )

    def worst_target(self, length: float) -> float | None:
        """Return the longest target of the examples that are at most `length` long; None without targets."""
        if self.targets is None:
            return None
        up_to = int(np.searchsorted(self.values[::-1], length, side="right"))
        if not up_to:
            raise ValueError(f"no example is at most {length} long")
        return float(self._worst_targets[up_to - 1])

    @cached_property
    def _worst_targets(self) -> FloatArray:
        """The longest target of the 1, 2, … shortest examples, shape (count,)."""
        assert self.targets is not None
        return cast(FloatArray, np.maximum.accumulate(self.targets[::-1]))

    def count_within(self, length: float, target_length: float | None = None) -> int:
        """Return how many examples are at most `length` long, with a target of at most `target_length` where given."""
        count = self.histogram.count_up_to(length)
        if self.targets is None or target_length is None or not count:
            return count
        if target_length >= self._worst_targets[count - 1]:
            return count
        return int(
            np.count_nonzero(self.targets[self.count - count :] <= target_length)
        )

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
    return cast(FloatArray, np.maximum(np.round(multiples * digits) / digits, values))


@dataclass(frozen=True, eq=False)
class Histogram:
    """Distinct lengths, strictly ascending, and how often each occurs; shape (distinct,)."""

    lengths: FloatArray
    counts: IntArray

    @cached_property
    def cumulative(self) -> IntArray:
        """Shape (distinct,): number of examples at most that long."""
        return cast(IntArray, np.cumsum(self.counts))

    @cached_property
    def cumulative_total(self) -> FloatArray:
        """Shape (distinct,): true length of the examples at most that long."""
        return cast(FloatArray, np.cumsum(self.lengths * self.counts))

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.cumulative[-1])

    def count_up_to(self, length: float) -> int:
        """Return how many examples are at most `length` long."""
        index = int(np.searchsorted(self.lengths, length, side="right"))
        return int(self.cumulative[index - 1]) if index else 0
