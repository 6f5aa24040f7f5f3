"""Step times: what was measured where there is anything, the model away from it; means of steps, not medians."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from timed_trials import timed_trial

from batchtune.epochs.cost_model import predict
from batchtune.epochs.measured_costs import StepTimes
from batchtune.results import CostModel

LINEAR = CostModel(
    floor=0.0, constant=0.01, linear=1e-3, quadratic=0.0, relative_error=0.05
)
TRIALS = st.lists(
    st.tuples(st.integers(1, 300), st.floats(0.5, 500), st.floats(0.5, 2)),
    min_size=1,
    max_size=12,
    unique_by=lambda row: (row[0], round(np.log(row[1]), 2)),
)


def off_by(*rows, spread=0.0):
    """Trials that took so many times as long as the model says."""
    trials = []
    for size, length, ratio in rows:
        seconds = predict(LINEAR, size, length) * ratio
        trials.append(timed_trial(size, length, seconds, spread=spread * seconds))
    return trials


def correction(times, size, length):
    return times(size, length) / predict(LINEAR, size, length)


@given(TRIALS, st.integers(1, 2000), st.floats(0.01, 1e5))
def test_measured_shapes_are_met_and_others_within_the_misses(rows, size, length):
    trials = off_by(*rows)
    times = StepTimes.of(trials, LINEAR)
    assume(not times.sigmas.any())  # else nearly equal shapes differ: that is noise
    for trial in trials:
        seconds = times(trial.batch_size, trial.length)
        assert seconds == pytest.approx(trial.step_seconds, rel=1e-6)
    ratios = [1.0, *(ratio for _, _, ratio in rows)]
    found = correction(times, size, length)
    assert min(ratios) * (1 - 1e-9) <= found <= max(ratios) * (1 + 1e-9)


def test_estimates_follow_near_measurements_else_the_model():
    times = StepTimes.of(off_by((10, 20.0, 1.5)), LINEAR)
    corrections = [
        correction(times, 10, 20 * away) for away in (1, 1.05, 1.5, 2, 4, 50)
    ]
    assert corrections == sorted(corrections, reverse=True)
    assert corrections[1] == pytest.approx(1.5, rel=0.01)
    assert corrections[-1] == pytest.approx(1, rel=0.01)


def slow_now_and_then(size, mean_to_median, *, timed_steps):
    seconds = 0.01 + 0.01 * size
    return timed_trial(
        size,
        10.0,
        seconds,
        spread=None if timed_steps == 1 else 0.0,
        mean=mean_to_median * seconds,
        timed_steps=timed_steps,
    )


def test_times_are_scaled_by_the_weighted_mean_over_median():
    times = StepTimes.fit(
        [
            slow_now_and_then(4, 1.4, timed_steps=10),
            slow_now_and_then(40, 1.0, timed_steps=30),
        ]
    )
    assert times(np.array([4, 12, 40]), 10.0) == pytest.approx(
        1.1 * np.array([0.05, 0.13, 0.41]), rel=1e-6
    )


@pytest.mark.parametrize(
    ("trials", "seconds"),
    [
        ([timed_trial(4, 10, seconds) for seconds in (0.5, 0.1, 0.06)], [0.1]),
        (
            [
                slow_now_and_then(4, 1.1, timed_steps=10),
                slow_now_and_then(40, 1.0, timed_steps=1),
            ],
            [0.055, 0.41],
        ),
        ([timed_trial(4, 10.0, 0.05, timed_steps=10)], [0.05]),
        (
            [
                timed_trial(4, 10, None, outcome="oom"),
                timed_trial(4, 10, 9.0, outcome="timeout"),
                timed_trial(4, 10, None),
            ],
            [0.05],
        ),
    ],
    ids=[
        "the median of several",
        "single steps as they are",
        "no mean known",
        "failed or not timed: the model",
    ],
)
def test_a_measured_shape_takes_its_expected_time(trials, seconds):
    times = StepTimes.of(trials, LINEAR)
    assert times(np.array([4, 40])[: len(seconds)], 10.0) == pytest.approx(seconds)


def test_targets_count_where_the_time_depends_on_them():
    trials = [timed_trial(10, 20, 0.5, target=5), timed_trial(10, 20, 2.5, target=50)]
    times = StepTimes.of(trials, replace(LINEAR, target_linear=2e-3))
    assert times(10, 20, np.array([5, 50])) == pytest.approx([0.5, 2.5])
    with pytest.raises(ValueError, match="needs them to predict"):
        times(10, 20)
    assert StepTimes.of(trials[:1], LINEAR)(
        10, 20, np.array([5, 500])
    ) == pytest.approx([0.5, 0.5])


def test_of_very_many_shapes_each_is_corrected():
    times = StepTimes.of(off_by((10, 20.0, 1.5)), LINEAR)
    together = times(np.full((2, 5000), 10.0), 20.0)
    assert together == pytest.approx(np.full((2, 5000), 1.5 * 0.21))


@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["certain", "uncertain"])
def test_a_time_counts_the_less_the_more_its_steps_differ(spread):
    trials = [timed_trial(size, 10.0, 0.01 + 0.01 * size) for size in (2, 4, 8, 16, 32)]
    off = timed_trial(20, 10.0, 0.21 * 2, spread=spread * 0.42)
    error = predict(StepTimes.fit([*trials, off]).model, 32, 10) / 0.33 - 1
    assert (error < 0.1) == (spread > 0)


def test_a_time_counts_less_where_nearly_equal_shapes_differ():
    """A machine that is slow for a whole trial does not show in the steps of that trial."""
    lengths = [10.0, 20.0, 40.0, 160.0, 320.0]
    rows = [(50, 80.0, 0.7), *((50, length, 1.0) for length in lengths)]
    alone = StepTimes.of(off_by(*rows), LINEAR)
    assert correction(alone, 50, 80.0) == pytest.approx(0.7)
    rows += [(51, length, 1.0) for length in (*lengths, 80.0)]
    assert correction(StepTimes.of(off_by(*rows), LINEAR), 50, 80.0) > 0.95


def test_without_a_timed_trial_there_is_no_model():
    assert StepTimes.fit([timed_trial(4, 10, None, outcome="oom")]) is None
