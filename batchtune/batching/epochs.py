"""One epoch's batches: which examples are in which batch, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchtune.lengths import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class EpochBatches:
    """An epoch's batches, in their order.

    Attributes:
        order: Shape (examples in batches,): indices of examples, batch after batch.
        starts: Shape (batches + 1,): batch i holds order[starts[i] : starts[i + 1]].
        buckets: Shape (batches,): index of each batch's bucket.
    """

    order: IntArray
    starts: IntArray
    buckets: IntArray

    def __len__(self) -> int:
        return int(self.buckets.size)

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            yield self.order[start:end].tolist()
