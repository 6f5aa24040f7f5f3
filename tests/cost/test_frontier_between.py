"""The frontier between the lengths that were measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.cost import Frontier, largest_max_batch_length
from batchtune.lengths import Lengths
from batchtune.results import ClosedBy, CostModel, FrontierPoint


def point(
    length: float, batch_size: int, *, closed_by: ClosedBy = "oom", target: float | None = None, peak: int | None = None
) -> FrontierPoint:
    return FrontierPoint(
        length=length,
        target_length=target,
        batch_size=batch_size,
        closed_by=closed_by,
        oom_batch_size=None,
        step_seconds=None,
        peak_bytes=peak,
    )


def fits(model: CostModel, room: float, length: float) -> int:
    """The truth: how many examples fit."""
    return int((room - model.constant) / (length * (model.linear + model.quadratic * length)) * (1 + 1e-12))


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=2, max_size=12, unique=True),
    linear=st.floats(1e3, 1e5),
    quadratic=st.floats(0, 100),
    room=st.floats(1.1, 20),
)
@settings(deadline=None, max_examples=150)
def test_where_memory_is_convex_nothing_between_exceeds_what_fits(
    lengths: list[int], linear: float, quadratic: float, room: float
) -> None:
    model = CostModel(floor=0.0, constant=1e8, linear=linear, quadratic=quadratic, relative_error=0.0)
    longest = max(lengths)
    limit = int(1e8 + room * longest * (linear + quadratic * longest))
    sizes = {length: fits(model, limit, length) for length in sorted(lengths)}
    peaks = {length: int(1e8 + size * length * (linear + quadratic * length)) + 1 for length, size in sizes.items()}
    frontier = Frontier.of([point(n, sizes[n], peak=peaks[n]) for n in sizes], limit, model)
    between = np.linspace(min(lengths), longest, 300)
    true = np.array([fits(model, limit, float(length)) for length in between])
    assert (frontier(between) <= true).all()
    assert frontier(np.array(sorted(lengths), dtype=float)).tolist() == [sizes[n] for n in sorted(lengths)]


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 400)), min_size=2, max_size=8, unique_by=lambda row: row[0])
)
@settings(deadline=None, max_examples=100)
def test_between_a_shorter_length_that_holds_fewer_and_a_longer_one_the_fewer_are_taken(
    rows: list[tuple[int, int]],
) -> None:
    rows = sorted(rows)
    frontier = Frontier.of([point(length, size) for length, size in rows])
    for (shorter, few), (longer, many) in itertools.pairwise(rows):
        if few < many:
            assert frontier(np.linspace(shorter, longer, 7)[1:-1]).tolist() == [few] * 5
            assert frontier([shorter, longer]).tolist() == [few, many]


def test_a_shorter_length_that_only_the_data_limit_does_not_limit_longer_ones() -> None:
    frontier = Frontier.of([point(1, 2, closed_by="data"), point(10, 90)])
    assert frontier([1, 5, 10]).tolist() == [2, 90, 90]


def test_max_batch_length_knows_of_a_length_that_holds_fewer() -> None:
    lengths = Lengths.of([5.0] * 100 + [7.0] * 100 + [10.0] * 100)
    monotone = Frontier.of([point(5, 40), point(10, 20)])
    dip = Frontier.of([point(5, 10), point(10, 20)])
    assert largest_max_batch_length(monotone, lengths.histogram) == 202  # 203 would be 29 of length 7
    assert largest_max_batch_length(dip, lengths.histogram) == 54  # 55 would be 11 of length 5


@pytest.mark.parametrize("sizes", [[40, 20], [10, 20], [30, 8, 12], [7, 7, 7]], ids=str)
def test_batches_of_max_batch_length_fit_at_every_length(sizes: list[int]) -> None:
    points = [point(5.0 * (1 + index), size) for index, size in enumerate(sizes)]
    values = np.linspace(5, 5 * len(sizes), 41)
    frontier = Frontier.of(points)
    limit = largest_max_batch_length(frontier, Lengths.of(np.repeat(values, 50)).histogram)
    assert (np.maximum(1, (limit / values).astype(int)) <= frontier(values)).all()


def test_what_is_left_of_the_memory_is_measured_with_its_targets() -> None:
    # One more example needs 10 + 90 of the 50 that are left, or 110 + 90 of the 150.
    model = CostModel(floor=0.0, constant=0.0, linear=1.0, quadratic=0.0, target_linear=1.0, relative_error=0.0)
    points = [point(10, 9, target=90, peak=900), point(110, 4, target=90, peak=800)]
    ends = Frontier.of(points, 950, model).fractional_sizes
    assert ends.tolist() == pytest.approx([9.5, 4.75])


def test_a_model_that_errs_leaves_less_room() -> None:
    def left(error: float) -> float:
        model = CostModel(floor=0.0, constant=0.0, linear=1.0, quadratic=0.0, relative_error=error)
        return float(Frontier.of([point(100, 9, peak=900)], 950, model).fractional_sizes[0])

    assert left(0.25) == pytest.approx(9.4)
    assert left(0.0) == pytest.approx(9.5)


def test_a_batch_size_that_the_user_caps_is_no_limit_of_the_memory() -> None:
    lengths = Lengths.of([5.0] * 100 + [10.0] * 100)
    capped = Frontier.of([point(5.0, 60), point(10.0, 60)])
    assert largest_max_batch_length(capped, lengths.histogram) == 304  # 305 would be 61 of length 5
    assert largest_max_batch_length(capped, lengths.histogram, max_batch_size=60) == 600
