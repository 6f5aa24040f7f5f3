"""The geometry of the charts."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_records import made_probe, made_sweep

from batchtune.reports.chart import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Chart,
    Line,
    even_ticks,
    frontier_chart,
    log_ticks,
    place_labels,
    sweep_chart,
)


def line_at(y: float) -> Line:
    return Line(label="", role="series", path="", end_x=0, end_y=y, label_y=y)


def chart_of_sweep(timed: bool = True) -> Chart:
    chart = sweep_chart(made_sweep(timed=timed))
    assert chart is not None
    return chart


@given(st.floats(0, 1e9), st.floats(0, 1e9))
@settings(deadline=None)
def test_even_ticks_cover_the_range_with_few_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    if 0 < high - low < 1e-6 * high:
        return
    ticks = even_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert 2 <= len(ticks) <= 8


@given(st.floats(1e-6, 1e9), st.floats(1, 1e6))
@settings(deadline=None)
def test_log_ticks_cover_the_range_with_few_values(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert ticks == sorted(ticks) and 1 <= len(ticks) <= 10
    if len(ticks) > 1 and not all(math.log10(tick).is_integer() for tick in ticks):
        assert ticks[0] <= low and ticks[-1] >= low * ratio


@given(st.lists(st.floats(TOP, BOTTOM), max_size=15))
@settings(deadline=None)
def test_labels_keep_their_order_and_never_overlap(ends: list[float]) -> None:
    placed = place_labels([line_at(y) for y in ends])
    labels = [line.label_y for line in sorted(placed, key=lambda line: (line.end_y, line.label_y))]
    assert all(after - before >= 16.9 for before, after in pairwise(labels))
    assert all(label <= BOTTOM for label in labels)


def test_every_mark_lies_inside_the_plot() -> None:
    marks = [mark for line in chart_of_sweep().lines for mark in line.marks]
    assert all(LEFT <= mark.x <= RIGHT and TOP <= mark.y <= BOTTOM for mark in marks)


def test_there_is_one_line_for_each_strategy_and_sizing_and_each_thing_to_compare_with() -> None:
    assert sorted(line.label for line in chart_of_sweep().lines) == [
        "exponential",
        "fixed-random",
        "fixed-sorted",
        "linear",
        "lower bound",
        "optimal",
        "optimal (frontier)",
        "quantile",
        "speechbrain",
    ]


def test_the_recommended_mark_is_drawn_last_so_that_nothing_covers_it() -> None:
    marks = [mark.recommended for mark in chart_of_sweep().lines[-1].marks]
    assert marks.count(True) == 1


def test_without_times_the_chart_shows_batches() -> None:
    assert chart_of_sweep(timed=False).y_title == "batches of one epoch"


def test_a_time_axis_names_its_unit() -> None:
    assert chart_of_sweep().y_title == "estimated time of one epoch (min)"


def test_a_sweep_of_one_bucket_count_is_drawn_too() -> None:
    sweep = made_sweep()
    chart = sweep_chart(msgspec.structs.replace(sweep, rows=sweep.rows[:1], recommended=0))
    assert chart is not None and [tick.label for tick in chart.x_ticks] == ["10"]


def test_a_sweep_without_rows_has_no_chart() -> None:
    assert sweep_chart(msgspec.structs.replace(made_sweep(), rows=[], recommended=None)) is None


def test_the_frontier_falls_from_left_to_right() -> None:
    chart = frontier_chart(made_probe())
    assert chart is not None
    marks = next(line for line in chart.lines if line.role == "series").marks
    assert [mark.x for mark in marks] == sorted(mark.x for mark in marks)
    assert [mark.y for mark in marks] == sorted(mark.y for mark in marks)


@pytest.mark.parametrize("count", [0, 1])
def test_a_frontier_of_fewer_than_two_lengths_has_no_chart(count: int) -> None:
    probe = made_probe()
    assert frontier_chart(msgspec.structs.replace(probe, frontier=probe.frontier[:count])) is None


def test_lengths_and_sizes_that_have_no_logarithm_are_not_drawn() -> None:
    probe = made_probe()
    damaged = [
        msgspec.structs.replace(probe.frontier[0], length=0.0),
        msgspec.structs.replace(probe.frontier[1], batch_size=0),
        *probe.frontier[2:],
    ]
    chart = frontier_chart(msgspec.structs.replace(probe, frontier=damaged, max_batch_length=-1.0))
    assert chart is not None and [len(line.marks) for line in chart.lines] == [4]
