"""Fit least squares without negative coefficients, by trying every subset of a few columns."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from batchtune.lengths import BoolArray, FloatArray, IntArray

# With a smaller diagonal of the triangular factor, of columns of norm 1, a column is a sum of the others.
_DEPENDENT = 1e-12
# A column that would raise the fit by less, relative to the target's norm, does so by rounding.
_ROUNDING = 1e-13


def nonnegative_fits(
    columns: FloatArray, target: FloatArray, forms: BoolArray
) -> FloatArray:
    """Return each form's coefficients of at least 0 with which its columns come closest to the target.

    Such a fit is the least-squares fit of the columns whose coefficients are positive, and no other column of the
    form could be added with a positive one (the Kuhn-Tucker conditions: Lawson and Hanson 1974, chapter 23). Of the
    subsets that meet this, the smallest is taken.

    Args:
        columns: Shape (measured, columns), of any scales.
        target: Shape (measured,).
        forms: Shape (forms, columns): which columns each form has.

    Returns:
        Shape (forms, columns), 0 for columns without a part.
    """
    scaled, scales = scaled_columns(columns)
    # The triangular factor is fitted as the columns are.
    independent, factor = np.linalg.qr(scaled)
    reduced = target @ independent
    bits = 1 << np.arange(scales.size)
    form_bits = forms @ bits
    subsets = _subsets_of(form_bits, bits)
    coefficients, determined = _fits(factor, reduced, subsets)
    residuals = reduced - coefficients @ factor.T
    rising = residuals @ factor > _ROUNDING * np.linalg.norm(target)
    could_be_added = (rising & ~subsets) @ bits
    complete = (could_be_added[:, np.newaxis] & form_bits) == 0
    # Should rounding leave a form without a complete subset, the closest is taken.
    distances = (residuals**2).sum(axis=1)
    ranks = np.where(complete, -1.0, distances[:, np.newaxis])
    allowed = determined & ((coefficients > 0) == subsets).all(axis=1)
    within = ((subsets @ bits)[:, np.newaxis] & ~form_bits) == 0
    best = np.where(within & allowed[:, np.newaxis], ranks, np.inf).argmin(axis=0)
    return cast(FloatArray, coefficients[best] / scales)


def scaled_columns(columns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return columns of norm 1, and what they were divided by: they may differ by many orders of magnitude."""
    norms = np.linalg.norm(columns, axis=0)
    scales = np.where(norms > 0, norms, 1.0)
    return columns / scales, scales


def leverages(columns: FloatArray, subsets: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return the leverage of each measurement in the fits of subsets of the columns, and how independent these are.

    The leverages have the shape (subsets, measured). Independence is the least absolute value on the diagonal of
    the triangular factor of the subset's columns.
    """
    split = _split(columns, subsets)
    independent = split.independent[:, : len(columns)] * split.used[:, np.newaxis]
    return (independent**2).sum(axis=2), split.diagonal.min(axis=1)


class _Split(NamedTuple):
    """The QR factors of subsets of columns, the columns that are used first; `order` are their places."""

    order: IntArray
    used: BoolArray
    independent: FloatArray
    triangular: FloatArray

    @property
    def diagonal(self) -> FloatArray:
        """The absolute values of the triangular factors' diagonals, shape (subsets, columns); inf where not used."""
        diagonal = np.abs(self.triangular.diagonal(axis1=1, axis2=2))
        return np.where(self.used, diagonal, np.inf)


def _split(columns: FloatArray, subsets: BoolArray) -> _Split:
    """Split subsets of columns; rows of 0 are added where there are fewer rows than columns."""
    order = np.argsort(~subsets, axis=1, kind="stable")
    used = np.arange(subsets.shape[1]) < subsets.sum(axis=1)[:, np.newaxis]
    rows, count = columns.shape
    padded = np.vstack((columns, np.zeros((max(0, count - rows), count))))
    chosen = padded.T[order].swapaxes(1, 2) * used[:, np.newaxis]
    return _Split(order, used, *np.linalg.qr(chosen))


def _fits(
    factor: FloatArray, target: FloatArray, subsets: BoolArray
) -> tuple[FloatArray, BoolArray]:
    """Return the subsets' coefficients, 0 for other columns, and whether a subset determines them."""
    split = _split(factor, subsets)
    fixed = split.diagonal > _DEPENDENT
    # Without 0 on the diagonal each has a solution: that of an unused column is 0.
    replaced = ~(fixed & split.used)
    triangular = split.triangular + replaced[:, np.newaxis] * np.eye(len(replaced.T))
    projected = (target @ split.independent[:, : target.size]) * split.used
    solved = np.linalg.solve(triangular, projected[..., np.newaxis])[..., 0]
    coefficients = np.zeros_like(solved)
    np.put_along_axis(coefficients, split.order, solved, axis=1)
    return coefficients, cast(BoolArray, fixed.all(axis=1))


def _subsets_of(form_bits: IntArray, bits: IntArray) -> BoolArray:
    """Return every subset of any form, shape (subsets, columns), the smallest first."""
    numbers = np.arange(2 * bits[-1])
    within = (numbers[:, np.newaxis] & ~form_bits) == 0
    subsets = (numbers[within.any(axis=1), np.newaxis] & bits) > 0
    return subsets[np.argsort(subsets.sum(axis=1), kind="stable")]
