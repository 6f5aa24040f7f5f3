from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_trials import timed_trial

from batchtune import BucketBatchSampler
from batchtune.buckets.current import read_current
from batchtune.buckets.strategies import STRATEGIES
from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.cost import Frontier, StepTimes, fit_step_seconds
from batchtune.epochs.layout import Ranks
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import FrontierPoint, Row, Sweep, encode

NONE_KNOWN = Costs()
SPEECH = np.random.default_rng(5).gamma(6, 2, 1500).round(1) + 0.5


def frontier(lengths: FloatArray) -> IntArray:
    return np.maximum(1, 400 / lengths**0.9).astype(np.int64)


def step_seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return np.maximum(0.05, 0.02 + 1e-3 * batch_sizes * lengths + 1e-6 * batch_sizes * lengths**2)


PROBED = Costs(frontier=frontier, step_seconds=step_seconds, device_name="made")
TABLES = tuple(name for name, strategy in STRATEGIES.items() if not strategy.in_pools)


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
    rows = [(row.strategy, row.num_buckets, row.sizing) for row in swept(SPEECH, strategies=TABLES).rows]
    assert rows == [(name, n, "length") for name in TABLES for n in (3, 8)]


def test_with_a_frontier_only_optimal_is_swept_both_ways() -> None:
    rows = [(row.strategy, row.sizing) for row in swept(SPEECH, costs=PROBED, strategies=TABLES, num_buckets=(5,)).rows]
    assert rows == [*((name, "length") for name in TABLES), ("optimal", "frontier")]


def test_frontier_rows_take_the_largest_batch_that_fits() -> None:
    row = swept(SPEECH, costs=PROBED, strategies=("optimal",), num_buckets=(5,)).rows[1]
    assert row.batch_sizes == frontier(np.array(row.boundaries)).tolist()


def test_each_row_is_told_as_soon_as_it_is_known() -> None:
    told: list[Row] = []
    result = sweep(Lengths.of(SPEECH), 300, SweepSettings(num_buckets=(4,)), NONE_KNOWN, on_row=told.append)
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


def test_max_batch_size_holds_in_every_row_and_baseline() -> None:
    result = swept(SPEECH, costs=PROBED, max_batch_size=9)
    sizes = [size for row in result.rows for size in row.batch_sizes]
    assert max(itertools.chain(sizes, (b.batch_size for b in result.baselines))) == 9


def test_the_estimated_time_is_that_of_every_batch() -> None:
    constant = Costs(step_seconds=lambda sizes, lengths: np.full(np.broadcast(sizes, lengths).shape, 0.5))
    lengths = np.random.default_rng(5).gamma(6, 2, 1500).round(2) + 0.5  # each epoch in pools has as many batches
    for row in swept(lengths, costs=constant).rows:
        assert row.estimated_epoch_seconds == pytest.approx(0.5 * row.batches)


def test_the_fixed_batch_size_is_the_largest_for_the_longest() -> None:
    assert [b.batch_size for b in swept([1, 2, 30], 100).baselines] == [3, 3, 3]


def test_the_fixed_batch_size_comes_from_a_given_frontier() -> None:
    costs = Costs(frontier=lambda lengths: np.full(lengths.shape, 2))
    assert [b.batch_size for b in swept([1, 2, 30], 100, costs).baselines] == [2, 2, 2]


def test_the_sorted_baseline_cuts_the_descending_lengths() -> None:
    baseline = swept([1, 2, 3, 4, 10], 20).baselines[1]
    assert (baseline.name, baseline.batches, baseline.padded_length) == ("fixed-sorted", 3, 20 + 6 + 1)


def test_the_random_baseline_is_the_mean_over_all_orders() -> None:
    values = [1, 2, 3, 4, 10]
    mean = np.mean([2 * max(o[:2]) + 2 * max(o[2:4]) + o[4] for o in itertools.permutations(values)], dtype=float)
    baseline = swept(values, 20).baselines[0]
    assert (baseline.name, baseline.padded_length) == ("fixed-random", pytest.approx(mean))


def test_the_bound_is_exact_if_the_total_fills_whole_batches() -> None:
    assert swept([0.1] * 30, 0.3).lower_bound.batches == 10


@given(
    values=st.lists(st.floats(0.1, 50), min_size=1, max_size=60),
    max_batch_length=st.floats(0.05, 300),
    fits=st.none() | st.lists(st.integers(1, 40), min_size=6, max_size=6),
    max_batch_size=st.none() | st.integers(1, 20),
)
@settings(deadline=None, max_examples=25)
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


@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
def test_small_data_sets_give_finite_results(values: list[float]) -> None:
    for costs, max_batch_length in itertools.product((NONE_KNOWN, PROBED), (1e-3, 20, 1e6)):
        result = swept(values, max_batch_length, costs, num_buckets=(1, 7))
        again = msgspec.json.decode(encode(result), type=Sweep)  # NaN and infinity would be null there
        assert again == result


@pytest.mark.parametrize("wrong", [0, float("nan"), float("inf")])
def test_a_max_batch_length_that_is_no_length_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match="max_batch_length must be positive and finite"):
        swept([1], wrong)


def test_the_sweep_holds_its_settings_and_the_device() -> None:
    result = swept([1, 2], costs=PROBED, strategies=("linear",), num_buckets=(2,), max_batch_size=4)
    assert result.device_name == "made"
    assert result.settings == {
        "strategies": ["linear"],
        "num_buckets": [2],
        "pool_sizes": [],
        "max_batch_size": 4,
        "seed": 7,
        "multiple_of": None,
        "world_size": 1,
        "same_bucket": False,
        "accumulate": 1,
        "throughput_fraction": 0.95,
        "min_randomness": None,
    }


def test_the_same_inputs_give_the_same_bytes() -> None:
    some = SPEECH[:500]
    assert encode(swept(some, costs=PROBED)) == encode(swept(some[::-1], costs=PROBED))


def test_a_cap_by_speechbrains_bucket_count_is_reported_once() -> None:
    result = swept([10.0] * 50 + [20.0], 600, strategies=("speechbrain",), num_buckets=(10, 11, 12, 20))
    assert result.warnings == [
        "speechbrain with num_buckets=10 can't make a batch of more than 14 examples whatever "
        "max_batch_length is: its fullest batch here is 280 of 600 s; "
        "raising max_batch_length changes nothing; the same holds up to num_buckets=20",
        "up to 20 buckets were asked for, but there are only 2 different lengths",
    ]


def test_speechbrains_traps_are_no_news_for_text() -> None:
    lengths = Lengths.of([float(value) for value in range(1, 200)], unit="tokens")
    found = sweep(lengths, 1e5, SweepSettings(strategies=TABLES, num_buckets=(1, 10)), NONE_KNOWN)
    assert not any("speechbrain" in warning for warning in found.warnings)


def test_a_cap_by_max_batch_size_is_not_blamed_on_speechbrain() -> None:
    values = np.linspace(1, 20, 500)
    result = swept(values, 600, strategies=("speechbrain",), num_buckets=(10,), max_batch_size=5)
    assert result.warnings == []


def timed_by(trial_seconds: float = 1e-3) -> StepTimes:
    """Step times that know their errors: 30 shapes, timed to within 5%."""
    random = np.random.default_rng(2)
    sizes = random.integers(1, 60, 30)
    lengths = random.uniform(1, 40, 30).round(1)
    trials = [
        timed_trial(size, length, (0.02 + trial_seconds * size * length) * random.lognormal(0, 0.03), spread=0.001)
        for size, length in zip(sizes.tolist(), lengths.tolist(), strict=True)
    ]
    model = fit_step_seconds(trials)
    assert model is not None
    return StepTimes.of(trials, model)


def test_every_strategy_rounds_boundaries_up_to_multiples() -> None:
    chosen = SweepSettings(num_buckets=(3, 8), multiple_of=0.5)
    lengths = Lengths.of(SPEECH, unit="s")
    result = sweep(lengths, 300, chosen, PROBED)
    for row in result.rows:
        assert all(boundary % 0.5 == 0 for boundary in row.boundaries)
        assert row.boundaries[-1] >= lengths.longest
        assert row.padded_length >= lengths.total
        if row.sizing == "length":
            assert row.batch_sizes == [max(1, int(300 / boundary)) for boundary in row.boundaries]


def test_sizes_beyond_the_longest_shrink_and_are_unproven() -> None:
    frontier = Frontier.of(
        [
            FrontierPoint(
                length=length,
                target_length=None,
                batch_size=size,
                closed_by="oom",
                oom_batch_size=size + 1,
                step_seconds=None,
                peak_bytes=None,
            )
            for length, size in ((1.0, 2700), (30.0, 90))
        ]
    )
    costs = Costs(frontier=frontier, continued_frontier=frontier.continued, proven=frontier.proven)
    result = sweep(Lengths.of([1.0, 2, 30]), 3000, SweepSettings(num_buckets=(1,), multiple_of=40), costs)
    shrunk = int(90 * (30 / 40) ** 2)
    for row in result.rows:
        if row.boundaries[-1] == 40.0 and len(row.boundaries) == 1:
            assert row.batch_sizes == [shrunk]
    assert [row.sizing for row in result.rows if row.strategy == "optimal"] == ["length", "frontier"]
    assert result.baselines[0].batch_size == shrunk
    assert all(row.unproven for row in result.rows)


def epochs_of(row: Row, values: FloatArray, ranks: Ranks, number: int) -> Iterator[list[list[int]]]:
    """The batches that all ranks' samplers make, epoch by epoch."""
    samplers = [
        BucketBatchSampler(
            values,
            bucket_boundaries=row.boundaries,
            bucket_batch_sizes=row.batch_sizes,
            rank=rank,
            world_size=ranks.world_size,
            same_bucket=ranks.same_bucket,
        )
        for rank in range(ranks.world_size)
    ]
    for _ in range(number):
        yield [batch for sampler in samplers for batch in sampler]


@pytest.mark.parametrize(("world_size", "same_bucket"), [(1, False), (8, False), (8, True), (64, True)])
def test_a_row_says_what_the_samplers_of_all_ranks_run(world_size: int, same_bucket: bool) -> None:
    ranks = Ranks(world_size=world_size, same_bucket=same_bucket)
    values = SPEECH[:1500]
    chosen = SweepSettings(strategies=("optimal", "linear"), num_buckets=(7,), **asdict(ranks))
    for row in sweep(Lengths.of(values), 150, chosen, NONE_KNOWN).rows:
        cells = []
        for batches in epochs_of(row, values, ranks, 20):
            sizes = [len(batch) for batch in batches]
            assert row.batches == len(batches)
            assert row.repeated_examples == sum(sizes) - len(set(itertools.chain(*batches)))
            assert (row.smallest_batch_size, row.largest_batch_size) == (min(sizes), max(sizes))
            assert row.mean_batch_size == pytest.approx(np.mean(sizes))
            assert row.batch_size_variation == pytest.approx(np.std(sizes) / np.mean(sizes))
            padded = [len(batch) * values[batch].max() for batch in batches]
            assert max(padded) <= row.largest_padded_length * (1 + 1e-9)
            cells.append(sum(padded))
        assert abs(np.mean(cells) - row.padded_length) < 4 * np.std(cells) / np.sqrt(len(cells))
        assert row.padding_ratio == pytest.approx(1 - values.sum() / row.padded_length)
        assert row.fill == pytest.approx(values.sum() / (row.batches * 150))


@pytest.mark.parametrize("ranks", [Ranks(world_size=8), Ranks(world_size=8, same_bucket=True)])
def test_baselines_and_bound_have_as_many_ranks_as_the_rows(ranks: Ranks) -> None:
    one = sweep(Lengths.of(SPEECH), 150, SweepSettings(num_buckets=(7,)), NONE_KNOWN)
    several = sweep(Lengths.of(SPEECH), 150, SweepSettings(num_buckets=(7,), **asdict(ranks)), NONE_KNOWN)
    of_one = (*one.baselines, one.lower_bound)
    of_several = (*several.baselines, several.lower_bound)
    for alone, together in zip(of_one, of_several, strict=True):
        assert together.batches == 8 * math.ceil(alone.batches / 8)
        # Accelerate completes the last length-grouped batches, so that all ranks have as many.
        most = 1.01 if getattr(alone, "name", None) == "length-grouped" else 1.0
        assert alone.padded_length * 0.98 < together.padded_length <= alone.padded_length * most
    assert several.lower_bound.batches <= min(row.batches for row in several.rows)


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ("batch_size=1", True),
        ("batch_size=4", False),
        ("max_batch_length=90,num_buckets=20", True),
    ],
)
def test_a_current_config_beyond_what_fits_is_told(config: str, fits: bool) -> None:
    costs = Costs(frontier=lambda lengths: np.maximum(1, 100 / lengths).astype(np.int64))
    result = sweep(Lengths.of([5.0, 10, 30] * 50), 100, SweepSettings(num_buckets=(3,)), costs, read_current(config))
    assert result.current_fits is fits
    assert any("larger than what was found to fit" in text for text in result.warnings) is not fits


def test_several_ranks_wait_for_each_other() -> None:
    result = sweep(Lengths.of(SPEECH), 300, SweepSettings(num_buckets=(8,), world_size=8), PROBED)
    for row in result.rows:
        assert row.ranks is not None
        assert row.ranks.without_waiting_epoch_seconds < row.ranks.independent_epoch_seconds
        assert row.estimated_epoch_seconds == row.ranks.independent_epoch_seconds
        assert row.steps == -(-row.batches // 8)
    one = swept(SPEECH, costs=PROBED, strategies=("linear",), num_buckets=(8,))
    for baseline, alone in zip(result.baselines, one.baselines, strict=True):
        assert baseline.estimated_epoch_seconds is not None and alone.estimated_epoch_seconds is not None
        assert alone.estimated_epoch_seconds / 8 < baseline.estimated_epoch_seconds < alone.estimated_epoch_seconds


def test_a_table_less_random_than_asked_for_is_not_recommended() -> None:
    free = swept(SPEECH, strategies=TABLES, num_buckets=(2, 4, 8)).recommended_row
    assert free is not None and free.randomness is not None
    chosen = SweepSettings(strategies=TABLES, num_buckets=(2, 4, 8), min_randomness=(1 + free.randomness) / 2)
    held = sweep(Lengths.of(SPEECH), 300, chosen, NONE_KNOWN).recommended_row
    assert held is not None and held.randomness is not None and chosen.min_randomness is not None
    assert free.randomness < chosen.min_randomness <= held.randomness


def test_the_current_config_is_a_row_beside_the_others() -> None:
    current = read_current("max_batch_length=300,num_buckets=8")
    result = sweep(Lengths.of(SPEECH), 300, SweepSettings(num_buckets=(8,)), PROBED, current)
    same = next(row for row in result.rows if row.strategy == "speechbrain")
    assert result.current is not None
    assert msgspec.structs.replace(result.current, strategy="speechbrain", equal_to_best=None) == same
    assert result.current_settings == {
        "kind": "speechbrain",
        "source": "--current",
        "describe": "SpeechBrain, max_batch_length=300, num_buckets=8",
        "max_batch_length": 300.0,
        "num_buckets": 8,
    }
    assert result.learning_rate is not None and result.learning_rate.relative_to == "current"
    assert result.learning_rate.from_batch_size == result.current.mean_batch_size


def test_the_learning_rate_starts_from_the_fixed_batch_size() -> None:
    found = swept(SPEECH)
    hint = found.learning_rate
    row = found.recommended_row
    assert hint is not None and row is not None
    assert (hint.relative_to, hint.to_batch_size) == ("fixed-random", row.mean_batch_size)


def test_rows_within_the_error_of_the_fastest_are_equal_to_it() -> None:
    result = swept(SPEECH, costs=Costs(step_seconds=timed_by()), num_buckets=tuple(range(1, 21)))
    fastest = min(result.rows, key=lambda row: row.estimated_epoch_seconds or 0)
    slowest = max(result.rows, key=lambda row: row.estimated_epoch_seconds or 0)
    assert fastest.equal_to_best is True and slowest.equal_to_best is False
    assert all((row.estimated_epoch_error_seconds or 0) > 0 for row in result.rows)


def test_the_curve_is_of_rows_of_the_sweep() -> None:
    result = swept(SPEECH, costs=PROBED, num_buckets=tuple(range(1, 21)))
    seconds = [result.rows[index].estimated_epoch_seconds for index in result.trade_off]
    again = [result.rows[index].mates_again for index in result.trade_off]
    assert seconds == sorted(seconds, key=lambda each: each or 0)
    assert again == sorted(again, key=lambda each: each or 0, reverse=True)


def test_saturation_needs_times() -> None:
    assert swept(SPEECH, strategies=TABLES).saturation is None
    saturation = swept(SPEECH, costs=PROBED, strategies=TABLES).saturation
    assert saturation is not None
    assert saturation.fraction == 0.95
    assert saturation.max_batch_length < 300


def test_joint_tables_are_compared_if_memory_depends_on_targets() -> None:
    random = np.random.default_rng(8)
    lengths = Lengths.of(SPEECH, random.exponential(20, SPEECH.size).round())
    costs = Costs(
        frontier=lambda long: np.maximum(1, 3000 / (long + lengths.targets.max())).astype(np.int64),  # type: ignore[union-attr]
        joint_frontier=lambda long, target: np.maximum(1, 3000 / (long + target)).astype(np.int64),
    )
    result = sweep(lengths, 300, SweepSettings(num_buckets=(4, 12)), costs)
    assert [row.num_buckets for row in result.two_dimensional] == [4, 12]
    for row in result.two_dimensional:
        assert row.batches < row.one_dimensional_batches
        assert len(row.buckets) == len(row.batch_sizes) <= row.num_buckets


@given(
    values=st.lists(st.integers(1, 200).map(lambda n: n / 8), min_size=1, max_size=60),
    scale=st.sampled_from([0.25, 4.0, 1024.0]),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=20)
def test_neither_order_nor_unit_of_the_data_changes_a_table(values: list[float], scale: float, seed: int) -> None:
    shuffled = np.random.default_rng(seed).permutation(np.array(values))
    exact = ("speechbrain", "quantile", "linear", "optimal")  # a geometric series is rounded
    here = swept(values, 60, strategies=exact).rows
    there = swept((shuffled * scale).tolist(), 60 * scale, strategies=exact).rows
    for row, scaled in zip(here, there, strict=True):
        assert scaled.batch_sizes == row.batch_sizes
        assert scaled.batches == row.batches
        assert scaled.boundaries == pytest.approx([boundary * scale for boundary in row.boundaries])


@pytest.mark.parametrize(
    "values",
    [[3.0], [3.0] * 20 + [7.0]],
    ids=["one example", "two distinct lengths"],
)
@pytest.mark.parametrize(("costs", "multiple_of"), [(NONE_KNOWN, None), (PROBED, 5.0)])
def test_the_smallest_data_sets_are_swept(values: list[float], costs: Costs, multiple_of: float | None) -> None:
    chosen = SweepSettings(num_buckets=(1, 2, 30), multiple_of=multiple_of, world_size=4, accumulate=2)
    result = sweep(Lengths.of(values), 20, chosen, costs, read_current("batch_size=2"))
    assert all(row.batches >= 1 and 0 <= row.padding_ratio < 1 for row in result.rows)
    assert result.current is not None


def test_costs_that_fall_with_length_need_one_bucket() -> None:
    cheaper = Costs(
        frontier=lambda lengths: np.full(lengths.shape, 10),
        step_seconds=lambda sizes, lengths: 1 / np.broadcast_arrays(sizes, lengths)[1],
    )
    rows = [row for row in swept(np.arange(1.0, 400), 4000, cheaper).rows if row.sizing == "frontier"]
    assert all(row.used_buckets == 1 for row in rows)
