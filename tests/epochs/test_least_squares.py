"""Least squares with coefficients of at least 0, against SciPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from batchtune.epochs.cost_model import leverages, nonnegative_fits


@given(
    measured=st.integers(1, 12),
    count=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1, 1e-9, 1e12]),
)
def test_no_fit_of_any_form_comes_closer(measured, count, seed, scale):
    random = np.random.default_rng(seed)
    columns = random.normal(random.choice([0, 2]), 1, (measured, count))
    target = random.normal(1, 1, measured)
    forms = random.random((4, count)) < 0.7
    fits = nonnegative_fits(columns * scale, target, forms) * scale
    for form, fit in zip(forms, fits, strict=True):
        expected, distance = np.zeros(count), np.linalg.norm(target)
        if form.any():
            expected[form], distance = nnls(columns[:, form], target)
        assert (fit >= 0).all() and not fit[~form].any()
        assert np.linalg.norm(columns @ fit - target) == pytest.approx(distance)
        if measured >= count:
            assert fit == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_columns_that_say_the_same_are_fitted_once():
    columns = np.array([[1, 2, 3, 0], [1, 2, 5, 0], [1, 2, 9, 0]], dtype=float)
    (fit,) = nonnegative_fits(columns, columns @ [1, 1, 2, 1], np.ones((1, 4)) > 0)
    assert columns @ fit == pytest.approx(columns @ [1, 1, 2, 1])
    assert (fit > 0).sum() == 2


def test_leverages_are_those_of_the_hat_matrix():
    columns = np.random.default_rng(0).normal(size=(7, 3))
    leverage, _ = leverages(columns, np.array([[True, False, True]]))
    used = columns[:, [0, 2]]
    assert leverage[0] == pytest.approx(np.diag(used @ np.linalg.pinv(used)))
