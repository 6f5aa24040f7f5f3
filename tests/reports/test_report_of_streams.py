"""What a report says of a stream: in sentences, in tables, and in the verdicts of the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from report_records import made_probe, made_sweep, rule_inputs, summary_of, tables_of, warnings_of, whole_sweep
from streamed_records import made_stream, streamed, whole_stream

from batchtune.errors import ResultError
from batchtune.reports import RunResults, load_run
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import build_page
from batchtune.reports.section import UNKNOWN
from batchtune.results import StreamRow, StreamSweep, Verdict, write_result


def alone(stream: StreamSweep) -> RunResults:
    return RunResults(name="run", stream=stream)


def said(stream: StreamSweep) -> str:
    return " ".join(summary_of(stream=stream))


def with_row(stream: StreamSweep, **changes: Any) -> StreamSweep:
    """A stream with other numbers in its recommended row."""
    rows = [replace(row, **changes) if index == stream.recommended else row for index, row in enumerate(stream.rows)]
    return replace(stream, rows=rows)


def verdict_of(rule: str, stream: StreamSweep | None, **evidence: Any) -> Verdict:
    (verdict,) = judge(parse_rules([rule]), rule_inputs(**{"sweep": None, **evidence}, stream=stream))
    return verdict


# Reading


@pytest.mark.parametrize("others", [{}, {"probe": made_probe()}, {"sweep": whole_sweep()}])
def test_a_stream_is_a_run_alone_and_beside_others(tmp_path: Path, others: dict[str, Any]) -> None:
    for name, result in {**others, "stream": whole_stream()}.items():
        write_result(tmp_path / f"{name}.json", result)
    results = load_run(tmp_path)
    assert results.stream == whole_stream()
    assert results.main is (results.sweep or results.stream)


@pytest.mark.parametrize("other", ["probe", "sweep"])
def test_a_stream_of_other_data_is_refused(tmp_path: Path, other: str) -> None:
    stream = whole_stream()
    write_result(tmp_path / "stream.json", replace(stream, lengths=replace(stream.lengths, fingerprint="0" * 64)))
    write_result(tmp_path / f"{other}.json", made_probe() if other == "probe" else made_sweep())
    with pytest.raises(ResultError, match=rf"{other}\.json and .*stream\.json are of different data: 28,539"):
        load_run(tmp_path)


@pytest.mark.parametrize("place", [2, 10])
def test_a_row_with_more_sizes_than_boundaries_is_damage(tmp_path: Path, place: int) -> None:
    stream = made_stream()
    rows = [replace(row, batch_sizes=[1, 2]) if index == place else row for index, row in enumerate(stream.rows)]
    write_result(tmp_path / "stream.json", replace(stream, rows=rows))
    with pytest.raises(ResultError, match=rf"rows, entry {place}: it has \d+ boundaries and 2 batch sizes"):
        load_run(tmp_path)


# Sentences


def test_what_to_set_comes_first_as_one_would_type_it() -> None:
    assert summary_of(stream=whole_stream())[0] == (
        'Set BucketedStream(algorithm="pool", buffer_size=4096) with max_batch_length = 600 s: 1.35 times faster than '
        "your current config."
    )


def test_sizes_beyond_max_batch_length_are_called_measured() -> None:
    stream = made_stream(timed=False)
    row = stream.rows[10]
    measured = with_row(stream, batch_sizes=[2 * row.batch_sizes[0], *row.batch_sizes[1:]])
    assert "buffer_size=4096) with measured batch sizes: 22.1% fewer" in said(measured)
    overlong = with_row(stream, boundaries=[*row.boundaries, 700.0], batch_sizes=[*row.batch_sizes, 1])
    assert "buffer_size=4096) with max_batch_length = 600 s" in said(overlong)


def test_speechbrains_own_call_is_typed_with_its_defaults() -> None:
    stream = whole_stream(timed=False)
    assert (
        'dynamic_bucketed_batch(buffersize=4096, sampler_kwargs={"target_batch_numel": 540, "max_batch_numel": 600, '
        '"max_padding_ratio": 0.2}) (numbers in s).'
    ) in said(stream)
    rows = [replace(row, max_padding_ratio=None, max_batch_size=32) for row in stream.rows]
    headline = summary_of(stream=(replace(stream, rows=rows, recommended=2)))[0]
    assert headline == (
        'Set dynamic_bucketed_batch(buffersize=4096, sampler_kwargs={"target_batch_numel": 540, "max_batch_numel": '
        '600, "max_batch_size": 32, "max_padding_ratio": None}): 37.7% fewer batches than with your current config.'
    )
    assert "len_key has to give lengths in s, too." in said(replace(stream, recommended=2))


def test_beside_a_sweep_a_brief_report_shows_its_headline_alone() -> None:
    page = build_page(streamed(sweep=True))
    assert [text.split("(")[0] for text in page.lead] == ["Set 13 buckets ", "Set BucketedStream"]
    assert list(tables_of(streamed(sweep=True), brief=True)) == [
        "What an epoch costs on 8 ranks",
        "What an epoch of the stream costs",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "Every batch of the simulated epochs was run, or is no larger than one that was.",
        "looped_nominal_epoch=316 in SpeechBrain, .with_epoch(316) in WebDataset.",
        "write 64 shards: ShardWriter(pattern, maxcount=446, maxsize=400000000).",
        "Your current config is dynamic_bucketed_batch with buffersize 1024 (train.yaml).",
        "Shards: 6 of 0 to 9000 examples (median 600), 1800 s to 7802 s in all.",
        "A worker holds at most 4096 examples, 52,019 s in all (3.1 GiB).",
        "An epoch leaves out 37 examples at its end",
        "Figures are means of 3 simulated epochs, whose batches differ by 0.2% (standard deviation).",
        "14,270 of 28,539 examples were simulated",
        "The measured steps give the time to within 2.5% (two standard errors).",
    ],
)
def test_what_else_a_stream_knows_is_said(sentence: str) -> None:
    assert sentence in said(with_row(whole_stream(), dropped_examples=37, batches_deviation=1.5))


def test_without_times_batches_are_compared_where_they_are_known() -> None:
    bare = made_stream(timed=False, map_style=None, recommended_speechbrain=None)
    first, second, *_ = summary_of(stream=bare)
    assert first == 'Set BucketedStream(algorithm="pool", buffer_size=4096) with max_batch_length = 600 s.'
    assert second.startswith("Step times are not known: ")
    assert said(made_stream(timed=False)).startswith(f"{first[:-1]}: 22.1% fewer batches than with SpeechBrain's best")


def test_shards_that_are_made_up_are_told_as_such() -> None:
    made = made_stream()
    assumed = replace(made, shards=replace(made.shards, assumed=True))
    assert "Shards: 48 of 600 examples each, assumed: the source is not a set of shards." in said(assumed)


def test_a_better_current_config_is_kept() -> None:
    stream = made_stream(timed=False)
    stream = replace(stream, current=replace(stream.rows[11], batches=600), current_fits=True)
    assert "Your current config is better than what is recommended: keep it." in said(stream)
    unfit = replace(stream, current_fits=False)
    assert "keep it" not in said(unfit) and "your current config" not in said(unfit)
    assert warnings_of(stream=unfit)[0].startswith("Your current config does not fit")


def test_without_a_recommendation_the_reason_is_given() -> None:
    none = replace(whole_stream(), recommended=None, reason="the stream holds one example")
    page = build_page(alone(none))
    assert page.lead == ["Nothing is recommended for the stream: the stream holds one example."]
    assert tables_of(alone(none), brief=True) == {}
    assert page.next_steps[0] == ("batchtune sweep-stream SOURCE", "compare other buffers and settings")


def test_batches_that_are_not_proven_are_a_warning() -> None:
    assert warnings_of(stream=with_row(made_stream(), unproven=3))[0] == (
        "3 of 632 batches of an epoch are not proven to fit. Run `batchtune probe-oom` again with --force, then "
        "`batchtune sweep-stream`."
    )
    assert "simulated epochs was run" not in said(with_row(made_stream(), unproven=3))
    other = made_stream(max_batch_length=700.0)
    assert warnings_of(stream=other, probe=made_probe())[0].startswith("max_batch_length is 700 s here")


# Tables


def test_the_brief_table_has_the_best_of_each_algorithm() -> None:
    (table,) = tables_of(alone(whole_stream()), brief=True).values()
    assert [row[:3] for row in table.rows] == [
        ("recommended (pool)", "4096", "632"),
        ("your current config", "1024", "1302"),
        ("SpeechBrain, best", "4096", "811"),
        ("bucket, best", "4096", "646"),
        ("pivot, best", "4096", "718"),
        ("map-style bucket table", UNKNOWN, "634"),
    ]
    assert table.marked == 0


def test_the_best_of_an_algorithm_is_proven_first() -> None:
    stream = made_stream()
    rows = [replace(row, unproven=int(row.algorithm == "bucket" and row.buffer_size == 4096)) for row in stream.rows]
    (table,) = tables_of(alone(replace(stream, rows=rows)), brief=True).values()
    assert ("bucket, best", "1024", "672") in [row[:3] for row in table.rows]


def test_the_full_table_has_every_row() -> None:
    tables = tables_of(alone(whole_stream()))
    rows = tables["Ways to batch the stream"]
    assert len(rows.rows) == 20 and rows.marked is not None and rows.rows[rows.marked][:2] == ("pool", "4096")
    ways = {row[0] for row in rows.rows}
    assert {"SpeechBrain, target 540, padding to 20%", "bucket, 13 buckets", "pivot, padding to 20%"} < ways
    assert len(tables["Batch sizes of the stream (pool with a buffer of 4096)"].rows) == 40


# The gate


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("stream.batches > 631", "fails"),
        ("stream.randomness < 90%", "holds"),
        ("stream.mates_again >= 6.8%", "fails"),
        ("stream.worker_imbalance > 106%", "holds"),
        ("stream.unproven > 0", "holds"),
        ("stream.equal_to_best == false", "holds"),
        ("stream.current.randomness < 0.9", "holds"),
        ("stream.batches_per_rank != 316", "holds"),
        ("shards.count < 8", "fails"),
        ("shards.sorted == true", "fails"),
        ("shards.advice.shards > 63", "fails"),
    ],
)
def test_a_stream_is_held_to_rules(rule: str, expected: str) -> None:
    assert verdict_of(rule, whole_stream()).outcome == expected


@pytest.mark.parametrize(
    ("rule", "stream", "why"),
    [
        ("stream.padding > 8%", whole_stream(), "did you mean stream.padding_ratio?"),
        ("shard.broken > 0", whole_stream(), "did you mean shards.broken?"),
        ("batches > 3", whole_stream(), "fields of the stream begin with stream., such as stream.batches"),
        ("stream.batches > 3", None, "the run has no stream.json: run `batchtune sweep-stream`"),
        ("stream.batches > 3", made_stream(recommended=None, reason="one example"), "recommends no row: one example"),
        ("stream.current.batches > 3", made_stream(), "`batchtune sweep-stream` with --current"),
        ("stream.unproven > 0", made_stream(), "only a sweep of batches that were probed knows it"),
        ("stream.max_batch_numel > 0", made_stream(), "only SpeechBrain's own algorithm has it"),
        ("shards.advice.maxcount > 0", made_stream(), "(null): the shards do as they are"),
        ("stream.mixing worse 2%", made_stream(), "no other run to compare with is given: use --baseline"),
        ("stream.under_half > 8", made_stream(), "from 0 to 1"),
        ("stream.simulated_examples worse 2%", made_stream(), "can't be worse; stream.batch_size_variation, "),
    ],
)
def test_what_is_not_known_of_a_stream_says_why(rule: str, stream: StreamSweep | None, why: str) -> None:
    verdict = verdict_of(rule, stream)
    assert verdict.outcome == "error" and why in verdict.message


@pytest.mark.parametrize(
    ("rule", "theirs", "expected"),
    [
        ("stream.batches worse 2%", {"batches": 620}, "holds"),
        ("stream.batches worse 1%", {"batches": 620}, "fails"),
        ("stream.mixing worse 10%", {"mixing": 0.5}, "fails"),
        ("stream.buffer_bytes worse 0%", {"buffer_bytes": 1e9}, "fails"),
    ],
)
def test_a_stream_is_compared_with_a_baseline(rule: str, theirs: dict[str, float], expected: str) -> None:
    verdict = verdict_of(rule, made_stream(), baseline_stream=with_row(made_stream(), **theirs))
    assert verdict.outcome == expected and "in the baseline" in verdict.message


def test_a_baseline_without_a_stream_says_so() -> None:
    verdict = verdict_of("stream.batches worse 2%", made_stream(), baseline=made_sweep())
    assert verdict.message == "the baseline has no stream.json: run `batchtune sweep-stream` there"
    other = verdict_of("batches worse 2%", None, sweep=made_sweep(), baseline_stream=made_stream())
    assert other.message == "the baseline has no sweep.json: run `batchtune sweep-buckets` there"


def test_rows_of_tables_and_streams_do_not_mix() -> None:
    assert verdict_of("batches > 633", made_stream(), sweep=made_sweep()).value == 634
    assert verdict_of("stream.batches > 633", made_stream(), sweep=made_sweep()).value == 632
    assert isinstance(made_stream().recommended_row, StreamRow)
