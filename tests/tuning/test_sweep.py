from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.strategies import STRATEGIES
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Row, Sweep, encode
from batchtune.tuning.sweep import Costs, SweepSettings, sweep

NONE_KNOWN = Costs()
SPEECH = np.random.default_rng(5).gamma(6, 2, 3000).round(2) + 0.5


def frontier(lengths: FloatArray) -> IntArray:
    return np.maximum(1, 400 / lengths**0.9).astype(np.int64)


def step_seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return np.maximum(0.05, 0.02 + 1e-3 * batch_sizes * lengths + 1e-6 * batch_sizes * lengths**2)


PROBED = Costs(frontier=frontier, step_seconds=step_seconds, device_name="made")


def swept(
    values: list[float] | FloatArray,
    max_batch_length: float = 300,
    costs: Costs = NONE_KNOWN,
    *,
    strategies: tuple[str, ...] = tuple(STRATEGIES),
    num_buckets: tuple[int, ...] = (3, 8),
    max_batch_size: int | None = None,
) -> Sweep:
    chosen = SweepSettings(strategies=strategies, num_buckets=num_buckets, max_batch_size=max_batch_size, seed=7)
    return sweep(Lengths.of(values, unit="s"), max_batch_length, chosen, costs)


def only_row(result: Sweep) -> Row:
    (row,) = result.rows
    return row


def test_there_is_a_row_for_every_strategy_and_bucket_count() -> None:
    rows = [(row.strategy, row.num_buckets, row.sizing) for row in swept(SPEECH).rows]
    assert rows == [(name, n, "length") for name in STRATEGIES for n in (3, 8)]


def test_with_a_frontier_optimal_is_swept_both_ways_and_the_others_by_length() -> None:
    rows = [(row.strategy, row.sizing) for row in swept(SPEECH, costs=PROBED, num_buckets=(5,)).rows]
    assert rows == [*((name, "length") for name in STRATEGIES), ("optimal", "frontier")]


def test_rows_sized_by_the_frontier_take_the_largest_batch_that_fits() -> None:
    row = swept(SPEECH, costs=PROBED, strategies=("optimal",), num_buckets=(5,)).rows[1]
    assert row.batch_sizes == frontier(np.array(row.boundaries)).tolist()


def test_each_row_is_told_as_soon_as_it_is_known() -> None:
    told: list[Row] = []
    result = sweep(Lengths.of(SPEECH), 300, SweepSettings(num_buckets=(4,)), NONE_KNOWN, told.append)
    assert told == result.rows


def test_a_row_says_what_its_table_costs() -> None:
    # One bucket up to 4 holds 1, 1, 3; the next up to 10 holds 7, 10. Each is one batch.
    row = only_row(swept([1, 1, 3, 7, 10], 20, strategies=("linear",), num_buckets=(3,)))
    assert (row.boundaries, row.batch_sizes) == ([4, 7, 10], [5, 2, 2])
    assert (row.batches, row.used_buckets) == (3, 3)
    assert row.padded_length == pytest.approx(9 + 7 + 10)
    assert row.padding_ratio == pytest.approx((26 - 22) / 26)
    assert row.fill == pytest.approx(22 / (3 * 20))
    assert row.mean_batch_size == pytest.approx(5 / 3)
    assert row.largest_padded_length == 10
    assert row.effective_buckets == pytest.approx(25 / (9 + 1 + 1))
    assert row.estimated_epoch_seconds is None


def test_the_largest_padded_length_counts_what_the_data_can_fill_not_what_the_table_allows() -> None:
    row = only_row(swept([2, 11], 200, strategies=("speechbrain",), num_buckets=(10,)))
    assert (row.batch_sizes[0], row.largest_padded_length) == (14, 22)


def test_max_batch_size_holds_in_every_row_and_baseline() -> None:
    result = swept(SPEECH, costs=PROBED, max_batch_size=9)
    sizes = [size for row in result.rows for size in row.batch_sizes]
    assert max(itertools.chain(sizes, (b.batch_size for b in result.baselines))) == 9


def test_the_estimated_time_is_that_of_every_batch() -> None:
    constant = Costs(step_seconds=lambda sizes, lengths: np.full(np.broadcast(sizes, lengths).shape, 0.5))
    for row in swept(SPEECH, costs=constant).rows:
        assert row.estimated_epoch_seconds == pytest.approx(0.5 * row.batches)


def test_optimal_minimises_time_where_it_is_known() -> None:
    result = swept(SPEECH, costs=Costs(step_seconds=step_seconds), num_buckets=(6,))
    best = min(result.rows, key=lambda row: row.estimated_epoch_seconds or 0)
    assert best.strategy == "optimal"


def test_the_fixed_batch_size_is_the_largest_that_fits_the_longest() -> None:
    assert [b.batch_size for b in swept([1, 2, 30], 100).baselines] == [3, 3]


def test_the_fixed_batch_size_comes_from_the_frontier_where_there_is_one() -> None:
    costs = Costs(frontier=lambda lengths: np.full(lengths.shape, 2))
    assert [b.batch_size for b in swept([1, 2, 30], 100, costs).baselines] == [2, 2]


def test_the_sorted_baseline_cuts_the_descending_lengths() -> None:
    baseline = swept([1, 2, 3, 4, 10], 20).baselines[1]
    assert (baseline.name, baseline.batches, baseline.padded_length) == ("fixed-sorted", 3, 20 + 6 + 1)


def test_the_random_baseline_is_the_mean_over_all_orders() -> None:
    values = [1, 2, 3, 4, 10]
    mean = np.mean([2 * max(o[:2]) + 2 * max(o[2:4]) + o[4] for o in itertools.permutations(values)], dtype=float)
    baseline = swept(values, 20).baselines[0]
    assert (baseline.name, baseline.padded_length) == ("fixed-random", pytest.approx(mean))


def test_the_bound_is_the_total_length_in_full_batches() -> None:
    assert swept([3] * 10, 10).lower_bound.batches == 3


def test_the_bound_is_not_one_too_many_where_the_total_fills_batches_exactly() -> None:
    assert swept([0.1] * 30, 0.3).lower_bound.batches == 10


def test_the_bound_gives_each_overlong_example_its_own_batch() -> None:
    assert swept([50, 60], 10).lower_bound.batches == 2


def test_the_bound_knows_max_batch_size() -> None:
    assert swept([1] * 12, 1000, max_batch_size=3).lower_bound.batches == 4


@given(
    values=st.lists(st.floats(0.1, 50), min_size=1, max_size=60),
    max_batch_length=st.floats(0.05, 300),
    fits=st.none() | st.lists(st.integers(1, 40), min_size=6, max_size=6),
    max_batch_size=st.none() | st.integers(1, 20),
)
@settings(deadline=None, max_examples=120)
def test_no_row_and_no_baseline_beats_the_bound(
    values: list[float], max_batch_length: float, fits: list[int] | None, max_batch_size: int | None
) -> None:
    def uneven(lengths: FloatArray) -> IntArray:
        return np.array(fits)[np.minimum(5, lengths // 10).astype(int)]

    costs = Costs(frontier=None if fits is None else uneven, step_seconds=step_seconds)
    result = swept(values, max_batch_length, costs, num_buckets=(1, 4), max_batch_size=max_batch_size)
    bound = result.lower_bound
    for found in (*result.rows, *result.baselines):
        assert found.batches >= bound.batches
        assert found.padded_length >= bound.padded_length
        assert (found.estimated_epoch_seconds or 0) >= (bound.estimated_epoch_seconds or 0) * (1 - 1e-9)


EDGES = {
    "one example": [5.0],
    "all lengths equal": [5.0] * 9,
    "two distinct lengths": [5.0, 5.0, 8.0],
    "more buckets than lengths": [1.0, 2.0, 3.0, 4.0],
}


@pytest.mark.parametrize("costs", [NONE_KNOWN, PROBED], ids=["unprobed", "probed"])
@pytest.mark.parametrize("max_batch_length", [1e-3, 20, 1e6], ids=["below the shortest", "some", "huge"])
@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
def test_small_data_sets_give_finite_results(values: list[float], max_batch_length: float, costs: Costs) -> None:
    result = swept(values, max_batch_length, costs, num_buckets=(1, 7))
    again = msgspec.json.decode(encode(result), type=Sweep)  # NaN and infinity would be null there
    assert again == result


def test_max_batch_length_below_the_shortest_gives_batches_of_one() -> None:
    result = swept([5, 6, 7], 1)
    assert {row.batches for row in result.rows} == {3}


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_max_batch_length_that_is_no_length_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match="max_batch_length must be positive and finite"):
        swept([1], wrong)


def test_the_sweep_holds_its_settings_and_the_device() -> None:
    result = swept([1, 2], costs=PROBED, strategies=("linear",), num_buckets=(2,), max_batch_size=4)
    assert result.device_name == "made"
    assert result.settings == {
        "strategies": ["linear"],
        "num_buckets": [2],
        "max_batch_size": 4,
        "seed": 7,
    }


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert encode(swept(SPEECH, costs=PROBED)) == encode(swept(SPEECH[::-1], costs=PROBED))


def test_a_batch_size_capped_by_speechbrains_bucket_count_is_told_once() -> None:
    result = swept([10.0] * 50 + [20.0], 600, strategies=("speechbrain",), num_buckets=(10, 11, 12, 20))
    assert result.warnings == [
        "speechbrain with num_buckets=10 can't make a batch of more than 14 examples whatever "
        "max_batch_length is: its fullest batch here is 280 of 600 s; "
        "raising max_batch_length changes nothing; the same holds up to num_buckets=20",
        "up to 20 buckets were asked for, but the lengths take only 2 different values: "
        "no more than 2 can hold an example",
    ]


def test_a_cap_that_max_batch_size_sets_is_not_blamed_on_speechbrain() -> None:
    values = np.linspace(1, 20, 500)
    result = swept(values, 600, strategies=("speechbrain",), num_buckets=(10,), max_batch_size=5)
    assert result.warnings == []


def test_examples_longer_than_max_batch_length_are_told() -> None:
    assert swept([1, 2, 30, 40], 20, strategies=("optimal",), num_buckets=(2,)).warnings == [
        "2 examples are longer than max_batch_length 20 s (the longest is 40 s): "
        "where it sets the batch size, each of them becomes a batch of one"
    ]


def test_speechbrain_with_a_single_bucket_is_told() -> None:
    warnings = swept(SPEECH, strategies=("speechbrain",), num_buckets=(1,)).warnings
    assert warnings == [
        "speechbrain with num_buckets=1 makes batches of one example, because its only boundary is max_batch_length"
    ]


def test_there_is_nothing_to_tell_where_nothing_is_odd() -> None:
    assert swept(SPEECH, strategies=("optimal", "quantile")).warnings == []
