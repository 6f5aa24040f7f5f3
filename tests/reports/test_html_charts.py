"""What the charts of the HTML report show."""

import pytest
from html_records import with_data
from loader_records import all_failed, loaded, made_iterable
from msgspec.structs import replace
from packed_records import with_packing
from pooled_records import pooled_sweep
from report_records import made_probe, made_sweep, without_recommendation
from reports.changed import run_of
from streamed_records import BUFFERS, empty_stream, made_stream, whole_stream

from batchtune.reports.html import figures, label


def drawn(name, results=None, **records):
    """Name → trace of a chart; empty without that chart."""
    for figure in figures(results or run_of(**records)):
        if figure.name == name:
            return {trace["name"]: trace for trace in figure.data}
    return {}


def test_packing_is_a_level_and_no_padded_row_is_recommended():
    sweep = with_packing(made_sweep(timed=False))
    traces = drawn("sweep", sweep=sweep)
    assert set(traces["even packing"]["y"]) == {640}
    assert "recommended" not in traces
    # By time it has no height, as its time is not known.
    assert "even packing" not in drawn("sweep", sweep=with_packing(made_sweep()))


def test_every_row_is_a_point_at_its_buckets_and_batches():
    sweep = made_sweep(timed=False)
    traces = drawn("sweep", sweep=sweep)
    rows = [
        row for row in sweep.rows if (row.strategy, row.sizing) == ("optimal", "length")
    ]
    points = zip(traces["optimal"]["x"], traces["optimal"]["y"], strict=True)
    assert list(points) == [(row.num_buckets, row.batches) for row in rows]
    strategies = ["speechbrain", "quantile", "linear", "exponential", "optimal"]
    levels = ["fixed-random", "fixed-sorted", "lower bound"]
    # Nothing covers what is recommended.
    names = [*levels, *strategies, "optimal (frontier)", "recommended"]
    assert list(traces) == names


def test_a_level_far_above_all_rows_is_shown_by_a_click():
    sweep = made_sweep()
    assert drawn("sweep", sweep=sweep)["fixed-random"]["visible"] is True
    far = replace(sweep.baselines[0], batches=400_000, estimated_epoch_seconds=9e4)
    traces = drawn("sweep", sweep=replace(sweep, baselines=[far]))
    assert traces["fixed-random"]["visible"] == "legendonly"


def test_pools_are_a_level_where_the_axis_is_buckets():
    traces = drawn("sweep", sweep=pooled_sweep())
    assert "pooled" not in traces and "recommended" not in traces
    # minutes.
    level = traces["recommended: pools of 10,000 examples"]["y"]
    assert level == pytest.approx([3.2626] * 2, rel=1e-3)


def test_a_stream_has_a_line_for_each_algorithm():
    traces = drawn("stream", stream=whole_stream())
    others = {"map-style bucket table", "your current config", "recommended"}
    assert set(traces) == others | {"SpeechBrain", "bucket", "pivot"}
    assert traces["SpeechBrain"]["x"] == list(BUFFERS)  # the best of two targets
    minutes = (0.08 * 905 + 0.0004 * 362_127.1 / 0.86) / 60
    assert traces["SpeechBrain"]["y"][0] == pytest.approx(minutes, rel=1e-5)
    assert traces["recommended"]["x"] == [4096.0]
    untimed = drawn("stream", stream=made_stream(timed=False))
    assert untimed["pivot"]["y"] == [742, 655, 632, 627]


@pytest.mark.parametrize("logarithmic", [True, False])
def test_the_histogram_has_its_bins_and_the_batch_sizes(logarithmic):
    sweep = with_data(made_sweep(), logarithmic=logarithmic)
    row = sweep.recommended_row
    traces = drawn("lengths", sweep=sweep)
    bars = traces["examples"]
    assert bars["y"] == [bin_.count for bin_ in sweep.histogram]
    for x, bin_ in zip(bars["x"], sweep.histogram, strict=True):
        assert bin_.from_ < x < bin_.to
    assert traces["batch size"]["x"][1:] == pytest.approx(row.boundaries)
    assert traces["batch size"]["y"][1:] == row.batch_sizes
    scale = figures(run_of(sweep=sweep))[1].layout["xaxis"]["type"]
    assert scale == ("log" if logarithmic else "linear")
    assert list(drawn("lengths", sweep=without_recommendation(sweep))) == ["examples"]


def test_every_trial_is_a_point_by_its_outcome():
    shortest, *others = made_probe().frontier
    by_data = replace(shortest, closed_by="data")
    traces = drawn("frontier", probe=replace(made_probe(), frontier=[by_data, *others]))
    # What the data end is no part of the line that memory draws.
    by_memory = traces["largest that memory allows"]
    assert by_memory["x"] == [point.length for point in others]
    assert by_memory["y"] == [point.batch_size for point in others]
    all_data = traces["largest tried"]
    assert (all_data["x"], all_data["y"]) == ([shortest.length], [shortest.batch_size])
    assert len(traces["passed"]["x"]) == 8
    assert len(traces["out of memory"]["x"]) == 4


def test_what_the_loader_delivers_is_drawn_with_the_steps_demand():
    traces = drawn("loader", loaded())
    demand = "the step takes 833.3 examples/s"
    assert list(traces) == ["settings", demand, "recommended"]
    assert len(traces["settings"]["x"]) == 9 and traces["recommended"]["x"] == [4]
    assert set(traces[demand]["y"]) == {833.333}
    assert drawn("loader", loaded(made_iterable()))["recommended"]["y"] == [52.5]


def test_what_there_is_not_is_not_drawn():
    for run in (
        run_of(sweep=replace(made_sweep(), rows=[], recommended=None)),
        run_of(stream=empty_stream()),
        run_of(probe=replace(made_probe(), frontier=[])),
        loaded(all_failed()),
    ):
        assert figures(run) == []
    rows = [row for row in pooled_sweep().rows if row.pool_size is not None]
    pools = replace(pooled_sweep(), rows=rows, recommended=2, recommended_table=None)
    assert drawn("sweep", sweep=pools) == {}


def test_labels_show_tags_and_entities_as_they_are():
    assert label("<a href='x'>&lt;</a>\n") == "&lt;a href='x'&gt;&amp;lt;&lt;/a&gt;"
