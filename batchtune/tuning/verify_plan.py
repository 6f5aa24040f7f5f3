"""Which batches a verification runs: the worst shape of each bucket, then an epoch's batches as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.epochs import EpochShapes, Ordering
from batchtune.batching.layout import Dealing, lay_out
from batchtune.batching.table import BucketTable
from batchtune.errors import ResultError
from batchtune.lengths import IntArray, Lengths
from batchtune.shapes import BatchShape
from batchtune.units import format_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The sampler that is verified, as `sampler.yaml` describes it.

    Attributes:
        table: Boundaries and batch sizes.
        max_batch_length: The largest padded length that the sweep allowed.
        ordering: In which order the epoch's batches come.
        drop_last: Whether batches that are not full are left out.
        multiple_of: What batches are padded to a multiple of; None: to their longest example.
    """

    table: BucketTable
    max_batch_length: float
    ordering: Ordering = "random"
    drop_last: bool = False
    multiple_of: float | None = None

    def padded(self, lengths: Lengths) -> Lengths:
        """The lengths as batches are padded to them."""
        return lengths if self.multiple_of is None else lengths.padded_to(self.multiple_of)

    def with_sizes(self, batch_sizes: IntArray) -> Candidate:
        """The same with other batch sizes."""
        return replace(self, table=BucketTable(self.table.boundaries, batch_sizes))


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch to run, and the bucket it is of."""

    shape: BatchShape
    bucket: int


@dataclass(frozen=True, slots=True, eq=False)
class Batches(EpochShapes):
    """An epoch's batches, in their order, to run one by one."""

    def __getitem__(self, index: int) -> PlannedBatch:
        target = None if self.targets is None else float(self.targets[index])
        shape = BatchShape(int(self.batch_sizes[index]), float(self.lengths[index]), target)
        return PlannedBatch(shape, int(self.buckets[index]))


def check_table(lengths: Lengths, table: BucketTable) -> None:
    """Raises ResultError where examples lie beyond the last boundary: no bucket would take them."""
    last = float(table.boundaries[-1])
    beyond = int(np.count_nonzero(lengths.values > last))
    if beyond:
        raise ResultError(
            f"the last of the bucket_boundaries is {format_length(last, lengths.unit)}, but {beyond:,} of "
            f"{lengths.count:,} examples are longer, up to {format_length(lengths.longest, lengths.unit)}",
            "Add a boundary that is no less, or leave the longer ones out with --max-length.",
        )


def worst_batches(
    lengths: Lengths, table: BucketTable, needs: Callable[[BatchShape], float] | None = None
) -> list[PlannedBatch]:
    """The largest batch that each bucket can form on these data, the one that needs most memory first.

    It has as many examples as the bucket's batch size and its data allow, and the longest length and the longest
    target that occur in the bucket, which two examples of it have, if not one. Where batches hold a single example,
    that with the longest length and that with the longest target are tried. The longest targets of all are among
    these.

    Args:
        lengths: The data set.
        table: Its last boundary is at least the longest length.
        needs: What a shape needs in memory, to order them by; the padded length where it is not known.
    """
    needs = needs or (lambda shape: shape.padded_length)
    found = [
        PlannedBatch(shape, bucket)
        for bucket, part in _slices(lengths, table)
        for shape in _worst_of(lengths, part, int(table.batch_sizes[bucket]))
    ]
    return sorted(found, key=lambda planned: needs(planned.shape), reverse=True)


def _slices(lengths: Lengths, table: BucketTable) -> Iterator[tuple[int, slice]]:
    """Each bucket that holds an example, and where its examples lie in the (descending) lengths."""
    # values[i] <= boundary from here on, as the values descend.
    starts = lengths.count - np.searchsorted(lengths.values[::-1], table.boundaries, side="right")
    ends = np.concatenate(([lengths.count], starts[:-1]))
    for bucket in range(table.num_buckets):
        if starts[bucket] < ends[bucket]:
            yield bucket, slice(int(starts[bucket]), int(ends[bucket]))


def _worst_of(lengths: Lengths, part: slice, batch_size: int) -> list[BatchShape]:
    size, longest = min(batch_size, part.stop - part.start), float(lengths.values[part.start])
    if lengths.targets is None:
        return [BatchShape(size, longest)]
    targets = lengths.targets[part]
    if size > 1:
        return [BatchShape(size, longest, float(targets.max()))]
    at = int(targets.argmax())
    alone = [
        BatchShape(1, longest, float(targets[0])),
        BatchShape(1, float(lengths.values[part][at]), float(targets[at])),
    ]
    return list(dict.fromkeys(alone))


def shuffled_batches(lengths: Lengths, candidate: Candidate, seed: int) -> Iterator[Batches]:
    """Epoch after epoch of the sampler's batches; each epoch has a shuffle of its own, from seed + epoch.

    Raises:
        ResultError: An epoch has no batch, because `drop_last` leaves out all that are not full.
    """
    epoch = 0
    while True:
        batches = epoch_batches(lengths, candidate, seed + epoch)
        if not len(batches):
            raise ResultError(
                "drop_last leaves out every batch: no bucket holds enough examples to fill one",
                "Say drop_last: false in sampler.yaml, or make the batch sizes smaller.",
            )
        yield batches
        epoch += 1


def epoch_batches(lengths: Lengths, candidate: Candidate, seed: int) -> Batches:
    """One epoch's batches, drawn as `BucketBatchSampler` draws them."""
    dealing = Dealing(drop_last=candidate.drop_last)
    grouped = epochs.group_descending(lengths.values, candidate.table.boundaries)
    layout = lay_out(grouped.counts, candidate.table.batch_sizes, dealing)
    drawing = epochs.Drawing(ordering=candidate.ordering, seed=seed)
    made = epochs.simulate(grouped, layout, drawing, lengths.values, lengths.targets)
    return Batches(made.batch_sizes, made.lengths, made.targets, made.buckets)
