"""Made records of a stream's sweep, for the tests of reports: LibriSpeech train-clean-100, as in `report_records`."""

from functools import cache

from msgspec.structs import replace
from report_records import (
    COUNT,
    MAX_BATCH_LENGTH,
    TOTAL_SECONDS,
    made_lengths,
    made_meta,
    made_probe,
    made_row,
    whole_sweep,
)

from batchtune.reports import RunResults
from batchtune.results import (
    ShardAdvice,
    Shards,
    StreamRow,
    StreamSettings,
    StreamSweep,
)

BUFFERS = (256, 1024, 4096, 16_384)
# Algorithm → batches and padding with each buffer, and the share of mates that meet again with the largest.
MADE = {
    "speechbrain": ((905, 842, 811, 798), (0.14, 0.11, 0.09, 0.085), 0.021),
    "bucket": ((760, 672, 646, 641), (0.071, 0.052, 0.043, 0.04), 0.018),
    "pivot": ((742, 655, 632, 627), (0.06, 0.031, 0.015, 0.009), 0.034),
}
TARGET, LOWER_TARGET = 540.0, 450.0


def made_stream(*, timed=True, unit="s", **changes):
    """16 rows, on 2 ranks of 4 workers; recommended: `pivot` with a buffer of 4096."""
    rows = [
        stream_row(
            algorithm,
            place,
            timed=timed,
            target=TARGET if algorithm == "speechbrain" else None,
        )
        for algorithm in MADE
        for place in range(len(BUFFERS))
    ]
    rows += [
        stream_row("speechbrain", place, timed=timed, target=LOWER_TARGET)
        for place in range(len(BUFFERS))
    ]
    boundaries = [round(24.525 * ((i + 1) / 13) ** 0.75, 3) for i in range(13)]
    made = StreamSweep(
        meta=made_meta("stream"),
        lengths=made_lengths(unit),
        max_batch_length=MAX_BATCH_LENGTH,
        settings=StreamSettings(
            world_size=2,
            workers=4,
            seed=7,
            buffer_sizes=BUFFERS,
            bytes_per_length=64_000.0,
        ),
        device_name="NVIDIA H200" if timed else None,
        simulated_examples=COUNT,
        shards=Shards(
            count=48,
            assumed=False,
            smallest_count=139,
            median_count=600.0,
            largest_count=600,
            smallest_length=1800.0,
            largest_length=7801.5,
            sorted=False,
            repeated_ids=0,
        ),
        rows=rows,
        map_style=replace(
            made_row("optimal", boundaries, 634, TOTAL_SECONDS / 0.969, 13, 9.1, timed),
            mates_again=0.041,
        ),
        recommended=10,
        recommended_speechbrain=2,
        batches_per_rank=316,
        reason="pivot with a buffer of 4096 is within 1% of the best, and a smaller buffer needs less memory",
        warnings=[
            "The map-style table has no shards to wait for: its epoch needs random access to all examples"
        ],
    )
    return replace(made, **changes)


def whole_stream(*, timed=True, unit="s"):
    """As `made_stream`, with the user's settings, damaged and unequal shards, and batches that are not proven."""
    made = made_stream(timed=timed, unit=unit)
    rows = [
        replace(
            row, unproven=3 if row.algorithm == "bucket" else 0, equal_to_best=False
        )
        for row in made.rows
    ]
    rows[10] = replace(rows[10], equal_to_best=True if timed else None)
    current = replace(
        rows[1], target_batch_numel=300.0, max_batch_numel=400.0, batches=1302
    )
    if timed:
        current = replace(
            current,
            estimated_epoch_seconds=0.08 * 1302 + 0.0004 * current.padded_length,
        )
    return replace(
        made,
        rows=rows,
        simulated_examples=14_270,
        current=current,
        current_fits=True,
        current_settings={
            "source": "train.yaml",
            "describe": "dynamic_bucketed_batch with buffersize 1024",
        },
        shards=replace(
            made.shards,
            count=6,
            broken=1,
            empty=2,
            smallest_count=0,
            largest_count=9000,
            sorted=True,
            repeated_ids=12,
            idle_workers=2,
            advice=ShardAdvice(shards=64, maxcount=446, maxsize_bytes=400_000_000),
        ),
        warnings=[*made.warnings, "Only 14,270 examples were simulated"],
    )


def streamed(*, sweep=False):
    """A run with a probe and the whole stream; with a sweep of tables, too, on request."""
    return RunResults(
        name="librispeech-100",
        probe=made_probe(),
        sweep=whole_sweep() if sweep else None,
        stream=whole_stream(),
    )


def empty_stream():
    """Without rows, and so without a recommendation."""
    return made_stream(
        rows=[],
        recommended=None,
        recommended_speechbrain=None,
        map_style=None,
        batches_per_rank=None,
    )


def hostile_stream(text):
    """A stream in which every string that a file can freely choose holds this text."""
    made = whole_stream(unit=text)
    return replace(
        made,
        device_name=text,
        map_style=replace(made.map_style, strategy=text),
        reason=text,
        warnings=[text],
        current_settings={"source": text, "describe": text},
    )


@cache
def stream_row(algorithm, place, *, timed, target):
    """A row with the buffer at a place in BUFFERS."""
    batches, paddings, again = MADE[algorithm]
    count, buffer, padding = batches[place], BUFFERS[place], paddings[place]
    if target == LOWER_TARGET:
        count = round(count * 1.15)
    padded = TOTAL_SECONDS / (1 - padding)
    ends = {"speechbrain": 0, "bucket": 13}.get(algorithm, 40)
    boundaries = [round(24.525 * ((i + 1) / ends) ** 0.75, 3) for i in range(ends)]
    return StreamRow(
        algorithm=algorithm,
        buffer_size=buffer,
        target_batch_numel=target,
        max_batch_numel=MAX_BATCH_LENGTH if target is not None else None,
        max_padding_ratio=0.2 if algorithm in ("speechbrain", "pivot") else None,
        boundaries=boundaries,
        batch_sizes=[
            max(1, int(MAX_BATCH_LENGTH / boundary)) for boundary in boundaries
        ],
        batches=count,
        dropped_examples=0,
        padded_length=padded,
        padding_ratio=padding,
        fill=TOTAL_SECONDS / (count * MAX_BATCH_LENGTH),
        mean_batch_size=COUNT / count,
        smallest_batch_size=1,
        largest_batch_size=425,
        batch_size_variation=0.61,
        largest_padded_length=599.8,
        under_half=0.02 + 8 / buffer,
        wait_median=buffer * 0.48,
        wait_p99=buffer * 2.1,
        buffer_length=buffer * 12.7,
        buffer_bytes=buffer * 12.7 * 64_000,
        worker_imbalance=1.06,
        rank_imbalance=1.02,
        mate_distance=9513 * min(1.0, 0.1 + buffer / 20_000),
        mixing=min(1.0, 0.1 + buffer / 20_000),
        mates_again=again * (16_384 / buffer) ** 0.5,
        length_correlation=0.97,
        effective_buckets=9.0,
        simulated_epochs=3,
        estimated_epoch_seconds=0.08 * count + 0.0004 * padded if timed else None,
        estimated_epoch_error_seconds=2.5 if timed else None,
    )
