"""What the charts of the HTML report show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from html_records import full_results, with_data
from hypothesis import given, settings
from hypothesis import strategies as st
from pooled_records import POOLS, pooled_sweep
from report_records import made_probe, made_sweep, whole_sweep, without_recommendation
from streamed_records import BUFFERS, empty_stream, made_stream, whole_stream

from batchtune.reports.html.data_figures import frontier_figure, histogram_figure
from batchtune.reports.html.figure import Figure, hover, label, length_unit, time_unit
from batchtune.reports.html.stream_figures import stream_figures
from batchtune.reports.html.sweep_figures import cost_figures
from batchtune.reports.table import spread
from batchtune.results import Sweep

FULL = full_results()


def sweep_of_everything() -> Sweep:
    assert FULL.sweep is not None
    return FULL.sweep


def buckets_figure(sweep: Sweep) -> Figure:
    return cost_figures(sweep)[0]


def randomness_figure(sweep: Sweep) -> Figure:
    return cost_figures(sweep)[1]


def traces(figure: Figure | None, view: int = 0) -> dict[str, dict[str, Any]]:
    assert figure is not None
    return {trace["name"]: trace for trace in figure.views[view].data}


def test_each_strategy_and_each_comparison_has_a_line() -> None:
    assert sorted(traces(buckets_figure(made_sweep()))) == [
        "exponential",
        "fixed-random",
        "fixed-sorted",
        "linear",
        "lower bound",
        "optimal",
        "optimal (frontier)",
        "quantile",
        "recommended",
        "speechbrain",
    ]


def test_the_users_settings_are_among_what_is_compared() -> None:
    for figure in (buckets_figure(whole_sweep()), randomness_figure(whole_sweep())):
        assert "current" in traces(figure)


def test_a_current_config_that_cant_fit_is_marked_in_both() -> None:
    sweep = msgspec.structs.replace(whole_sweep(), current_fits=False)
    for figure in (buckets_figure(sweep), randomness_figure(sweep)):
        assert "current (does not fit)" in traces(figure) and "current" not in traces(figure)


@pytest.mark.parametrize("figure_of", [buckets_figure, randomness_figure])
def test_the_rows_fill_at_least_half_of_a_logarithmic_axis(
    figure_of: Callable[[Sweep], Figure | None],
) -> None:
    """A fixed batch size may cost many times what any table costs: it is then a note above the scale."""
    sweep = made_sweep()
    far = [msgspec.structs.replace(one, batches=400_000, estimated_epoch_seconds=9e4) for one in sweep.baselines]
    for baselines, drawn in ((sweep.baselines, True), (far, False)):
        figure = figure_of(msgspec.structs.replace(sweep, baselines=baselines))
        assert figure is not None
        for view in figure.views:
            assert view.layout["yaxis"]["type"] == "log"
            assert ("fixed-random" in {trace["name"] for trace in view.data}) == drawn
            low, high = view.layout["yaxis"]["range"]
            ys = [y for trace in view.data for y in trace["y"] if trace["name"] in ("speechbrain", "optimal")]
            assert math.log10(max(ys) / min(ys)) >= 0.45 * (high - low)
            notes = [note["text"] for note in view.layout["annotations"]]
            assert (not drawn) == any(text.startswith("↑ fixed-random: ") for text in notes)


def test_every_row_is_a_point_at_its_buckets_and_batches() -> None:
    sweep = made_sweep()
    drawn = traces(buckets_figure(sweep), view=1)["optimal"]
    rows = [row for row in sweep.rows if (row.strategy, row.sizing) == ("optimal", "length")]
    assert list(zip(drawn["x"], drawn["y"], strict=True)) == [(row.num_buckets, row.batches) for row in rows]


def test_nothing_covers_the_recommended_mark() -> None:
    for figure in (buckets_figure(made_sweep()), randomness_figure(made_sweep())):
        assert list(traces(figure))[-1] == "recommended"


@pytest.mark.parametrize(("timed", "labels"), [(True, ["time", "batches"]), (False, ["batches"])])
def test_a_sweep_is_shown_by_time_where_it_is_known(timed: bool, labels: list[str]) -> None:
    assert [view.label for view in buckets_figure(made_sweep(timed=timed)).views] == labels


def test_a_sweep_of_one_bucket_count_is_drawn_too() -> None:
    sweep = made_sweep()
    one = msgspec.structs.replace(sweep, rows=sweep.rows[:1], recommended=0)
    assert traces(buckets_figure(one))["speechbrain"]["x"] == [10]


def test_a_sweep_without_rows_has_no_charts_of_rows() -> None:
    empty = msgspec.structs.replace(made_sweep(), rows=[], recommended=None)
    assert cost_figures(empty) == []


def test_the_trade_off_curve_meets_its_rows() -> None:
    sweep = sweep_of_everything()
    drawn = traces(randomness_figure(sweep))
    on_curve = sorted(100 * sweep.rows[index].mates_again for index in sweep.trade_off)
    assert drawn["no table beats these"]["x"] == pytest.approx(on_curve)


def test_the_trade_off_curve_is_drawn_only_over_its_own_cost() -> None:
    assert "no table beats these" not in traces(randomness_figure(sweep_of_everything()), view=1)


def test_tables_and_pools_are_drawn_by_how_often_mates_meet() -> None:
    sweep = pooled_sweep()
    figure = randomness_figure(sweep)
    drawn = traces(figure)
    assert drawn["pooled"]["marker"]["symbol"] == "diamond"
    assert drawn["pooled"]["x"] == pytest.approx([again / 10 for _, _, again in POOLS.values()])
    assert "<b>pools of 4000 examples</b>" in drawn["pooled"]["hovertext"][1]
    assert "9% of batch mates meet again" in drawn["pooled"]["hovertext"][1]
    assert drawn["optimal"]["x"][0] == pytest.approx(0.45 * 7)
    assert drawn["fixed-random"]["x"] == pytest.approx([100 * 23 / 28_538])
    assert (drawn["current"]["x"], drawn["recommended"]["x"]) == (pytest.approx([0.45]), [20.0])
    on_curve = [100 * (sweep.rows[index].mates_again or 0.0) for index in sweep.trade_off]
    assert drawn["nothing beats these"]["x"] == pytest.approx(sorted(on_curve))
    assert figure.views[0].layout["xaxis"]["type"] == "log" and "diamonds" in figure.caption


def test_pools_are_a_level_where_the_axis_is_buckets() -> None:
    drawn = traces(buckets_figure(pooled_sweep()))
    assert "pooled" not in drawn and "recommended" not in drawn
    level = drawn["recommended: pools of 10,000 examples"]["y"]
    assert level == pytest.approx([3.2626] * len(level), rel=1e-3)  # minutes
    assert not any("pools" in name for name in traces(buckets_figure(pooled_sweep(recommended=None))))


def test_a_sweep_of_pools_alone_has_no_chart_of_buckets() -> None:
    sweep = pooled_sweep()
    pools = [row for row in sweep.rows if row.pool_size is not None]
    alone = msgspec.structs.replace(sweep, rows=pools, recommended=2, recommended_table=None, trade_off=[3, 2, 1, 0])
    (figure,) = cost_figures(alone)
    assert figure.name == "randomness" and "a size of pools" in figure.caption


def test_batches_of_one_have_no_mates_and_no_place() -> None:
    sweep = pooled_sweep()
    rows = [msgspec.structs.replace(row, mates_again=0.0) for row in sweep.rows]
    assert [figure.name for figure in cost_figures(msgspec.structs.replace(sweep, rows=rows))] == ["sweep"]


def test_pools_have_no_boundaries_in_the_histogram() -> None:
    assert list(traces(histogram_figure(with_data(pooled_sweep())))) == ["examples"]


def test_a_stream_has_lines_for_algorithms_and_comparisons() -> None:
    by_buffer, by_mates = stream_figures(whole_stream())
    names = {"SpeechBrain", "bucket", "pool", "pivot", "map-style bucket table", "current", "recommended"}
    assert set(traces(by_buffer)) == set(traces(by_mates)) == names
    drawn = traces(by_buffer)
    assert drawn["SpeechBrain"]["x"] == list(BUFFERS)  # the best of two targets
    assert drawn["SpeechBrain"]["y"][0] == pytest.approx((0.08 * 905 + 0.0004 * 362_127.1 / 0.86) / 60, rel=1e-5)
    assert len(traces(by_mates)["SpeechBrain"]["x"]) == 8
    assert (drawn["recommended"]["x"], traces(by_mates)["recommended"]["x"]) == ([4096.0], [6.8])
    assert (len(drawn["current"]["x"]), traces(by_mates)["current"]["x"]) == (49, [8.4])
    assert [view.label for view in by_buffer.views] == ["time", "batches"]
    assert [view.label for view in by_mates.views] == ["meet again"]


def test_a_stream_without_times_or_others_is_drawn_too() -> None:
    by_buffer, _ = stream_figures(made_stream(timed=False, map_style=None))
    assert [view.label for view in by_buffer.views] == ["batches"]
    assert by_buffer.caption.startswith("Lowest is pool with a buffer of 16,384: 627 batches. Of each")
    one = made_stream(timed=False)
    one = msgspec.structs.replace(one, rows=one.rows[:1], recommended=0, recommended_speechbrain=0)
    rows = [msgspec.structs.replace(one.rows[0], mates_again=0.0, buffer_size=1)]
    assert [len(figure.views) for figure in stream_figures(msgspec.structs.replace(one, rows=rows))] == [1]
    assert stream_figures(empty_stream()) == []


@pytest.mark.parametrize("logarithmic", [True, False])
def test_the_histogram_has_a_bar_for_each_bin(logarithmic: bool) -> None:
    sweep = with_data(made_sweep(), logarithmic=logarithmic)
    figure = histogram_figure(sweep)
    bars = traces(figure)["examples"]
    assert bars["y"] == [b.count for b in sweep.histogram]
    assert all(b.from_ < x < b.to for x, b in zip(bars["x"], sweep.histogram, strict=True))
    assert figure is not None
    assert figure.views[0].layout["xaxis"]["type"] == ("log" if logarithmic else "linear")


def test_every_recommended_boundary_is_a_line_in_the_histogram() -> None:
    sweep = with_data(made_sweep())
    row = sweep.recommended_row
    assert row is not None
    drawn = {x for x in traces(histogram_figure(sweep))["bucket boundaries"]["x"] if x is not None}
    assert sorted(drawn) == pytest.approx(row.boundaries)


def test_the_histogram_has_no_boundaries_unless_recommended() -> None:
    assert list(traces(histogram_figure(without_recommendation(with_data(made_sweep()))))) == ["examples"]


def test_without_a_histogram_none_is_drawn() -> None:
    assert histogram_figure(made_sweep()) is None


def test_every_trial_is_a_point_by_its_outcome() -> None:
    probe = made_probe()
    drawn = traces(frontier_figure(probe))
    assert len(drawn["passed"]["x"]) == sum(trial.outcome == "ok" for trial in probe.trials)
    assert len(drawn["out of memory"]["x"]) == sum(trial.outcome == "oom" for trial in probe.trials)


def test_the_frontier_falls_from_left_to_right() -> None:
    drawn = traces(frontier_figure(made_probe()))["largest that fits"]
    assert drawn["x"] == sorted(drawn["x"])
    assert drawn["y"] == sorted(drawn["y"], reverse=True)


def test_a_frontier_of_one_length_is_a_point() -> None:
    probe = made_probe()
    one = msgspec.structs.replace(probe, frontier=probe.frontier[:1])
    assert len(traces(frontier_figure(one))["largest that fits"]["x"]) == 1


def test_points_closed_by_data_look_and_read_differently() -> None:
    probe = made_probe()
    first = msgspec.structs.replace(probe.frontier[0], batch_size=2, closed_by="data", oom_batch_size=None)
    figure = frontier_figure(msgspec.structs.replace(probe, frontier=[first, *probe.frontier[1:]]))
    drawn = traces(figure)
    assert drawn["largest that fits"]["x"] == [point.length for point in probe.frontier[1:]]
    of_data = drawn["all that the data fill, more may fit"]
    assert (of_data["x"], of_data["mode"]) == ([first.length], "markers")
    assert "largest" not in of_data["hovertext"][0] and "no more examples are this short" in of_data["hovertext"][0]
    assert figure is not None and figure.caption.startswith("From 174 × 3.5 s to 24 × 24.52 s: found in 12 trials")


def test_a_probe_without_a_frontier_has_no_chart() -> None:
    assert frontier_figure(msgspec.structs.replace(made_probe(), frontier=[])) is None


def test_lengths_and_sizes_that_have_no_logarithm_are_not_drawn() -> None:
    probe = made_probe()
    damaged = [
        msgspec.structs.replace(probe.frontier[0], length=0.0),
        msgspec.structs.replace(probe.frontier[1], batch_size=0),
        *probe.frontier[2:],
    ]
    figure = frontier_figure(msgspec.structs.replace(probe, frontier=damaged, max_batch_length=-1.0))
    assert len(traces(figure)["largest that fits"]["x"]) == 4


def test_labels_show_tags_and_entities_as_they_are() -> None:
    assert label("<a href='x'>&lt;</a>\n") == "&lt;a href='x'&gt;&amp;lt;&lt;/a&gt;"
    assert hover("<b>", "", "x<br>y") == "<b>&lt;b&gt;</b><br>x&lt;br&gt;y"


@given(st.integers(0, 3000), st.integers(2, 50), st.sets(st.integers(0, 2999), max_size=5))
@settings(deadline=None)
def test_thinning_keeps_both_ends_and_what_is_to_be_kept(count: int, most: int, keep: set[int]) -> None:
    keep = {index for index in keep if index < count}
    left = spread(range(count), most, keep)
    assert left == sorted(set(left)) and keep <= set(left) and len(left) <= max(most, 0) + len(keep)
    assert not count or (left[0] == 0 and left[-1] == count - 1)


def test_an_axis_of_times_has_a_unit_of_suitable_size() -> None:
    assert [time_unit(seconds)[1] for seconds in (0.5, 3, 300, 20_000)] == ["ms", "s", "min", "h"]
    assert [length_unit(60, "s")[1], length_unit(9000, "s")[1], length_unit(9000, "tokens")[1]] == ["s", "h", "tokens"]
    assert length_unit(9000, None) == (1.0, "")
