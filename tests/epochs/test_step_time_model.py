"""Step times: what was measured where there is anything, the model away from it; means of steps, not medians."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from timed_trials import timed_trial

from batchtune.epochs.cost import StepTimes, fit_step_seconds, predict
from batchtune.results import CostModel, Trial

LINEAR = CostModel(floor=0.0, constant=0.01, linear=1e-3, quadratic=0.0, relative_error=0.05)
WITH_TARGETS = CostModel(floor=0.0, constant=0.01, linear=1e-3, quadratic=0.0, target_linear=2e-3, relative_error=0.05)


TRIALS = st.lists(
    st.tuples(st.integers(1, 300), st.floats(0.5, 500), st.floats(0.5, 2)),
    min_size=1,
    max_size=12,
    unique_by=lambda row: (row[0], round(np.log(row[1]), 2)),
)


def off_by(rows: list[tuple[int, float, float]]) -> list[Trial]:
    """Trials that took so many times as long as the model says."""
    return [timed_trial(size, length, float(predict(LINEAR, size, length)) * ratio) for size, length, ratio in rows]


@given(TRIALS)
@settings(deadline=None, max_examples=25)
def test_at_a_measured_shape_it_is_what_was_measured(rows: list[tuple[int, float, float]]) -> None:
    trials = off_by(rows)
    times = StepTimes.of(trials, LINEAR)
    for one in trials:
        assert float(times(one.batch_size, one.length)) == pytest.approx(one.step_seconds, rel=1e-6)


@given(TRIALS, st.integers(1, 2000), st.floats(0.01, 1e5))
@settings(deadline=None, max_examples=40)
def test_elsewhere_the_model_is_corrected_within_measured_misses(
    rows: list[tuple[int, float, float]], size: int, length: float
) -> None:
    ratios = [1.0, *(ratio for _, _, ratio in rows)]
    correction = float(StepTimes.of(off_by(rows), LINEAR)(size, length) / predict(LINEAR, size, length))
    assert min(ratios) * (1 - 1e-9) <= correction <= max(ratios) * (1 + 1e-9)


def test_estimates_follow_near_measurements_else_the_model() -> None:
    times = StepTimes.of(off_by([(10, 20.0, 1.5)]), LINEAR)
    corrections = [float(times(10, 20 * away) / predict(LINEAR, 10, 20 * away)) for away in (1, 1.05, 1.5, 2, 4, 50)]
    assert corrections == sorted(corrections, reverse=True)
    assert corrections[1] == pytest.approx(1.5, rel=0.01)
    assert corrections[-1] == pytest.approx(1, rel=0.01)


def test_a_factor_of_e_away_model_and_measurement_count_alike() -> None:
    times = StepTimes.of(off_by([(10, 20.0, 1.44)]), LINEAR)
    size = 10 * np.e  # so far in padded length, at the same length
    assert float(times(size, 20) / predict(LINEAR, size, 20)) == pytest.approx(1.2)


@given(TRIALS, st.floats(1e-3, 1e4))
@settings(deadline=None, max_examples=40)
def test_the_unit_of_the_lengths_does_not_matter(rows: list[tuple[int, float, float]], unit: float) -> None:
    trials = off_by(rows)
    scaled = [timed_trial(one.batch_size, one.length * unit, one.step_seconds) for one in trials]
    model = CostModel(floor=0.0, constant=0.01, linear=1e-3 / unit, quadratic=0.0, relative_error=0.05)
    sizes = np.array([1, 7, 90])
    lengths = np.array([3.0, 40, 11])
    theirs = StepTimes.of(scaled, model)(sizes, lengths * unit)
    assert theirs == pytest.approx(StepTimes.of(trials, LINEAR)(sizes, lengths), rel=1e-6)


def test_of_several_trials_of_a_shape_it_is_the_median() -> None:
    trials = [timed_trial(4, 10, seconds) for seconds in (0.5, 0.1, 0.06)]
    assert float(StepTimes.of(trials, LINEAR)(4, 10)) == pytest.approx(0.1)


def slow_now_and_then(size: int, mean_to_median: float, *, timed_steps: int) -> Trial:
    seconds = 0.01 + 0.01 * size
    return timed_trial(
        size,
        10.0,
        seconds,
        spread=None if timed_steps == 1 else 0.0,
        mean=mean_to_median * seconds,
        timed_steps=timed_steps,
    )


def test_times_are_scaled_by_the_weighted_mean_over_median() -> None:
    trials = [slow_now_and_then(4, 1.4, timed_steps=10), slow_now_and_then(40, 1.0, timed_steps=30)]
    model = fit_step_seconds(trials)
    assert model is not None
    times = StepTimes.of(trials, model)
    assert times(np.array([4, 12, 40]), 10.0) == pytest.approx(1.1 * np.array([0.05, 0.13, 0.41]), rel=1e-6)


def test_a_single_step_is_no_median_that_leaves_slow_ones_out() -> None:
    trials = [slow_now_and_then(4, 1.1, timed_steps=10), slow_now_and_then(40, 1.0, timed_steps=1)]
    assert StepTimes.of(trials, LINEAR)(np.array([4, 40]), 10.0) == pytest.approx([0.055, 0.41])


def test_trials_without_a_mean_are_taken_at_their_median() -> None:
    assert float(StepTimes.of([timed_trial(4, 10.0, 0.05, timed_steps=10)], LINEAR)(4, 10)) == pytest.approx(0.05)


def test_trials_that_failed_or_were_not_timed_say_nothing() -> None:
    trials = [
        timed_trial(4, 10, None, outcome="oom"),
        timed_trial(4, 10, 9.0, outcome="timeout"),
        timed_trial(4, 10, None),
    ]
    assert float(StepTimes.of(trials, LINEAR)(4, 10)) == pytest.approx(0.05)


def test_the_more_certain_of_two_neighbours_counts_more() -> None:
    sure = timed_trial(10, 10, 0.11 * 2)
    unsure = timed_trial(10, 20, 0.21 * 0.5, spread=0.1)
    between = (10, 200**0.5)
    correction = float(StepTimes.of([sure, unsure], LINEAR)(*between) / predict(LINEAR, *between))
    assert correction > 1.2


def test_targets_count_where_the_time_depends_on_them() -> None:
    trials = [timed_trial(10, 20, 0.5, target=5), timed_trial(10, 20, 2.5, target=50)]
    times = StepTimes.of(trials, WITH_TARGETS)
    assert times(10, 20, np.array([5, 50])) == pytest.approx([0.5, 2.5])
    with pytest.raises(ValueError, match="needs them to predict"):
        times(10, 20)


def test_targets_are_ignored_if_the_time_does_not_depend_on_them() -> None:
    times = StepTimes.of([timed_trial(10, 20, 0.5, target=5)], LINEAR)
    assert times(10, 20, np.array([5, 500])) == pytest.approx([0.5, 0.5])


def test_many_shapes_at_once_are_as_each_by_itself() -> None:
    random = np.random.default_rng(0)
    times = StepTimes.of(off_by([(3, 50.0, 0.7), (40, 4.0, 1.6), (9, 17.0, 1.1)]), LINEAR)
    sizes = random.integers(1, 60, 10_001).astype(float)
    lengths = random.uniform(1, 60, 10_001)
    together = times(sizes, lengths)
    some = [0, 4095, 4096, 10_000]
    assert together[some] == pytest.approx([float(times(sizes[i], lengths[i])) for i in some])


def test_arguments_are_broadcast() -> None:
    times = StepTimes.of(off_by([(3, 50.0, 0.7)]), LINEAR)
    assert times(np.array([[1.0], [2.0]]), np.array([3.0, 4.0, 5.0])).shape == (2, 3)


# The model that is fitted to them


@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["certain", "uncertain"])
def test_a_time_counts_the_less_the_more_its_steps_differ(spread: float) -> None:
    trials = [timed_trial(size, 10.0, 0.01 + 0.01 * size) for size in (2, 4, 8, 16, 32)]
    off = timed_trial(20, 10.0, 0.21 * 2, spread=spread * 0.42)
    model = fit_step_seconds([*trials, off])
    assert model is not None
    error = float(predict(model, 32, 10) / 0.33 - 1)
    assert (error < 0.1) == (spread > 0)


def test_a_constant_per_example_is_part_of_the_time() -> None:
    shapes = [(size, length) for length in (5.0, 10.0, 40.0) for size in (1, 4, 32)]
    trials = [timed_trial(size, length, 0.01 + size * (2e-3 + 1e-3 * length)) for size, length in shapes]
    model = fit_step_seconds(trials)
    assert model is not None and model.example == pytest.approx(2e-3)
    times = StepTimes.of(trials[1:], model)
    assert times([1, 16], [5.0, 2.0]) == pytest.approx([0.017, 0.01 + 16 * 4e-3])


def test_repeated_trials_of_a_shape_count_once() -> None:
    trials = [timed_trial(size, 10.0, 0.01 + 0.01 * size) for size in (2, 4, 8, 16, 32)]
    repeated = [timed_trial(2, 10.0, 0.03 * factor) for factor in (0.5, 1, 1, 1, 9)]
    model = fit_step_seconds([*trials, *repeated])
    assert model is not None
    assert model.relative_error < 1e-6


def test_without_a_timed_trial_there_is_no_model() -> None:
    assert fit_step_seconds([timed_trial(4, 10, None, outcome="oom")]) is None


@given(st.permutations(off_by([(3, 50.0, 0.7), (40, 4.0, 1.6), (9, 17.0, 1.1), (1, 9.0, 1.2), (80, 2.0, 1.0)])))
@settings(deadline=None, max_examples=20)
def test_the_order_of_the_trials_does_not_matter(trials: list[Trial]) -> None:
    model = fit_step_seconds(trials)
    assume(model is not None)
    assert model is not None
    assert float(StepTimes.of(trials, model)(12, 12)) == pytest.approx(0.166, rel=0.15)
