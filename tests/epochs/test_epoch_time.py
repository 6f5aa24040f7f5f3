"""The batches that an epoch can be expected to have, the errors of its time, and which times can't be told apart."""

import numpy as np
import pytest

from batchtune.epochs import EpochShapes
from batchtune.epochs.expectation import (
    EpochTime,
    equal_to_best,
    expected_batches,
    time_errors,
)
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths


def cost_of(seconds, errors):
    return EpochTime(seconds=seconds, errors=errors)


def test_made_step_times_have_no_error():
    counts = np.array([2, 1])
    shapes = EpochShapes(counts, counts, None)
    errors = time_errors(
        lambda sizes, lengths: np.ones(sizes.size), shapes, counts, 2.0
    )
    assert errors is None
    assert cost_of(2.0, errors).standard_error is None
    assert equal_to_best([cost_of(2.0, errors)] * 2) == [None, None]


def test_errors_in_common_cancel_where_own_ones_do_not():
    sigmas = np.array([0.1, 0.01])
    best = cost_of(100.0, np.array([100.0, 0.0]) * sigmas)
    alike = cost_of(103.0, np.array([103.0, 0.0]) * sigmas)
    apart = cost_of(103.0, np.array([0.0, 103.0]) * sigmas)
    assert alike.standard_error == pytest.approx(10.3)
    # The difference of alike is 3 ± 0.3, that of apart 3 ± 10.
    assert equal_to_best([alike, best, apart]) == [False, True, True]


def test_two_standard_errors_are_still_equal():
    times = [
        cost_of(seconds, np.array([error]))
        for seconds, error in ((8.0, 2.0), (9.0, 2.5), (9.5, 2.5))
    ]
    assert equal_to_best(times) == [True, True, False]


def test_a_million_examples_lose_no_precision_that_matters():
    values = np.random.default_rng(0).integers(1, 1000, 1_000_000).astype(float)
    batches = expected_batches(
        Lengths.of(values).histogram, BucketTable.of([1000], [37])
    )
    assert batches.numbers.sum() == pytest.approx(-(-1_000_000 // 37), rel=1e-12)
    # The mean of the longest of 37 out of 1..999, drawn with as good as no depletion.
    levels = np.arange(1, 1000)
    mean = np.sum(1 - ((levels - 1) / 999) ** 37)
    assert batches.padded_length / 1_000_000 == pytest.approx(mean, rel=1e-3)
