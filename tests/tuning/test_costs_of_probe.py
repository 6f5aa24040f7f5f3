"""What a sweep takes from a probe."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from report_records import made_probe

from batchtune.cost import predict
from batchtune.results import CostModel, Models, Probe
from batchtune.tuning.sweeping import costs_of

WITH_TARGETS = CostModel(floor=0.0, constant=0.02, linear=4e-4, quadratic=0.0, target_linear=1e-4, relative_error=0.1)


def probe_of(model: CostModel | None, target_length: float | None = None) -> Probe:
    probe = made_probe()
    trials = [msgspec.structs.replace(trial, target_length=target_length) for trial in probe.trials]
    models = Models(peak_bytes=probe.models.peak_bytes, step_seconds=model)
    return msgspec.structs.replace(probe, trials=trials, models=models)


def test_a_shape_that_was_timed_takes_as_long_as_it_took() -> None:
    probe = made_probe()
    step_seconds = costs_of(probe).step_seconds
    assert step_seconds is not None
    passed = [trial for trial in probe.trials if trial.outcome == "ok"]
    assert passed
    for trial in passed:
        assert float(step_seconds(trial.batch_size, trial.length)) == pytest.approx(trial.step_seconds)


def test_real_targets_can_be_given_where_they_are_known() -> None:
    step_seconds = costs_of(probe_of(WITH_TARGETS, target_length=300.0)).step_seconds
    assert step_seconds is not None
    few, many = step_seconds(np.array([1e6, 1e6]), np.array([1e4, 1e4]), np.array([0.0, 1e4]))
    assert many - few == pytest.approx(1e6 * 1e4 * 1e-4, rel=0.01)


def test_a_probe_without_a_time_model_gives_no_times() -> None:
    assert costs_of(probe_of(None)).step_seconds is None


def test_far_from_what_was_timed_the_model_holds() -> None:
    probe = made_probe()
    model, step_seconds = probe.models.step_seconds, costs_of(probe).step_seconds
    assert model is not None
    assert step_seconds is not None
    assert float(step_seconds(100_000, 1e6)) == pytest.approx(float(predict(model, 100_000, 1e6)), rel=1e-3)


def test_a_model_that_misses_its_own_measurements_by_far_gives_no_times() -> None:
    poor = msgspec.structs.replace(WITH_TARGETS, relative_error=1.5)
    assert costs_of(probe_of(poor, target_length=300.0)).step_seconds is None
