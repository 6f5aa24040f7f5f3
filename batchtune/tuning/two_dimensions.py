"""Bucket tables over length and target length: what they would gain over length alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.table import BucketTable
from batchtune.batching.two_dimensional import BucketTable2D, optimal_table_2d
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Row, TwoDimensionalRow
from batchtune.tuning.estimates import StepSeconds

JointSizes = Callable[[FloatArray, FloatArray], IntArray]
"""(lengths, target lengths) → the largest batch size that fits, element by element, at least 1."""

_NONE = np.empty(0)
# Shuffles to average over: an epoch has many batches, so they differ little.
_SHUFFLES = 3


def two_dimensional_rows(
    lengths: Lengths,
    sizes: JointSizes,
    step_seconds: StepSeconds | None,
    rows: Sequence[Row],
    *,
    proven: JointSizes | None = None,
    measured: FloatArray = _NONE,
) -> list[TwoDimensionalRow]:
    """The best tables over both lengths, beside the best over length alone with as many buckets.

    Times and numbers of batches are those of simulated epochs on one rank, the same shuffles for both.

    Args:
        lengths: The data set, with targets.
        sizes: What fits.
        step_seconds: The time of one step; None: batches are what is minimised.
        rows: Of the sweep; those of `optimal` that are sized by the frontier, with the fewest and the most buckets, are
            compared with.
        proven: What is proven to fit, 0 where nothing is; None: not known.
        measured: Lengths at which boundaries are worth trying besides.

    Returns:
        In ascending order of the number of buckets; empty where there is no such row.

    Raises:
        ValueError: The data set has no targets.
    """
    if lengths.targets is None:
        raise ValueError("the data set has no target lengths")
    compared = _compared(rows)
    if not compared:
        return []

    def costs(long: FloatArray, target: FloatArray) -> FloatArray:
        batch = sizes(long, target).astype(np.float64)
        return 1 / batch if step_seconds is None else step_seconds(batch, long, target) / batch

    tables = optimal_table_2d(
        lengths.values,
        lengths.targets,
        sizes,
        costs,
        [row.num_buckets for row in compared],
        candidates=np.unique(np.concatenate([measured, *(row.boundaries for row in compared)])),
    )
    return [
        _row(row, table, lengths, lengths.targets, step_seconds, proven)
        for row, table in zip(compared, tables, strict=True)
    ]


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Of `optimal`, those with the fewest and the most buckets; sized by the frontier, as the others here are."""
    of_optimal = [row for row in rows if row.strategy == "optimal" and row.sizing == "frontier"]
    by_count = {row.num_buckets: row for row in of_optimal}
    return [by_count[count] for count in sorted({min(by_count), max(by_count)})] if by_count else []


def _row(
    row: Row,
    table: BucketTable2D,
    lengths: Lengths,
    targets: FloatArray,
    step_seconds: StepSeconds | None,
    proven: JointSizes | None,
) -> TwoDimensionalRow:
    one = BucketTable(np.asarray(row.boundaries), np.asarray(row.batch_sizes, dtype=np.int64))
    one_batches, one_seconds = _simulated(one.assign(lengths.values), one.batch_sizes, lengths, targets, step_seconds)
    batches, seconds = _simulated(
        table.assign(lengths.values, targets), table.batch_sizes, lengths, targets, step_seconds
    )
    return TwoDimensionalRow(
        num_buckets=row.num_buckets,
        buckets=list(zip(table.boundaries.tolist(), table.target_boundaries.tolist(), strict=True)),
        batch_sizes=table.batch_sizes.tolist(),
        batches=batches,
        estimated_epoch_seconds=seconds,
        one_dimensional_batches=one_batches,
        one_dimensional_epoch_seconds=one_seconds,
        unproven=None
        if proven is None
        else int(np.count_nonzero(table.batch_sizes > proven(table.boundaries, table.target_boundaries))),
    )


def _simulated(
    buckets: IntArray, batch_sizes: IntArray, lengths: Lengths, targets: FloatArray, step_seconds: StepSeconds | None
) -> tuple[int, float | None]:
    """The number of batches, and the mean time of an epoch."""
    grouped = epochs.group(buckets.astype(np.min_scalar_type(batch_sizes.size)), batch_sizes.size)
    layout = epochs.lay_out(grouped.counts, batch_sizes, epochs.Dealing())
    if step_seconds is None:
        return int(layout.batch_sizes.size), None
    total = 0.0
    for epoch in range(_SHUFFLES):
        made = epochs.simulate(grouped, layout, epochs.Drawing(epoch=epoch), lengths.values, targets)
        total += float(np.sum(step_seconds(made.batch_sizes, made.lengths, made.targets)))
    return int(layout.batch_sizes.size), total / _SHUFFLES
