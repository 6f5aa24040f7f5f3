"""What a report says of a stream: in sentences, in tables, and in the verdicts of the gate."""

import pytest
from msgspec.structs import replace
from report_records import made_probe, summary_of, tables_of, warnings_of
from reports.changed import with_row
from streamed_records import made_stream, whole_stream

from batchtune.reports import RunResults
from batchtune.reports.page import build_page


def alone(stream):
    return RunResults(name="run", stream=stream)


def said(stream):
    return " ".join(summary_of(stream=stream))


# Sentences


def test_sizes_beyond_max_batch_length_are_called_measured():
    stream = made_stream(timed=False)
    row = stream.rows[10]
    measured = with_row(
        stream, batch_sizes=[2 * row.batch_sizes[0], *row.batch_sizes[1:]]
    )
    assert (
        "buffer_size=4096, max_padding_ratio=0.2) with measured batch sizes: 22.1% fewer"
        in said(measured)
    )
    overlong = with_row(
        stream, boundaries=[*row.boundaries, 700.0], batch_sizes=[*row.batch_sizes, 1]
    )
    assert (
        "buffer_size=4096, max_padding_ratio=0.2) with max_batch_length = 600 s"
        in said(overlong)
    )


def test_speechbrains_own_call_is_typed_with_its_defaults():
    stream = whole_stream(timed=False)
    rows = [
        replace(row, max_padding_ratio=None, max_batch_size=32) for row in stream.rows
    ]
    headline = summary_of(stream=(replace(stream, rows=rows, recommended=2)))[0]
    assert headline == (
        'Set dynamic_bucketed_batch(buffersize=4096, sampler_kwargs={"target_batch_numel": 540, "max_batch_numel": '
        '600, "max_batch_size": 32, "max_padding_ratio": None}): 37.7% fewer batches than with your current config.'
    )
    assert "len_key has to give lengths in s, too." in said(
        replace(stream, recommended=2)
    )


@pytest.mark.parametrize(
    "sentence",
    [
        "An epoch leaves out 37 examples at its end",
        "Figures are means of 3 simulated epochs, whose batches differ by 0.2% (standard deviation).",
    ],
)
def test_what_else_a_stream_knows_is_said(sentence):
    assert sentence in said(
        with_row(whole_stream(), dropped_examples=37, batches_deviation=1.5)
    )


def test_without_times_batches_are_compared_where_they_are_known():
    bare = made_stream(timed=False, map_style=None, recommended_speechbrain=None)
    first, second, *_ = summary_of(stream=bare)
    assert (
        first
        == 'Set BucketedStream(algorithm="pivot", buffer_size=4096, max_padding_ratio=0.2) '
        "with max_batch_length = 600 s."
    )
    assert second.startswith("Step times are not known: ")
    assert said(made_stream(timed=False)).startswith(
        f"{first[:-1]}: 22.1% fewer batches than with SpeechBrain's best"
    )


def test_shards_that_are_made_up_are_told_as_such():
    made = made_stream()
    assumed = replace(made, shards=replace(made.shards, assumed=True))
    assert (
        "Shards: 48 of 600 examples each, assumed: the source is not a set of shards."
        in said(assumed)
    )


def test_a_better_current_config_is_kept():
    stream = made_stream(timed=False)
    stream = replace(
        stream, current=replace(stream.rows[11], batches=600), current_fits=True
    )
    assert "Keep your current config: " in said(stream)
    unfit = replace(stream, current_fits=False)
    assert "your current config" not in said(unfit)
    assert warnings_of(stream=unfit)[0].startswith("Your current config does not fit")


def test_without_a_recommendation_the_reason_is_given():
    none = replace(
        whole_stream(), recommended=None, reason="the stream holds one example"
    )
    page = build_page(alone(none))
    assert page.lead == [
        "Nothing is recommended for the stream: the stream holds one example."
    ]
    assert tables_of(alone(none), brief=True) == {}
    assert page.next_steps[0] == (
        "batchtune sweep-stream MANIFEST",
        "compare other buffers and settings",
    )


def test_batches_that_are_not_proven_are_a_warning():
    assert warnings_of(stream=with_row(made_stream(), unproven=3))[0] == (
        "3 of 632 batches of an epoch are not proven to fit. `batchtune verify "
        "--stream` runs such batches."
    )
    assert "simulated epochs was run" not in said(with_row(made_stream(), unproven=3))
    other = made_stream(max_batch_length=700.0)
    assert warnings_of(stream=other, probe=made_probe())[0].startswith(
        "max_batch_length is 700 s here"
    )


def test_the_best_of_an_algorithm_is_proven_first():
    stream = made_stream()
    rows = [
        replace(
            row, unproven=int(row.algorithm == "bucket" and row.buffer_size == 4096)
        )
        for row in stream.rows
    ]
    (table,) = tables_of(alone(replace(stream, rows=rows)), brief=True).values()
    assert ("bucket, best", "1024", "672") in [row[:3] for row in table.rows]
