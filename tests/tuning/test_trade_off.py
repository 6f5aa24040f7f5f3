from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.tuning.trade_off import knee, trade_off

# Few different values, so that ties of all kinds happen.
ROWS = st.lists(st.tuples(st.integers(1, 9).map(float), st.integers(1, 9).map(float)), max_size=25)


def columns(rows: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [cost for cost, _ in rows], [buckets for _, buckets in rows]


def beaten(row: tuple[float, float], rows: list[tuple[float, float]]) -> bool:
    return any(other != row and other[0] <= row[0] and other[1] <= row[1] for other in rows)


@given(ROWS)
@settings(deadline=None, max_examples=300)
def test_the_curve_holds_each_unbeaten_point_once_by_brute_force(rows: list[tuple[float, float]]) -> None:
    unbeaten = sorted({row for row in rows if not beaten(row, rows)})
    assert [rows[index] for index in trade_off(*columns(rows))] == unbeaten


@given(ROWS)
@settings(deadline=None, max_examples=100)
def test_of_equal_points_the_first_is_on_the_curve(rows: list[tuple[float, float]]) -> None:
    assert all(rows.index(rows[index]) == index for index in trade_off(*columns(rows)))


@given(ROWS)
@settings(deadline=None, max_examples=100)
def test_along_the_curve_costs_rise_and_effective_buckets_fall(rows: list[tuple[float, float]]) -> None:
    costs, buckets = columns(rows)
    curve = trade_off(costs, buckets)
    assert (np.diff([costs[index] for index in curve]) > 0).all()
    assert (np.diff([buckets[index] for index in curve]) < 0).all()


def test_the_knee_is_the_corner_of_an_l() -> None:
    costs, buckets = [1.0, 1.1, 1.2, 2.0, 3.0], [10.0, 6.0, 2.0, 1.5, 1.0]
    assert knee(costs, buckets, trade_off(costs, buckets)) == 2


def test_the_knee_is_an_index_of_the_rows_not_of_the_curve() -> None:
    costs, buckets = [9.0, 3.0, 1.2, 1.0], [9.0, 1.0, 2.0, 10.0]
    assert trade_off(costs, buckets) == [3, 2, 1]
    assert knee(costs, buckets, [3, 2, 1]) == 2


def test_the_units_of_the_axes_do_not_move_the_knee() -> None:
    costs, buckets = [1.0, 1.3, 2.0, 4.0], [8.0, 4.0, 3.5, 1.0]
    assert knee(costs, buckets, [0, 1, 2, 3]) == knee([cost * 3600 for cost in costs], buckets, [0, 1, 2, 3]) == 1


@pytest.mark.parametrize(
    ("costs", "buckets"),
    [([], []), ([1.0], [1.0]), ([1.0, 2.0], [2.0, 1.0]), ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])],
    ids=["no rows", "one", "two", "a straight line"],
)
def test_without_a_bend_there_is_no_knee(costs: list[float], buckets: list[float]) -> None:
    assert knee(costs, buckets, trade_off(costs, buckets)) is None


def test_a_curve_that_bulges_away_has_no_knee() -> None:
    assert knee([1.0, 2.0, 3.0], [3.0, 2.8, 1.0], [0, 1, 2]) is None


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="1 effective buckets for 2 costs"):
        trade_off([1.0, 2.0], [1.0])
