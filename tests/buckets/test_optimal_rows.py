"""No table that may be had costs less, by what its row reports, than the one that `optimal` chooses."""

from itertools import combinations

import numpy as np
import pytest
from buckets.speech import swept
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs.measured_costs import Costs, TypicalTargets
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths


def cells(sizes, lengths):
    return 1e-4 * np.asarray(sizes, dtype=np.float64) * lengths


def constant_and_cells(sizes, lengths):
    return 0.005 + cells(sizes, lengths)


def quadratic(sizes, lengths):
    return (
        0.005
        + cells(sizes, lengths) ** 0.9
        + 1e-6 * np.asarray(sizes) * np.asarray(lengths) ** 2
    )


def in_tiles(sizes, lengths):
    return 0.002 * np.ceil(np.asarray(sizes) / 4) * np.ceil(np.asarray(lengths) / 3)


TIMES = [cells, constant_and_cells, quadratic, in_tiles]


def optimal_rows(lengths, num_buckets, limit=300, **costs):
    """Sized by the frontier where there is one."""
    only = {"strategies": ("optimal",), "num_buckets": num_buckets}
    rows = swept(lengths, limit, Costs(**costs), **only).rows
    return [row for row in rows if row.sizing == rows[-1].sizing]


def cost(row):
    return (
        row.batches
        if row.estimated_epoch_seconds is None
        else row.estimated_epoch_seconds
    )


def least_by_brute_force(lengths, sizes, seconds):
    """What the row of the cheapest table with at most 1, 2, ... boundaries says it costs."""
    pricing = Pricing(
        lengths=lengths,
        total=lengths.total,
        max_batch_length=300,
        step_seconds=seconds,
        targets=None if seconds is None else TypicalTargets.of(lengths),
    )
    ends = lengths.histogram.lengths
    least = np.full(ends.size, np.inf)
    for buckets in range(1, ends.size + 1):
        for inner in combinations(range(ends.size - 1), buckets - 1):
            chosen = [*inner, ends.size - 1]
            table = BucketTable(ends[chosen], sizes[chosen])
            row = pricing.of_table("any", "frontier", buckets, table).row
            least[buckets - 1] = min(least[buckets - 1], cost(row))
    return np.minimum.accumulate(least)


@given(
    counts=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    seconds=st.sampled_from([None, *TIMES]),
    steps=st.booleans(),
)
@settings(max_examples=20)
def test_no_other_table_costs_less_whatever_the_sizes(counts, seed, seconds, steps):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 9, len(counts))).astype(np.float64)
    sizes = (
        rng.integers(1, 16, len(counts))
        if not steps
        else np.repeat(rng.integers(1, 16, 3), 2)[: len(counts)]
    )
    lengths = Lengths.of(np.repeat(ends, counts))
    rows = optimal_rows(
        lengths,
        tuple(range(1, ends.size + 1)),
        frontier=lambda of: sizes[np.searchsorted(ends, of)],
        step_seconds=seconds,
    )
    assert [cost(row) for row in rows] == pytest.approx(
        least_by_brute_force(lengths, sizes, seconds), rel=1e-9
    )
    for row in rows:
        assert row.batch_sizes == sizes[np.searchsorted(ends, row.boundaries)].tolist()
        assert len(row.boundaries) <= row.num_buckets


def test_few_ends_stand_for_thousands_of_lengths():
    normal = np.random.default_rng(3).normal(0.55, 1.15, 60_000)
    lengths = np.exp(normal).clip(0.1, 82.5).round(2)
    rows = optimal_rows(lengths, (5, 15), 423, step_seconds=constant_and_cells)
    # The times of the tables that were found among 2,048 ends.
    for row, finer in zip(rows, (35.4358, 26.3348), strict=True):
        assert row.estimated_epoch_seconds == pytest.approx(finer, rel=0.0015)
