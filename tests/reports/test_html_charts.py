"""What the charts of the HTML report show."""

import pytest
from html_records import with_data
from loader_records import all_failed, loaded, made_iterable
from msgspec.structs import replace
from packed_records import with_packing
from pooled_records import pooled_sweep
from report_records import made_probe, made_sweep, without_recommendation
from streamed_records import BUFFERS, empty_stream, made_stream, whole_stream

from batchtune.reports import RunResults
from batchtune.reports.html import figures, label


def drawn(name, results=None, **records):
    """Name → trace of a chart; empty without that chart."""
    run = results or RunResults(name="run", **records)
    for figure in figures(run):
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
    strategies = {
        "speechbrain",
        "quantile",
        "linear",
        "exponential",
        "optimal",
        "optimal (frontier)",
    }
    assert set(traces) == strategies | {
        "fixed-random",
        "fixed-sorted",
        "lower bound",
        "recommended",
    }
    assert list(traces)[-1] == "recommended"  # nothing covers it


def test_a_level_far_above_all_rows_is_shown_by_a_click():
    sweep = made_sweep()
    far = [
        replace(
            baseline,
            batches=400_000,
            estimated_epoch_seconds=9e4,
        )
        for baseline in sweep.baselines
    ]
    assert drawn("sweep", sweep=sweep)["fixed-random"]["visible"] is True
    assert (
        drawn("sweep", sweep=replace(sweep, baselines=far))["fixed-random"]["visible"]
        == "legendonly"
    )


def test_pools_are_a_level_where_the_axis_is_buckets():
    traces = drawn("sweep", sweep=pooled_sweep())
    assert "pooled" not in traces and "recommended" not in traces
    # minutes.
    assert traces["recommended: pools of 10,000 examples"]["y"] == pytest.approx(
        [3.2626] * 2, rel=1e-3
    )


def test_a_stream_has_a_line_for_each_algorithm():
    traces = drawn("stream", stream=whole_stream())
    names = {
        "SpeechBrain",
        "bucket",
        "pivot",
        "map-style bucket table",
        "your current config",
        "recommended",
    }
    assert set(traces) == names
    assert traces["SpeechBrain"]["x"] == list(BUFFERS)  # the best of two targets
    assert traces["SpeechBrain"]["y"][0] == pytest.approx(
        (0.08 * 905 + 0.0004 * 362_127.1 / 0.86) / 60, rel=1e-5
    )
    assert traces["recommended"]["x"] == [4096.0]
    assert drawn("stream", stream=made_stream(timed=False))["pivot"]["y"] == [
        742,
        655,
        632,
        627,
    ]


@pytest.mark.parametrize("logarithmic", [True, False])
def test_the_histogram_has_its_bins_and_the_batch_sizes(logarithmic):
    sweep = with_data(made_sweep(), logarithmic=logarithmic)
    row = sweep.recommended_row
    traces = drawn("lengths", sweep=sweep)
    bars = traces["examples"]
    assert bars["y"] == [bin_.count for bin_ in sweep.histogram]
    assert all(
        bin_.from_ < x < bin_.to
        for x, bin_ in zip(bars["x"], sweep.histogram, strict=True)
    )
    assert traces["batch size"]["x"][1:] == pytest.approx(row.boundaries)
    assert traces["batch size"]["y"][1:] == row.batch_sizes
    scale = figures(RunResults(name="run", sweep=sweep))[1].layout["xaxis"]["type"]
    assert scale == ("log" if logarithmic else "linear")
    assert list(drawn("lengths", sweep=without_recommendation(sweep))) == ["examples"]


def test_every_trial_is_a_point_by_its_outcome():
    probe = made_probe()
    shortest, *others = probe.frontier
    shortest = replace(shortest, closed_by="data")
    probe = replace(probe, frontier=[shortest, *others])
    traces = drawn("frontier", probe=probe)
    # What the data end is no part of the line that memory draws.
    for name, ends in (
        ("largest that memory allows", False),
        ("all that the data have", True),
    ):
        points = [
            point for point in probe.frontier if (point.closed_by == "data") is ends
        ]
        assert traces[name]["x"] == [point.length for point in points]
        assert traces[name]["y"] == [point.batch_size for point in points]
    assert len(traces["passed"]["x"]) == sum(
        trial.outcome == "ok" for trial in probe.trials
    )
    assert len(traces["out of memory"]["x"]) == sum(
        trial.outcome == "oom" for trial in probe.trials
    )


def test_what_the_loader_delivers_is_drawn_with_the_steps_demand():
    traces = drawn("loader", loaded())
    assert list(traces) == [
        "settings",
        "the step takes 833.3 examples/s",
        "recommended",
    ]
    assert len(traces["settings"]["x"]) == 9 and traces["recommended"]["x"] == [4]
    assert set(traces["the step takes 833.3 examples/s"]["y"]) == {833.333}
    assert drawn("loader", loaded(made_iterable()))["recommended"]["y"] == [52.5]


def test_what_there_is_not_is_not_drawn():
    empty = replace(made_sweep(), rows=[], recommended=None)
    assert figures(RunResults(name="run", sweep=empty)) == []
    pools = [row for row in pooled_sweep().rows if row.pool_size is not None]
    assert (
        drawn(
            "sweep",
            sweep=replace(
                pooled_sweep(), rows=pools, recommended=2, recommended_table=None
            ),
        )
        == {}
    )
    assert figures(RunResults(name="run", stream=empty_stream())) == []
    assert (
        figures(RunResults(name="run", probe=replace(made_probe(), frontier=[]))) == []
    )
    assert figures(loaded(all_failed())) == []


def test_labels_show_tags_and_entities_as_they_are():
    assert label("<a href='x'>&lt;</a>\n") == "&lt;a href='x'&gt;&amp;lt;&lt;/a&gt;"
