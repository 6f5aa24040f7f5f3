import numpy as np
import pytest

from batchtune.epochs.expectation import (
    expected_batches,
)
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths


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
