"""How uncertain step times are, and how that reaches sums of them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_trials import timed_trial

from batchtune.epochs.cost import StepTimes, predict
from batchtune.lengths import FloatArray
from batchtune.results import CostModel, Trial

MODEL = CostModel(floor=0.0, constant=0.01, linear=1e-3, quadratic=1e-6, relative_error=0.04)
WITH_TARGETS = msgspec.structs.replace(MODEL, target_linear=2e-3)


def trial(batch_size: int, length: float, ratio: float, *, target: float | None = None, spread: float = 0.0) -> Trial:
    """A trial that took so many times as long as the model says; 5 steps, of which 4 count."""
    model = MODEL if target is None else WITH_TARGETS
    seconds = float(predict(model, batch_size, length, target)) * ratio
    return timed_trial(batch_size, length, seconds, target=target, spread=spread * seconds)


SIX = [trial(40 * 3**n // 30, 300 / 3**n, 1 + 0.05 * (-1) ** n, spread=0.02) for n in range(6)]
TIMES = StepTimes.of(SIX, MODEL)
SIZES = np.array([1.0, 7, 40, 200])
LENGTHS = np.array([250.0, 60, 8, 2])
COUNTS = np.array([3.0, 10, 20.5, 1])


def shifted(times: StepTimes, logs: FloatArray) -> StepTimes:
    """The times if each source of error were off by so much: the measured ones, the model, and what is common.

    A model that is off by a factor leaves the measured times as they are, so the ratios to it change the other way.
    """
    factor = float(np.exp(logs[-2] + logs[-1]))
    named = ("floor", "constant", "linear", "quadratic", "target_linear", "target_quadratic", "cross")
    model = msgspec.structs.replace(times.model, **{name: getattr(times.model, name) * factor for name in named})
    return replace(times, model=model, ratios=times.ratios + logs[:-2] - logs[-2])


@given(st.integers(0, 7), st.booleans())
@settings(deadline=None, max_examples=30)
def test_the_gradient_is_the_derivative(source: int, with_targets: bool) -> None:
    trials = [trial(n + 1, 90 / (n + 1), 1 + n / 20, target=5.0 * n) for n in range(6)] if with_targets else SIX
    times = StepTimes.of(trials, WITH_TARGETS if with_targets else MODEL)
    targets = np.array([9.0, 4, 2, 1]) if with_targets else None
    total, gradient = times.sensitivities(SIZES, LENGTHS, targets, COUNTS)
    logs = np.zeros(8)
    logs[source] = 1e-6
    more, less = (float(np.sum(COUNTS * shifted(times, sign * logs)(SIZES, LENGTHS, targets))) for sign in (1.0, -1.0))
    assert gradient[source] == pytest.approx((more - less) / 2e-6, rel=1e-5, abs=1e-7 * total)


def test_the_derivatives_add_up_to_the_time_itself() -> None:
    total, gradient = TIMES.sensitivities(SIZES, LENGTHS, None, COUNTS)
    assert total == pytest.approx(float(np.sum(COUNTS * TIMES(SIZES, LENGTHS))), rel=1e-12)
    assert gradient[:-1].sum() == pytest.approx(total, rel=1e-12)
    assert gradient[-1] == total


def test_more_shapes_than_are_worked_out_at_once_add_up() -> None:
    total, gradient = TIMES.sensitivities(SIZES, LENGTHS, None, COUNTS)
    often = [np.tile(values, 5000) for values in (SIZES, LENGTHS, COUNTS)]
    many, many_gradient = TIMES.sensitivities(often[0], often[1], None, often[2])
    assert many == pytest.approx(5000 * total, rel=1e-9)
    assert many_gradient == pytest.approx(5000 * gradient, rel=1e-9)


def test_a_measured_shape_has_its_own_error_and_the_common_one() -> None:
    one = SIX[2]
    exact = replace(TIMES, kept=np.ones(6))
    total, gradient = exact.sensitivities(one.batch_size, one.length, None, 1.0)
    assert gradient == pytest.approx(total * np.array([0, 0, 1, 0, 0, 0, 0, 1]), abs=1e-9)


def test_far_from_all_measurements_the_models_error_counts() -> None:
    total, gradient = TIMES.sensitivities(1e9, 1e9, None, 1.0)
    assert gradient[-2:] == pytest.approx([total, total], rel=1e-3)


def test_without_measurements_there_is_the_models_error_alone() -> None:
    times = StepTimes.of([], MODEL)
    total, gradient = times.sensitivities(4, 10.0, None, 2.0)
    assert (gradient.tolist(), times.sigmas.tolist()) == ([total, total], [0.04, 0.0])


def test_if_all_agree_a_trial_is_as_uncertain_as_its_steps() -> None:
    steady = [trial(n, 10.0, 1.0, spread=0.02 * n) for n in (1, 2, 4)]
    sigmas = StepTimes.of(steady, MODEL).sigmas
    # The standard error of the median of 4 normal values, from their interquartile range.
    assert sigmas[:-2] == pytest.approx(1.2533 / 1.349 * np.array([0.02, 0.04, 0.08]) / 2)


def test_what_the_others_miss_a_measurement_by_is_its_error_too() -> None:
    # Two at a distance of 1 (a factor of e in size): each is expected to be half as far off the model as the other.
    times = StepTimes.of([trial(100, 10.0, 1.3), trial(272, 10.0, 0.9)], MODEL)
    first, second = times.ratios
    missed = np.sqrt(((second / 2 - first) ** 2 + (first / 2 - second) ** 2) / 2)
    assert times.sigmas[:-2] == pytest.approx([missed, missed], rel=1e-2)


def test_half_of_the_others_miss_is_a_common_error() -> None:
    times = StepTimes.of([trial(100, 10.0, 1.3), trial(272, 10.0, 0.9)], MODEL)
    assert times.sigmas[-1] == pytest.approx(times.sigmas[0] / 2)


def test_misses_explained_by_noise_count_only_half() -> None:
    times = StepTimes.of([trial(100, 10.0, 1.3), trial(272, 10.0, 0.9)], MODEL)
    little, much = (replace(times, errors=np.full(2, error)) for error in (0.02, 0.5))
    missed = times.sigmas[0]
    # Each is held against half of the other, as above.
    explained = 0.02**2 * (1 + 0.5**2)
    assert 2 * little.sigmas[-1] == pytest.approx(np.sqrt(missed**2 - explained), rel=1e-3)
    assert 2 * much.sigmas[-1] == pytest.approx(missed / np.sqrt(2))


def with_means(*ratios: float, timed_steps: int = 10) -> StepTimes:
    """Times of trials whose steps took so many times their median on average."""
    return StepTimes.of(
        [
            timed_trial(size, 10.0, 0.1, mean=0.1 * ratio, timed_steps=timed_steps)
            for size, ratio in enumerate(ratios, start=1)
        ],
        MODEL,
    )


def test_the_error_of_the_mean_comes_from_scatter_between_trials() -> None:
    random = np.random.default_rng(4)
    slow = 1 + 2 * random.binomial(10, 0.05, 4000) / 10
    # A step's standard deviation over the square root of their number; what may be unseen is small in so many.
    expected = 2 * np.sqrt(0.05 * 0.95 / 40_000)
    assert with_means(*slow.tolist()).common_error == pytest.approx(expected, rel=0.05)


def test_where_no_slow_step_was_seen_two_of_them_may_be_unseen() -> None:
    assert with_means(1.0, 1.0, 1.0).common_error == pytest.approx(2 * np.sqrt(2) / 30)


def test_without_means_there_is_no_error_of_the_mean() -> None:
    assert TIMES.common_error == 0.0
