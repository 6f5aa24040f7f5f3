"""SpeechBrain's `dynamic_bucketed_batch` on lengths alone, batch for batch."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from batchtune.errors import shortened
from batchtune.lengths import FloatArray
from batchtune.streams.bucketed import StreamBatches

# Whole numbers are exact as floats up to here.
_EXACT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotSettings:
    """The parameters of SpeechBrain's `dynamic_bucketed_batch` with `indices_around_random_pivot`.

    A batch begins as one random example of the sorted buffer, and grows to either side, by the neighbour that pads
    least, until its padded length reaches the target or neither neighbour may join.

    Attributes:
        target_batch_numel: A batch grows until its padded length is as large. Required: SpeechBrain has no default.
        max_batch_numel: No example joins that would make the padded length larger; a longer example is a batch of
            one. None: a batch overshoots its target, by one example and by how much that pads the others.
        max_batch_size: The most examples of a batch; None: any number. Below 1: one.
        max_padding_ratio: No example joins that would make padding a larger part; None: any. Below 0: batches of one.
        buffersize: A batch is made whenever this many examples are held. Below 1: only when all of the stream is held.
        drop_end: Whether to leave out the examples that are held at the end of the stream.
        min_sample_len, max_sample_len: Shorter and longer examples are left out; None: any length.

    Raises ValueError if one of them is not a number; SpeechBrain raises a TypeError later, or reads on for ever.
    """

    target_batch_numel: float
    max_batch_numel: float | None = None
    max_batch_size: int | None = None
    max_padding_ratio: float | None = 0.2
    buffersize: int = 1024
    drop_end: bool = False
    min_sample_len: float | None = None
    max_sample_len: float | None = None

    def __post_init__(self) -> None:
        optional = ("max_batch_numel", "max_batch_size", "max_padding_ratio", "min_sample_len", "max_sample_len")
        for name in ("target_batch_numel", "buffersize", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if name in ("buffersize", "max_batch_size"):
                rule = "a whole number"
                valid = isinstance(value, Integral)
            else:
                rule = "a number"
                valid = isinstance(value, Real) and not math.isnan(value)
            if name in optional:
                rule += " or None"
            if not valid:
                raise ValueError(f"{name} must be {rule}, got {shortened(value)}")

    def keeps(self, lengths: FloatArray) -> npt.NDArray[np.bool_]:
        """Return which examples the length limits keep."""
        kept = np.ones(lengths.shape, dtype=np.bool_)
        if self.min_sample_len is not None:
            kept &= lengths >= self.min_sample_len
        if self.max_sample_len is not None:
            kept &= lengths <= self.max_sample_len
        return kept


def speechbrain_batches(lengths: npt.ArrayLike, settings: PivotSettings, random: random.Random) -> StreamBatches:
    """Return the batches that SpeechBrain's `dynamic_bucketed_batch` makes of a stream with these lengths.

    They equal SpeechBrain's, example for example, and leave `random` in the same state, if its `random` has the same
    state before. SpeechBrain draws from the process-wide `random`, which a DataLoader reseeds in each worker from
    torch's seed; without workers its state is arbitrary unless the program seeds it.

    Examples that the length limits leave out count as read. The examples of a batch are the longest first, as
    SpeechBrain hands them to its collate_fn. Lengths that are not whole numbers are added up in SpeechBrain's order:
    rounding decides between neighbours that pad equally.

    `lengths`, shape (examples,), are in the order of the stream and in the unit of the settings.
    Source: `speechbrain.dataio.iterators`, SpeechBrain 1.1.

    Raises:
        ValueError: A length is negative or not finite; whole lengths are so large that floats can't hold their sums; or
            two neighbours in the buffer are of length 0, where SpeechBrain raises a ZeroDivisionError.
    """
    given = np.asarray(lengths)
    if given.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {given.shape}")
    values = given.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError("lengths must be finite and not negative")
    kept = np.flatnonzero(settings.keeps(values))
    stream = values[kept]
    buffer_size = settings.buffersize if settings.buffersize > 0 else stream.size + 1
    most_held = min(buffer_size, stream.size)
    if given.dtype.kind in "iu" and float(stream.max(initial=0)) * most_held >= _EXACT:
        raise ValueError(
            f"lengths are up to {int(given.max())}: the sum of {most_held} is not exact; use a larger unit"
        )

    examples: list[int] = []
    ends: list[int] = []
    read: list[int] = []
    for batch, count_read in _batches(stream.tolist(), buffer_size, settings, random):
        examples += batch
        ends.append(len(examples))
        # Anything after the last valid example is read only when the stream has ended.
        read.append(values.size if count_read is None else int(kept[count_read - 1]) + 1)
    return StreamBatches(
        examples=kept[np.array(examples, dtype=np.int64)],
        ends=np.array(ends, dtype=np.int64),
        read=np.array(read, dtype=np.int64),
    )


def _batches(
    stream: list[float], buffer_size: int, settings: PivotSettings, random: random.Random
) -> Iterator[tuple[list[int], int | None]]:
    """Yield each batch, as places in the stream, and how many examples were read for it; None: all of the stream."""
    held_lengths: list[float] = []  # ascending; of equal lengths the earlier first
    held_places: list[int] = []
    made = 0
    for place, length in enumerate(stream):
        index = bisect_right(held_lengths, length)
        held_lengths.insert(index, length)
        held_places.insert(index, place)
        if len(held_lengths) == buffer_size:
            made += 1
            yield _taken(held_lengths, held_places, settings, random, made), place + 1
    while held_lengths and not settings.drop_end:
        made += 1
        yield _taken(held_lengths, held_places, settings, random, made), None


def _taken(
    held_lengths: list[float], held_places: list[int], settings: PivotSettings, random: random.Random, number: int
) -> list[int]:
    """Take batch `number`, counted from 1, out of the buffer and return its places, the longest example first."""
    pivot = random.randint(0, len(held_lengths) - 1)
    try:
        first, last = _window(held_lengths, pivot, settings)
    except ZeroDivisionError:
        raise ValueError(
            f"batch {number}: SpeechBrain's padding_ratio divides by zero, as two examples are of length 0; leave "
            "them out with min_sample_len"
        ) from None
    batch = held_places[first : last + 1]
    batch.reverse()
    del held_lengths[first : last + 1]
    del held_places[first : last + 1]
    return batch


def _window(held: list[float], pivot: int, settings: PivotSettings) -> tuple[int, int]:
    """Return the first and last index of the batch that grows around a pivot in the ascending lengths of the buffer."""
    target = settings.target_batch_numel
    most_cells = math.inf if settings.max_batch_numel is None else settings.max_batch_numel
    most_padding = math.inf if settings.max_padding_ratio is None else settings.max_padding_ratio
    most_examples = len(held) if settings.max_batch_size is None else settings.max_batch_size
    first = last = pivot
    longest = held[pivot]
    lengths = [longest]  # in the order in which they join, as it decides how their sum is rounded
    count = 1
    while count < most_examples and count * longest < target:
        count += 1
        left = math.inf
        right = math.inf
        if first > 0 and count * longest <= most_cells:
            left = 1.0 - sum(lengths, held[first - 1]) / (count * longest)
        if last + 1 < len(held) and count * held[last + 1] <= most_cells:
            right = 1.0 - sum(lengths, held[last + 1]) / (count * held[last + 1])
        if left > most_padding:
            left = math.inf
        if right > most_padding:
            right = math.inf
        if left == right == math.inf:
            break
        if left <= right:
            first -= 1
            lengths.append(held[first])
        else:
            last += 1
            longest = held[last]
            lengths.append(longest)
    return first, last
