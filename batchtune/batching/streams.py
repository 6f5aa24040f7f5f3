"""Batches of a stream: examples come one by one, a buffer holds some of them, and batches are made of what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from batchtune.batching.table import BucketTable
from batchtune.lengths import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamBatching:
    """A way to make batches of a stream: what `BucketedStream` runs.

    Attributes:
        algorithm: `bucket`: of one bucket's examples; `pool`: of neighbours in a buffer that is sorted and cut as a
            whole; `pivot`: of neighbours around a random example, as SpeechBrain does.
        table: A batch holds at most the batch size of its longest example's bucket.
        buffer_size: The most examples that are held at once.
        max_padding_ratio: Of `pivot`: the most of a batch that may be padding; None: any.
        shuffle: Whether chance decides which of the buffer's examples go together, and in which order batches come.
        drop_last: Whether what is left at the end of the stream, and fills no batch, is left out.
    """

    algorithm: Literal["bucket", "pool", "pivot"]
    table: BucketTable
    buffer_size: int
    max_padding_ratio: float | None = None
    shuffle: bool = True
    drop_last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StreamBatches:
    """The batches that one worker makes of its stream.

    Attributes:
        examples: Shape (examples in batches,): places in the worker's stream, from 0, batch after batch.
        ends: Shape (batches,): batch i is examples[ends[i - 1] : ends[i]].
        read: Shape (batches,): how many examples of the stream had been read when the batch was made.
    """

    examples: IntArray
    ends: IntArray
    read: IntArray


def waits(batches: StreamBatches) -> IntArray:
    """Return how long each example is held, in the order of `batches.examples`.

    That is how many examples are read from when it is read until its batch is made: 0 for the last that is read before.
    """
    sizes = np.diff(batches.ends, prepend=0)
    return np.repeat(batches.read, sizes) - batches.examples - 1


def most_held(batches: StreamBatches, lengths: npt.ArrayLike) -> float:
    """Return the most that is held at once, as true length: just before a batch is made, or at the end of the stream.

    Args:
        batches: Of any algorithm.
        lengths: Shape (examples of the stream,). An example that is never held, as one that length limits leave out,
            has to be given as 0.
    """
    values = np.asarray(lengths, dtype=np.float64)
    read = np.concatenate(([0.0], np.cumsum(values)))
    batched = np.concatenate(([0.0], np.cumsum(values[batches.examples])))
    before = np.concatenate(([0], batches.ends))
    return float(np.max(read[np.append(batches.read, values.size)] - batched[before]))
