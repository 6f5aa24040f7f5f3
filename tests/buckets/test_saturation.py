from __future__ import annotations

import numpy as np
import pytest

from batchtune.buckets.alternatives import saturation
from batchtune.buckets.epoch_cost import Pricing
from batchtune.buckets.optimal import optimal_boundaries
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.measured_costs import TypicalTargets
from batchtune.epochs.table import BucketTable, Limits, batch_sizes_for
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Saturation

SPEECH = Lengths.of(np.random.default_rng(6).gamma(6, 2, 1500).round(1) + 0.5)
NO_LIMIT = Limits(max_batch_length=2000)


def step_seconds(
    batch_sizes: FloatArray,
    lengths: FloatArray,
    target_lengths: FloatArray | None = None,
) -> FloatArray:
    return (
        0.05
        + 1e-3 * batch_sizes * lengths
        + (0 if target_lengths is None else 1e-3 * batch_sizes * target_lengths)
    )


def frontier(lengths: FloatArray) -> IntArray:
    return np.maximum(1, 300 / lengths).astype(np.int64)


def found(
    lengths: Lengths = SPEECH, limits: Limits = NO_LIMIT, fraction: float = 0.95
) -> Saturation:
    result = saturation(pricing(lengths, limits), limits, 6, fraction)
    assert result is not None
    return result


def pricing(lengths: Lengths, limits: Limits) -> Pricing:
    return Pricing(
        lengths=lengths,
        total=lengths.total,
        max_batch_length=limits.max_batch_length,
        step_seconds=step_seconds,
        targets=TypicalTargets.of(lengths),
    )


def epoch_seconds(max_batch_length: float) -> float:
    """What the optimal table for this max_batch_length costs."""
    ends = SPEECH.histogram.lengths
    sizes = batch_sizes_for(ends, max_batch_length)
    (boundaries,) = optimal_boundaries(
        SPEECH.histogram, step_seconds(sizes, ends) / sizes, [6]
    )
    table = BucketTable(boundaries, batch_sizes_for(boundaries, max_batch_length))
    limits = Limits(max_batch_length=max_batch_length)
    expected = expected_batches(SPEECH.histogram, table)
    return pricing(SPEECH, limits).table_seconds(expected)


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.95])
def test_the_smallest_that_reaches_the_fraction_is_returned(fraction: float) -> None:
    result = found(fraction=fraction)
    best = epoch_seconds(2000)
    assert result.fraction == fraction
    assert best / epoch_seconds(result.max_batch_length) >= fraction
    # The next smaller value of the 24.
    assert (
        best
        / epoch_seconds(result.max_batch_length * (SPEECH.longest / 2000) ** (1 / 23))
        < fraction
    )


def test_what_the_frontier_does_not_allow_brings_nothing() -> None:
    limits = Limits(max_batch_length=2000, frontier=frontier)
    assert found(limits=limits, fraction=1.0).max_batch_length <= 330


def test_max_batch_size_holds() -> None:
    limits = Limits(max_batch_length=2000, max_batch_size=4, frontier=frontier)
    assert found(limits=limits, fraction=1.0).mean_batch_size <= 4


@pytest.mark.parametrize("largest", [SPEECH.longest, 0.5 * SPEECH.longest])
def test_where_the_longest_fills_a_batch_there_is_one_value(largest: float) -> None:
    assert found(limits=Limits(max_batch_length=largest)).max_batch_length == largest
