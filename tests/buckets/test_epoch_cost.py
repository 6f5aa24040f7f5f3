from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest
from timed_trials import timed_trial

from batchtune.buckets.epoch_cost import EpochTime, Pricing, equal_to_best
from batchtune.epochs.cost import StepTimes, predict
from batchtune.epochs.expectation import ExpectedBatches, expected_batches
from batchtune.epochs.measured_costs import StepSeconds, TypicalTargets, batch_seconds
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import CostModel, Trial

MODEL = CostModel(floor=0.0, constant=0.02, linear=1e-3, quadratic=1e-5, target_linear=5e-4, relative_error=0.03)
RANDOM = np.random.default_rng(3)
VALUES = (RANDOM.gamma(4, 3, 20_000) + 0.5).round(2)
WITH_TARGETS = Lengths.of(VALUES, RANDOM.poisson(2 * VALUES))
TARGETS = TypicalTargets.of(WITH_TARGETS)


@cache
def table(buckets: int) -> BucketTable:
    boundaries = np.append(np.quantile(VALUES, np.arange(1, buckets) / buckets), VALUES.max())
    return BucketTable(boundaries, batch_sizes_for(boundaries, 300.0))


def trial(batch_size: int, length: float) -> Trial:
    target = 2 * length
    seconds = float(predict(MODEL, batch_size, length, target)) * float(np.exp(RANDOM.normal(0, 0.05)))
    return timed_trial(batch_size, length, seconds, target=target, spread=0.05 * seconds)


TIMES = StepTimes.of(
    [trial(max(1, int(300 / length / part)), length) for length in (1.0, 3.0, 8.0, 20.0, 50.0) for part in (1, 3)],
    MODEL,
)


@cache
def expected(buckets: int) -> ExpectedBatches:
    return expected_batches(WITH_TARGETS.histogram, table(buckets))


def exact_seconds(times: StepTimes, buckets: int) -> float:
    return expected(buckets).sum_of(batch_seconds(times, TARGETS, table(buckets).lower_edges))


def cost_of(seconds: float, errors: FloatArray | None) -> EpochTime:
    return EpochTime(seconds=seconds, errors=errors)


def timed(buckets: int, times: StepSeconds = TIMES) -> EpochTime:
    lengths = WITH_TARGETS
    pricing = Pricing(lengths=lengths, total=lengths.total, max_batch_length=300, step_seconds=times, targets=TARGETS)
    time = pricing.of_table("made", "length", buckets, table(buckets)).time
    assert time is not None
    return time


def perturbed(logs: FloatArray) -> StepTimes:
    factor = float(np.exp(logs[-2] + logs[-1]))
    named = ("floor", "constant", "linear", "quadratic", "target_linear", "target_quadratic", "cross")
    model = msgspec.structs.replace(MODEL, **{name: getattr(MODEL, name) * factor for name in named})
    return replace(TIMES, model=model, ratios=TIMES.ratios + logs[:-2] - logs[-2])


def test_the_error_of_a_difference_is_its_spread_if_perturbed() -> None:
    random = np.random.default_rng(12)
    draws = random.normal(size=(100, TIMES.sigmas.size)) * TIMES.sigmas
    differences = [exact_seconds(perturbed(logs), 2) - exact_seconds(perturbed(logs), 12) for logs in draws]
    few = timed(2)
    many = timed(12)
    assert few.errors is not None
    assert many.errors is not None
    error = float(np.linalg.norm(few.errors - many.errors))
    assert error == pytest.approx(np.std(differences), rel=0.18)


def test_made_step_times_have_no_error() -> None:
    time = timed(3, lambda sizes, lengths, targets=None: np.ones(1))
    assert time.errors is None
    assert time.standard_error is None
    assert equal_to_best([time, time]) == [None, None]


def test_errors_in_common_cancel_where_own_ones_do_not() -> None:
    sigmas = np.array([0.1, 0.01])
    best = cost_of(100.0, np.array([100.0, 0.0]) * sigmas)
    alike = cost_of(103.0, np.array([103.0, 0.0]) * sigmas)
    apart = cost_of(103.0, np.array([0.0, 103.0]) * sigmas)
    assert alike.standard_error == pytest.approx(10.3)
    # The difference of alike is 3 ± 0.3, that of apart 3 ± 10.
    assert equal_to_best([alike, best, apart]) == [False, True, True]


def test_two_standard_errors_are_still_equal() -> None:
    times = [cost_of(seconds, np.array([error])) for seconds, error in ((8.0, 2.0), (9.0, 2.5), (9.5, 2.5))]
    assert equal_to_best(times) == [True, True, False]
