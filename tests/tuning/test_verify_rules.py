"""Measured against estimated time of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune.tuning.verify_rules import timing_of


def test_the_same_batches_are_compared_and_the_epoch_scaled() -> None:
    timing = timing_of([1.1, 2.2], np.array([1.0, 2.0]), 100.0, 50)
    assert timing.ratio == pytest.approx(1.1)
    assert timing.measured_epoch_seconds == pytest.approx(110.0)


def test_a_step_counts_by_its_time() -> None:
    timing = timing_of([2.0, 10.0], np.array([1.0, 10.0]), 100.0, 50)
    assert timing.ratio == pytest.approx(12 / 11)


def test_without_an_estimate_the_mean_step_is_taken_for_all() -> None:
    timing = timing_of([1.0, 3.0], None, None, 50)
    assert (timing.ratio, timing.measured_epoch_seconds) == (None, 100.0)


def test_without_a_step_nothing_is_measured() -> None:
    timing = timing_of([], None, 100.0, 50)
    assert (timing.estimated_epoch_seconds, timing.measured_epoch_seconds, timing.ratio) == (100.0, None, None)


@pytest.mark.parametrize(
    ("seconds", "holds"), [(0.8999, False), (0.9001, True), (1.0999, True), (1.1001, False)], ids=str
)
def test_the_time_may_differ_by_the_tolerance_both_ways(seconds: float, holds: bool) -> None:
    assert timing_of([seconds], np.array([1.0]), 100.0, 100).within(0.1) == holds


def test_a_time_without_an_estimate_is_within_anything() -> None:
    assert timing_of([1.0], None, None, 100).within(0.1)
