"""SpeechBrain's DynamicBatchSampler and dynamic_bucketed_batch: a config or code to paste."""

from __future__ import annotations

from batchtune.epochs.table import batch_sizes_for
from batchtune.exports.base import (
    Tuned,
    choose_stream,
    choose_table,
    recommended_row,
)
from batchtune.exports.templating import (
    from_template,
    number,
    stream_fields,
    table_fields,
)
from batchtune.results import Row, StreamSweep, Sweep

# Unit → samples of audio, by the constant SAMPLE_RATE.
_SAMPLES: dict[str | None, str] = {
    "s": "{} * SAMPLE_RATE",
    "ms": "{} * SAMPLE_RATE / 1000",
}


def _derived_sizes(sweep: Sweep, row: Row, cap: int | None) -> list[int]:
    """Return SpeechBrain's batch sizes: min(cap, max(1, int(max_batch_length / boundary)))."""
    sizes: list[int] = batch_sizes_for(
        row.boundaries, sweep.max_batch_length, cap
    ).tolist()
    return sizes


def _needed_cap(sweep: Sweep, row: Row) -> int | None:
    """Return the `max_batch_ex` that a row needs for its batch sizes; None if it needs none."""
    if row.batch_sizes == _derived_sizes(sweep, row, None):
        return None
    cap: int | None = sweep.settings.max_batch_size
    return cap


def _length_key(sweep: Sweep) -> str:
    """Return what recipes' data sets call a length."""
    return "duration" if sweep.lengths.unit in ("s", "ms") else "LENGTH"


def _render_sampler(tuned: Tuned) -> str:
    """Return the block that recipes call `dynamic_batch_sampler`, ready to paste.

    The keys are those of the constructor of `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0 and 1.1.
    How to leave out in train.py what was left out at tuning: `speechbrain.dataio.dataset.DynamicItemDataset`'s
    `filtered_sorted`, SpeechBrain 1.1, whose limits are inclusive; recipes pass `avoid_if_longer_than` to it where
    `sorting` is ascending or descending. Raises ResultError if nothing is recommended, or no row can be expressed.
    """
    sweep = tuned.needed_sweep
    cap = sweep.settings.max_batch_size
    chosen = choose_table(
        sweep,
        "SpeechBrain",
        lambda row: row.batch_sizes == _derived_sizes(sweep, row, cap),
        "SpeechBrain derives each batch size from max_batch_length and the bucket's boundary",
    )
    return from_template(
        "speechbrain.yaml.j2",
        **table_fields(chosen, tuned, ("num_workers",)),
        cap=_needed_cap(sweep, chosen.row),
        max_batch_length=sweep.max_batch_length,
        recommended=recommended_row(sweep),
        length_key=_length_key(sweep),
        config=tuned.config,
    )


def _render_stream(tuned: Tuned) -> str:
    """Return Python code that makes the loader, as in SpeechBrain's tutorial of WebDataset.

    Source: `speechbrain.dataio.iterators.dynamic_bucketed_batch` and `.dataloader.make_dataloader`, SpeechBrain 1.1;
    WebDataset 1.0.
    """
    sweep = tuned.needed_stream
    chosen = choose_stream(sweep, "SpeechBrain's dynamic_bucketed_batch", "speechbrain")
    row = chosen.row
    fields = stream_fields(chosen, tuned)
    in_samples = _SAMPLES.get(sweep.lengths.unit, "{}")
    limits = fields["limits"]
    shortest = number(_shortest_counted(sweep, in_samples != "{}"))
    if limits.shortest is not None:
        shortest = in_samples.format(number(limits.shortest))
    lengths = {"min_sample_len": shortest}
    if limits.longest is not None:
        lengths["max_sample_len"] = in_samples.format(number(limits.longest))
    max_numel = None
    if row.max_batch_numel is not None:
        max_numel = in_samples.format(number(row.max_batch_numel))
    return from_template(
        "speechbrain_stream.py.j2",
        rate=sweep.lengths.unit in _SAMPLES,
        target=in_samples.format(number(row.target_batch_numel or 0.0)),
        most=max_numel,
        sample_lengths=lengths,
        **fields,
    )


def _shortest_counted(sweep: StreamSweep, in_samples: bool) -> float:
    """Return the shortest length that is not empty: one sample, token or millisecond; a part of a second."""
    lengths = sweep.lengths
    if in_samples or lengths.unit not in ("s", None):
        return 1
    return min(0.001, lengths.min)


RENDERS = {
    "speechbrain": _render_sampler,
    "speechbrain-stream": _render_stream,
}
