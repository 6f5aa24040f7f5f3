"""SpeechBrain's `dynamic_bucketed_batch` on lengths alone, batch for batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray
from batchtune.streams.bucketed import (
    LengthReader,
    SortedBuffer,
    StreamBatches,
    around_pivot,
)


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
    """

    target_batch_numel: float
    max_batch_numel: float | None = None
    max_batch_size: int | None = None
    max_padding_ratio: float | None = 0.2
    buffersize: int = 1024
    drop_end: bool = False
    min_sample_len: float | None = None
    max_sample_len: float | None = None

    def keeps(self, lengths: FloatArray) -> npt.NDArray[np.bool_]:
        """Return which examples the length limits keep."""
        kept = np.ones(lengths.shape, dtype=np.bool_)
        if self.min_sample_len is not None:
            kept &= lengths >= self.min_sample_len
        if self.max_sample_len is not None:
            kept &= lengths <= self.max_sample_len
        return kept


def speechbrain_batches(
    lengths: npt.ArrayLike, settings: PivotSettings, random: random.Random
) -> StreamBatches:
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
        ValueError: Two neighbours in the buffer are of length 0, where SpeechBrain raises a ZeroDivisionError.
    """
    values = np.asarray(lengths, dtype=np.float64)
    kept = np.flatnonzero(settings.keeps(values))
    reader = LengthReader(values[kept])
    examples: list[int] = []
    ends: list[int] = []
    read: list[int] = []
    try:
        for batch in _batches(reader, kept.size, settings, random):
            examples += batch
            ends.append(len(examples))
            # Anything after the last valid example is read only when the stream has ended.
            read.append(
                values.size if reader.ended else int(kept[reader.count - 1]) + 1
            )
    except ZeroDivisionError:
        raise ValueError(
            f"batch {len(ends) + 1}: SpeechBrain's padding_ratio divides by zero, as two examples are of length 0; "
            "leave them out with min_sample_len"
        ) from None
    return StreamBatches(
        examples=kept[np.array(examples, dtype=np.int64)],
        ends=np.array(ends, dtype=np.int64),
        read=np.array(read, dtype=np.int64),
    )


def _batches(
    reader: LengthReader, count: int, settings: PivotSettings, random: random.Random
) -> Iterator[list[int]]:
    """Yield each batch of a stream of `count` examples, as places in it, the longest example first."""
    most_cells = (
        math.inf if settings.max_batch_numel is None else settings.max_batch_numel
    )
    most_examples = (
        count if settings.max_batch_size is None else settings.max_batch_size
    )
    most_padding = (
        math.inf if settings.max_padding_ratio is None else settings.max_padding_ratio
    )
    target = settings.target_batch_numel

    def admits(count: int, longest: float) -> bool:
        return count * longest <= most_cells

    def grows(count: int, longest: float) -> bool:
        return count < most_examples and count * longest < target

    held = SortedBuffer()
    buffer_size = settings.buffersize if settings.buffersize > 0 else count + 1
    while True:
        if not reader.ended:
            held.fill(reader, buffer_size)
        if reader.ended and (settings.drop_end or not held.places):
            return
        pivot = random.randint(0, len(held.places) - 1)
        batch = held.take(
            *around_pivot(held.lengths, pivot, admits, most_padding, grows)
        )
        batch.reverse()
        yield batch
