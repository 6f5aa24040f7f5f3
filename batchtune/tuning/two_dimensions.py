"""Bucket tables over length and target length: how much they would save over length alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.layout import ON_ONE_RANK, lay_out
from batchtune.batching.table import BucketTable, Limits
from batchtune.batching.two_dimensional import optimal_table_2d
from batchtune.lengths import FloatArray, IntArray
from batchtune.results import Row, TwoDimensionalRow
from batchtune.tuning.costs import Costs
from batchtune.tuning.epoch_cost import EpochCost, Pricing
from batchtune.tuning.sweep_settings import ONE_RANK

# Shuffles to average over: an epoch has many batches, so they differ little.
_SHUFFLES = 3


def two_dimensional_rows(
    pricing: Pricing, limits: Limits, costs: Costs, rows: Sequence[Row]
) -> list[TwoDimensionalRow]:
    """Return the best tables over both lengths, next to the best over length alone with as many buckets.

    Times and numbers of batches are those of simulated epochs on one rank, the same shuffles for both.

    Args:
        pricing: Of the data set.
        limits: Of the sweep.
        costs: With a joint frontier, if there is something to compare.
        rows: Of the sweep; those whose boundaries were chosen for the frontier, with the fewest and the most buckets,
            are compared with.

    Returns:
        In ascending order of the number of buckets; empty without targets, without a joint frontier or such a row.
    """
    joint, step_seconds, lengths = costs.joint_frontier, pricing.step_seconds, pricing.lengths
    compared = _compared(rows)
    if joint is None or lengths.targets is None or not compared:
        return []
    fits = joint

    def sizes(long: FloatArray, target: FloatArray) -> IntArray:
        found = fits(long, target)
        return found if limits.max_batch_size is None else np.minimum(found, limits.max_batch_size)

    def example_costs(long: FloatArray, target: FloatArray) -> FloatArray:
        batch = sizes(long, target).astype(np.float64)
        return 1 / batch if step_seconds is None else step_seconds(batch, long, target) / batch

    tables = optimal_table_2d(
        lengths.values,
        lengths.targets,
        example_costs,
        [row.num_buckets for row in compared],
        candidates=np.unique(np.concatenate([costs.joint_lengths, *(row.boundaries for row in compared)])),
    )
    alone = replace(pricing, ranks=ONE_RANK)
    sized = [replace(table, batch_sizes=sizes(*table.pairs)) for table in tables]
    return [_row(row, table, alone, costs) for row, table in zip(compared, sized, strict=True)]


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Of the rows that are sized by the frontier, as the others here are, those with the fewest and most buckets."""
    by_count = {row.num_buckets: row for row in rows if row.sizing == "frontier"}
    return [by_count[count] for count in sorted({min(by_count), max(by_count)})] if by_count else []


def _row(row: Row, table: BucketTable, pricing: Pricing, costs: Costs) -> TwoDimensionalRow:
    one = _simulated(BucketTable.of(row.boundaries, row.batch_sizes), pricing)
    both, proven = _simulated(table, pricing), costs.joint_proven
    return TwoDimensionalRow(
        num_buckets=row.num_buckets,
        buckets=list(zip(*(edges.tolist() for edges in table.pairs), strict=True)),
        batch_sizes=table.batch_sizes.tolist(),
        batches=both.tally.batches,
        estimated_epoch_seconds=both.seconds,
        one_dimensional_batches=one.tally.batches,
        one_dimensional_epoch_seconds=one.seconds,
        unproven=None if proven is None else int(np.count_nonzero(table.batch_sizes > proven(*table.pairs))),
    )


def _simulated(table: BucketTable, pricing: Pricing) -> EpochCost:
    lengths = pricing.lengths
    grouped = epochs.group(table.assign(lengths.values, lengths.targets), table.num_buckets)
    layout = lay_out(grouped.counts, table.batch_sizes, ON_ONE_RANK)
    return pricing.of_shapes(
        [
            epochs.simulate(grouped, layout, epochs.Drawing(epoch=epoch), lengths.values, lengths.targets)
            for epoch in range(_SHUFFLES)
        ]
    )
