"""What a report says of a stream: in sentences, in tables, and in the verdicts of the gate."""

from msgspec.structs import replace
from report_records import made_probe, summary_of, tables_of, warnings_of
from reports.changed import page_of, run_of, with_row, with_rows
from streamed_records import made_stream, whole_stream


def said(stream):
    return " ".join(summary_of(stream=stream))


# Sentences


def test_sizes_beyond_max_batch_length_are_called_measured():
    stream = made_stream(timed=False)
    row = stream.rows[10]
    first, *others = row.batch_sizes
    measured = with_row(stream, batch_sizes=[2 * first, *others])
    assert "0.2) with measured batch sizes: 22.1% fewer" in said(measured)
    sizes = [*row.batch_sizes, 1]
    overlong = with_row(stream, boundaries=[*row.boundaries, 700.0], batch_sizes=sizes)
    assert "0.2) with max_batch_length = 600 s" in said(overlong)


def test_speechbrains_own_call_is_typed_with_its_defaults():
    stream = replace(whole_stream(timed=False), recommended=2)
    changed = with_rows(stream, max_padding_ratio=None, max_batch_size=32)
    assert summary_of(stream=changed)[0] == (
        'Set dynamic_bucketed_batch(buffersize=4096, sampler_kwargs={"target_batch_numel": 540, "max_batch_numel": '
        '600, "max_batch_size": 32, "max_padding_ratio": None}): 37.7% fewer batches than with your current config.'
    )
    assert "len_key has to give lengths in s, too." in said(stream)


def test_what_else_a_stream_knows_is_said():
    text = said(with_row(whole_stream(), dropped_examples=37, batches_deviation=1.5))
    assert "An epoch leaves out 37 examples at its end" in text
    means = "Figures are means of 3 simulated epochs, whose batches differ by 0.2% (standard deviation)."
    assert means in text


def test_without_times_batches_are_compared_where_they_are_known():
    stage = 'BucketedStream(algorithm="pivot", buffer_size=4096, max_padding_ratio=0.2)'
    settings = f"Set {stage} with max_batch_length = 600 s"
    bare = made_stream(timed=False, map_style=None, recommended_speechbrain=None)
    assert said(bare).startswith(f"{settings}. Step times are not known: ")
    fewer = "22.1% fewer batches than with SpeechBrain's best"
    assert said(made_stream(timed=False)).startswith(f"{settings}: {fewer}")


def test_shards_that_are_made_up_are_told_as_such():
    assumed = made_stream(shards=replace(made_stream().shards, assumed=True))
    shards = (
        "Shards: 48 of 600 examples each, assumed: the source is not a set of shards."
    )
    assert shards in said(assumed)


def test_a_better_current_config_is_kept():
    current = replace(made_stream(timed=False).rows[11], batches=600)
    stream = made_stream(timed=False, current=current, current_fits=True)
    assert "Keep your current config: " in said(stream)
    unfit = replace(stream, current_fits=False)
    assert "your current config" not in said(unfit)
    assert warnings_of(stream=unfit)[0].startswith("Your current config does not fit")


def test_without_a_recommendation_the_reason_is_given():
    none = replace(whole_stream(), recommended=None, reason="it holds one example")
    page = page_of(stream=none)
    assert page.lead == ["Nothing is recommended for the stream: it holds one example."]
    assert tables_of(run_of(stream=none), brief=True) == {}
    other = "compare other buffers and settings"
    assert page.next_steps[0] == ("batchtune sweep-stream MANIFEST", other)


def test_batches_that_are_not_proven_are_a_warning():
    unproven = with_row(made_stream(), unproven=3)
    why = "3 of 632 batches of an epoch are not proven to fit. `batchtune verify --stream` runs such batches."
    assert warnings_of(stream=unproven)[0] == why
    assert "simulated epochs was run" not in said(unproven)
    other = warnings_of(stream=made_stream(max_batch_length=700.0), probe=made_probe())
    assert other[0].startswith("max_batch_length is 700 s here")


def test_the_best_of_an_algorithm_is_proven_first():
    stream = with_row(with_rows(made_stream(), unproven=0), 6, unproven=1)
    assert (stream.rows[6].algorithm, stream.rows[6].buffer_size) == ("bucket", 4096)
    (table,) = tables_of(run_of(stream=stream), brief=True).values()
    assert ("bucket, best", "1024", "672") in [row[:3] for row in table.rows]
