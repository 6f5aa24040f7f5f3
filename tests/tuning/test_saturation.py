from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.expectation import expected_batches
from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.table import BucketTable, Limits, batch_sizes_for
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Saturation
from batchtune.tuning import alternatives
from batchtune.tuning.alternatives import saturation
from batchtune.tuning.costs import TypicalTargets
from batchtune.tuning.epoch_cost import Pricing, estimated_epoch_seconds

SPEECH = Lengths.of(np.random.default_rng(6).gamma(6, 2, 1500).round(1) + 0.5)
NO_LIMIT = Limits(max_batch_length=2000)


def step_seconds(batch_sizes: FloatArray, lengths: FloatArray, target_lengths: FloatArray | None = None) -> FloatArray:
    return 0.05 + 1e-3 * batch_sizes * lengths + (0 if target_lengths is None else 1e-3 * batch_sizes * target_lengths)


def frontier(lengths: FloatArray) -> IntArray:
    return np.maximum(1, 300 / lengths).astype(np.int64)


def found(
    lengths: Lengths = SPEECH, limits: Limits = NO_LIMIT, num_buckets: int = 6, fraction: float = 0.95
) -> Saturation:
    result = saturation(pricing(lengths, limits), limits, num_buckets, fraction)
    assert result is not None
    return result


def pricing(lengths: Lengths, limits: Limits, *, timed: bool = True) -> Pricing:
    return Pricing(
        lengths=lengths,
        total=lengths.total,
        max_batch_length=limits.max_batch_length,
        step_seconds=step_seconds if timed else None,
        targets=TypicalTargets.of(lengths),
    )


def test_points_run_evenly_from_the_longest_length_to_the_limit() -> None:
    values = [point.max_batch_length for point in found().points]
    assert (len(values), values[0], values[-1]) == (24, SPEECH.longest, 2000)
    ratios = np.diff(np.log(values))
    assert ratios == pytest.approx(np.full(23, ratios.mean()), rel=0.02)


def test_whole_lengths_give_whole_limits() -> None:
    lengths = Lengths.of(np.random.default_rng(1).integers(1, 30, 500))
    values = [point.max_batch_length for point in found(lengths, Limits(max_batch_length=200)).points]
    assert values == sorted({float(int(value)) for value in values})


def test_each_point_is_what_its_optimal_table_costs() -> None:
    ends = SPEECH.histogram.lengths
    for point in found().points[::11]:
        sizes = batch_sizes_for(ends, point.max_batch_length)
        (boundaries,) = optimal_boundaries(SPEECH.histogram, step_seconds(sizes, ends) / sizes, [6])
        table = BucketTable(boundaries, batch_sizes_for(boundaries, point.max_batch_length))
        assert point.batches == expected_batches(SPEECH.histogram, table).tally.batches
        assert point.mean_batch_size == pytest.approx(SPEECH.count / point.batches)
        assert point.estimated_epoch_seconds == pytest.approx(estimated_epoch_seconds(SPEECH, table, step_seconds))
        assert point.throughput == pytest.approx(SPEECH.total / point.estimated_epoch_seconds)


def test_the_smallest_that_reaches_the_fraction_is_told() -> None:
    result = found(fraction=0.9)
    best = max(point.throughput for point in result.points)
    (chosen,) = (point for point in result.points if point.max_batch_length == result.max_batch_length)
    assert chosen.throughput >= 0.9 * best
    assert all(p.throughput < 0.9 * best for p in result.points if p.max_batch_length < chosen.max_batch_length)
    assert result.fraction == 0.9


def test_what_the_frontier_does_not_allow_brings_nothing() -> None:
    points = found(limits=Limits(max_batch_length=2000, frontier=frontier)).points
    beyond = {point.throughput for point in points if point.max_batch_length > 300}
    assert len(beyond) == 1


def test_max_batch_size_holds() -> None:
    points = found(limits=Limits(max_batch_length=2000, max_batch_size=4, frontier=frontier)).points
    assert max(point.mean_batch_size for point in points) <= 4


@pytest.mark.parametrize("largest", [SPEECH.longest, 0.5 * SPEECH.longest])
def test_where_the_longest_fills_a_batch_there_is_one_point(largest: float) -> None:
    result = found(limits=Limits(max_batch_length=largest))
    assert [point.max_batch_length for point in result.points] == [largest]
    assert result.max_batch_length == largest


def test_targets_count_in_the_time() -> None:
    with_targets = Lengths.of(SPEECH.values, SPEECH.values)
    one, other = found(), found(with_targets)
    assert all(
        b.estimated_epoch_seconds > a.estimated_epoch_seconds for a, b in zip(one.points, other.points, strict=True)
    )


def test_few_lengths_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Lengths.of(np.random.default_rng(8).gamma(6, 2, 20_000))
    about = found(many)
    monkeypatch.setattr(alternatives, "_MOST_LENGTHS", many.count)
    exact = found(many)
    assert [p.throughput for p in about.points] == pytest.approx([p.throughput for p in exact.points], rel=1e-3)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=200), st.integers(2, 50))
@settings(deadline=None, max_examples=40)
def test_a_smaller_histogram_never_shortens_an_example(values: list[float], most: int) -> None:
    histogram = Lengths.of(values).histogram
    small = alternatives._at_most(histogram, most)
    assert small.lengths.size <= max(most, 1)
    assert (np.diff(small.lengths) > 0).all()
    assert small.count == histogram.count
    assert small.lengths[-1] == histogram.lengths[-1]
    assert [histogram.count_up_to(length) for length in small.lengths] == small.cumulative.tolist()


def test_without_step_times_there_is_none() -> None:
    assert saturation(pricing(SPEECH, NO_LIMIT, timed=False), NO_LIMIT, 5, 0.95) is None
