"""Exports for other frameworks' samplers, by templates: Lhotse and NeMo, those that take one limit, SpeechBrain."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from batchtune.epochs.table import batch_sizes_for
from batchtune.errors import ResultError, shortened
from batchtune.exports import (
    Chosen,
    LengthLimits,
    Tuned,
    choose_stream,
    choose_table,
    export_of,
    from_template,
    number,
    packed_fields,
    recommended_row,
    stream_fields,
    table_fields,
)
from batchtune.lengths import SPEECH_UNITS
from batchtune.results import AnyFigures, Row, StreamSweep, Sweep, Swept, unproven_sizes
from batchtune.units import format_number

# Unit → what a cut calls it, if Lhotse is not to measure seconds.
_MEASURES: dict[str | None, str] = {"samples": "num_samples", "frames": "num_frames"}
# The default buffer sizes of Lhotse and NeMo.
_LHOTSE_BUFFER = 20_000
_NEMO_BUFFER = 10_000
# The arguments of the DataLoader that ESPnet and NeMo can set; for tarred data NeMo keeps workers by itself.
_WORKERS_AND_PINNING = ("num_workers", "pin_memory")


def in_seconds(
    values: Sequence[float], unit: str | None, framework: str
) -> list[float]:
    """Return lengths in seconds; an unknown unit counts as seconds. Raise ResultError for any other unit."""
    if unit == "ms":
        return [value / 1000 for value in values]
    if unit in ("s", None):
        return list(values)
    hint = "For text, choose another framework: `batchtune export --list` shows all."
    if unit in SPEECH_UNITS:
        hint = (
            "Tune again with lengths in seconds, in another folder: --length-scale 1/16000 --unit s for samples at 16 "
            "kHz, 0.01 for frames of 10 ms."
        )
    raise ResultError(
        f"{framework} counts seconds, but the lengths are in {shortened(unit)}", hint
    )


def least_buffer(batch_sizes: Sequence[int]) -> int:
    """Return the fewest examples that Lhotse must hold for its batches to be full until the data end.

    Lhotse takes a partial batch when no bucket holds a full one. With Σ (B_b - 1) + 1 examples, one
    does. Lhotse reads on after each batch, so it holds that many until the data end; then each
    bucket has at most one partial batch, and the epoch has Σ ceil(n_b / B_b) batches.

    Source: `lhotse.dataset.sampling.dynamic_bucketing.DynamicBucketer`, Lhotse 1.33.
    """
    return sum(size - 1 for size in batch_sizes) + 1


def _covering(
    chosen: Chosen[AnyFigures], sweep: Swept[AnyFigures]
) -> Chosen[AnyFigures]:
    """Return the choice; raise ResultError if its table ends before the longest example."""
    if chosen.row.boundaries[-1] < sweep.lengths.max:
        raise ResultError(
            f"The sweep's recommended row ends at {format_number(chosen.row.boundaries[-1])}, before the longest "
            f"example of {format_number(sweep.lengths.max)}",
            "Sweep again.",
        )
    return chosen


def _render_lhotse(tuned: Tuned) -> str:
    """Return Python code that makes a `DynamicBucketingSampler` with a fixed batch size for each bucket.

    The bins that cuts are sorted into and those that decide batch sizes are the same list, or else a batch would mix
    buckets, which `FixedBucketBatchSizeConstraint` refuses. Both compare inclusively (`bisect_left`), as we do.

    Source: `lhotse.dataset.sampling.dynamic_bucketing`, Lhotse 1.33.
    """
    sweep = tuned.needed_sweep
    chosen = _covering(choose_table(sweep, "Lhotse"), sweep)
    return from_template(
        "lhotse.py.j2",
        title="Lhotse's DynamicBucketingSampler",
        buffer_size=max(_LHOTSE_BUFFER, least_buffer(chosen.row.batch_sizes)),
        **_lhotse_fields(table_fields(chosen, tuned)),
    )


def _render_shar(tuned: Tuned) -> str:
    """Return the same for shards in the format Lhotse Shar, with a loader.

    Source: `lhotse.CutSet.from_shar` and `lhotse.dataset.iterable_dataset`, Lhotse 1.33.
    """
    sweep = tuned.needed_stream
    chosen = _covering(choose_stream(sweep, "Lhotse", "bucket"), sweep)
    return from_template(
        "lhotse-shar.py.j2",
        title="Lhotse Shar with DynamicBucketingSampler",
        buffer_size=max(chosen.row.buffer_size, least_buffer(chosen.row.batch_sizes)),
        **_lhotse_fields(stream_fields(chosen, tuned)),
    )


def _lhotse_fields(shared: dict[str, Any]) -> dict[str, Any]:
    """Return what the templates need, with boundaries and limits as Lhotse measures cuts."""
    unit = shared["unit"]
    measure = _MEASURES.get(unit)
    if measure is None:
        shared = _timed_fields(shared, "Lhotse")
    return {
        "boundaries": shared["row"].boundaries,
        **shared,
        "framework": "Lhotse",
        "buffer": least_buffer(shared["row"].batch_sizes),
        "measure": measure,
    }


def _timed_fields(shared: dict[str, Any], framework: str) -> dict[str, Any]:
    """Return the fields with boundaries and limits in seconds."""
    unit = shared["unit"]
    (second,) = in_seconds([1.0], unit, framework)
    return {
        **shared,
        "boundaries": in_seconds(shared["row"].boundaries, unit, framework),
        "limits": shared["limits"].scaled(second),
    }


def _render_nemo(tuned: Tuned) -> str:
    """Return a YAML fragment of `model.train_ds`, with a table over length and target length in comments.

    Source: `nemo/collections/common/data/lhotse/dataloader.py` and `sampling.py`, NeMo 3.0.0: an example belongs to the
    first bin that is not below its duration (`bisect_left`); what is longer than the last bin is dropped
    (`BucketingFilter`), as is what is longer than `max_duration`.
    """
    sweep = tuned.needed_sweep
    chosen = _covering(choose_table(sweep, "NeMo"), sweep)
    # NeMo, which repeats the data, would fill sizes that a bucket can't fill, and which were not run.
    most = _most_examples(sweep, chosen.row)
    sizes = [
        max(1, min(size, count))
        for size, count in zip(chosen.row.batch_sizes, most, strict=True)
    ]
    return from_template(
        "nemo.yaml.j2",
        title="NeMo, model.train_ds",
        buffer_size=max(_NEMO_BUFFER, least_buffer(sizes)),
        sizes=sizes,
        **_nemo_fields(table_fields(chosen, tuned, _WORKERS_AND_PINNING)),
        **_joint_fields(sweep),
    )


def _render_tarred(tuned: Tuned) -> str:
    """Return the same for tarred data, with the nominal epoch of `trainer`.

    Source: `dataloader.py` and `nemo_adapters.py` (`LazyNeMoTarredIterator`) there, NeMo 3.0.0; Lhotse 1.33, whose
    `DynamicBucketingSampler` adds `shuffle_buffer_size` to its buffer, and waits, where it is `concurrent`, until a
    tenth of that is full, not until a batch is; and whose `IterableDatasetWrapper` goes on in the next epoch.
    """
    sweep = tuned.needed_stream
    chosen = _covering(choose_stream(sweep, "NeMo", "bucket"), sweep)
    return from_template(
        "nemo-tarred.yaml.j2",
        title="NeMo, model.train_ds with tarred data",
        buffer_size=max(chosen.row.buffer_size, least_buffer(chosen.row.batch_sizes)),
        sizes=chosen.row.batch_sizes,
        joint=None,
        last_shard=max(0, sweep.shards.count - 1),
        **_nemo_fields(stream_fields(chosen, tuned, _WORKERS_AND_PINNING)),
    )


def _nemo_fields(shared: dict[str, Any]) -> dict[str, Any]:
    """Return what the templates need, with bins and limits in seconds."""
    fields = _timed_fields(shared, "NeMo")
    bins = fields["boundaries"]
    return {
        **fields,
        "framework": "NeMo",
        "buffer": least_buffer(fields["row"].batch_sizes),
        "bins": bins,
        "longest": min(bins[-1], fields["limits"].longest or bins[-1]),
    }


def _most_examples(sweep: Sweep, row: Row) -> list[int]:
    """Return an upper bound of each bucket's number of examples, exact for the recommended table."""
    if row is sweep.recommended_row and len(sweep.buckets) == len(row.boundaries):
        return [use.examples for use in sweep.buckets]
    return [
        sum(bin.count for bin in sweep.histogram if bin.to > low and bin.from_ < high)
        or sweep.lengths.count
        for low, high in pairwise([0.0, *row.boundaries])
    ]


def _joint_fields(sweep: Sweep) -> dict[str, Any]:
    """Return the fields of the best table over length and target length; that is None without any."""
    if not sweep.two_dimensional:
        return {"joint": None}
    best = min(
        sweep.two_dimensional,
        key=lambda row: (row.estimated_epoch_seconds or row.batches, len(row.buckets)),
    )
    durations = in_seconds(
        [length for length, _ in best.buckets], sweep.lengths.unit, "NeMo"
    )
    tokens = [number(target) for _, target in best.buckets]
    return {
        "joint": best,
        "unproven": unproven_sizes(best),
        "pairs": [
            f"[{number(seconds)}, {most}]"
            for seconds, most in zip(durations, tokens, strict=True)
        ],
        "joint_buffer_size": max(_NEMO_BUFFER, least_buffer(best.batch_sizes)),
    }


RENDERS = {
    "lhotse": _render_lhotse,
    "lhotse-shar": _render_shar,
    "nemo": _render_nemo,
    "nemo-tarred": _render_tarred,
}


# Frameworks that take one limit for a batch, and no bucket table.
#
# ESPnet and fairseq sort the examples by length and cut the list at the limit; the others pack up to it.

# Toolkits for speech count samples if lengths are in seconds; comments say what to multiply by at another rate.
SAMPLE_RATE = 16_000
_AUDIO_UNITS: dict[str | None, float] = {
    "s": SAMPLE_RATE,
    "ms": SAMPLE_RATE / 1000,
    "samples": 1,
}
_FAIRSEQ_FILE = "batchtune_fairseq.txt"


def _cutting_fields(
    tuned: Tuned, toolkit: str, setting: str, loads: Collection[str]
) -> dict[str, Any]:
    """Return what the templates of both have in common.

    `setting` is the toolkit's limit for a batch, `loads` are the arguments of torch's DataLoader that it can set.
    """
    sweep = tuned.needed_sweep
    why = f"{toolkit} knows no bucket table, only a limit for a batch"
    chosen = choose_table(sweep, toolkit, lambda row: row.sizing == "length", why)
    measured = math.inf if tuned.probe is None else tuned.probe.max_batch_length
    return {
        **table_fields(chosen, tuned, loads),
        "toolkit": toolkit,
        "setting": setting,
        "audio": sweep.lengths.unit in _AUDIO_UNITS,
        "rate": f"{SAMPLE_RATE:,}",
        "max_batch_length": sweep.max_batch_length,
        "measured": measured,
        "too_large": sweep.max_batch_length > measured * (1 + 1e-9),
        "longest": sweep.lengths.max,
    }


def _at_least(length: float, scale: float) -> int:
    """Return a length in whole steps of a finer unit, rounded up except for floating-point noise."""
    return math.ceil(round(length * scale, 3))


def batch_bins(sweep: Sweep, *, scale: float = 1.0) -> int:
    """Return the largest `batch_bins`, in ESPnet's unit, with which no batch can exceed max_batch_length; at least 1.

    `NumElementsBatchSampler` and `LengthBatchSampler` (espnet2/samplers/, ESPnet 202511) sort by length, ascending, and
    end a batch with the example that makes its padded length *exceed* `batch_bins`: n examples up to length L with
    (n - 1)·K ≤ batch_bins, K the length before L. So n·L ≤ max_batch_length holds if batch_bins < K·floor(
    max_batch_length / L) for all lengths K, L that follow each other. These are not in the sweep, but each lies between
    two quantiles that do occur and in neighbouring bins of the histogram that are not empty, which bounds both. Other
    features that are counted too, such as the text, only make batches smaller.

    ESPnet can't limit the number of examples. So that max_batch_size C holds too, batch_bins < K·C for every K that is
    not among the C - 1 shortest lengths: no batch goes on after its C-th example.

    `scale` is one of the lengths' units in ESPnet's; the sweep's quantiles and histogram bound the lengths.
    """
    limit = sweep.max_batch_length
    cap = sweep.settings.max_batch_size or math.inf
    bounds = [
        low * min(cap, max(1, int(limit / high)))
        for low, high, rank in _neighbours(sweep)
        if rank * high > limit or rank > cap
    ]
    # Without a bound all examples are in one batch that does not exceed it.
    return max(1, _at_least(min([*bounds, limit]), scale) - 1)


def _neighbours(sweep: Sweep) -> Iterator[tuple[float, float, int]]:
    """Yield (K, L, r): of two lengths that follow each other, a lower and an upper bound, and a bound of L's rank."""
    filled = [bin for bin in sweep.histogram if bin.count]
    starts = [bin.from_ for bin in filled]
    ends = [bin.to for bin in filled]
    steps = len(sweep.quantiles) - 1
    for index, (low, high) in enumerate(pairwise(sweep.quantiles)):
        rank = math.ceil((index + 1) * sweep.lengths.count / steps)
        first = bisect_left(ends, low)
        last = bisect_left(starts, high)
        # Without a bin between them, the histogram is damaged.
        if low == high or first >= last:
            yield low, high, rank
            continue
        for place in range(first, last):
            yield (
                max(low, starts[place]),
                min(high, ends[min(place + 1, len(ends) - 1)]),
                rank,
            )


def _render_espnet(tuned: Tuned) -> str:
    """Return the config fragment; raise ResultError if the sweep recommends nothing.

    How to leave out what was left out at tuning: stage 4 of egs2/TEMPLATE/asr1/asr.sh, which keeps
    min_wav_duration < duration < max_wav_duration.
    """
    sweep = tuned.needed_sweep
    scale = _AUDIO_UNITS.get(sweep.lengths.unit, 1.0)
    bins = batch_bins(sweep, scale=scale)
    seconds = LengthLimits.of(sweep).scaled(scale / SAMPLE_RATE)
    return from_template(
        "espnet.yaml.j2",
        # On a GPU the trainer pins memory by itself.
        **_cutting_fields(tuned, "ESPnet", "batch_bins", _WORKERS_AND_PINNING),
        bins=bins,
        share=f"{bins / (sweep.max_batch_length * scale):.1%}",
        cap=sweep.settings.max_batch_size,
        ends=seconds.named("min_wav_duration", "max_wav_duration"),
    )


def _render_fairseq(tuned: Tuned) -> str:
    """Return the flags, on one line below the comments, and the same for Hydra as a comment.

    Source: fairseq 0.12.2. `batch_by_size_vec` (data/data_utils_fast.pyx) adds examples, sorted by length, to
    a batch while examples × longest ≤ max_tokens and stops where an example exceeds it by itself;
    required_batch_size_multiple (8 unless given) would cut more batches. `FileAudioDataset` leaves out what is shorter
    than min_sample_size, and crops what is longer than max_sample_size; `FairseqTask.filter_indices_by_size` leaves
    training examples beyond max_source_positions out, and those of validation only with
    skip_invalid_size_inputs_valid_test. Raises ResultError if the sweep recommends nothing.
    """
    sweep = tuned.needed_sweep
    unit = sweep.lengths.unit
    limits = LengthLimits.of(sweep)
    fields = _cutting_fields(tuned, "fairseq", "max-tokens", ("num_workers",))
    scale = _AUDIO_UNITS.get(unit, 1.0)
    audio = fields["audio"]
    max_tokens = max(1, math.floor(round(sweep.max_batch_length * scale, 3)))
    allowed = max(1, int(sweep.max_batch_length / sweep.lengths.min))
    batch_size = min(allowed, sweep.settings.max_batch_size or allowed)
    # One more for the end of the sentence, which fairseq counts and a manifest of tokens may not.
    counts_ends = not audio and unit != "frames"
    longest = _at_least(sweep.lengths.max, scale)
    cut = "max-sample-size" if audio else "max-source-positions"
    data = {
        "max-tokens": str(max_tokens),
        "batch-size": str(batch_size),
        "required-batch-size-multiple": "1",
    }
    task = {cut: str(longest + counts_ends)}
    if limits.shortest is not None and audio:
        task["min-sample-size"] = str(_at_least(limits.shortest, scale))
    if limits.longest is not None and not audio:
        data["skip-invalid-size-inputs-valid-test"] = ""
    if "num_workers" in fields["loader"]:
        data["num-workers"] = str(fields["loader"]["num_workers"])
    return from_template(
        "fairseq.txt.j2",
        **fields,
        file=_FAIRSEQ_FILE,
        too_long=longest > max_tokens,
        counts_ends=counts_ends,
        cut=cut,
        flags=" ".join(
            f"--{flag} {value}".rstrip() for flag, value in {**data, **task}.items()
        ),
        data=data,
        task=task,
    )


def _render_packer(name: str, tuned: Tuned) -> str:
    """Return the lines to set for a framework that packs; raise ResultError without a token budget."""
    sweep = tuned.needed_sweep
    export = export_of(name)
    if sweep.packed is None:
        raise ResultError(
            f"{export.title} packs by a token budget, and the run has none",
            "Run `batchtune sweep-buckets MANIFEST --max-tokens N`.",
        )
    return from_template(
        f"{name}.{export.file.rpartition('.')[2]}.j2",
        title=export.title,
        **packed_fields(tuned, sweep.packed, ()),
    )


RENDERS |= {
    "espnet": _render_espnet,
    "fairseq": _render_fairseq,
    **{
        name: partial(_render_packer, name)
        for name in ("verl", "openrlhf", "slime", "trl", "axolotl")
    },
}


# SpeechBrain's DynamicBatchSampler and dynamic_bucketed_batch: a config or code to paste.

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
    return sweep.settings.max_batch_size


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


RENDERS |= {
    "speechbrain": _render_sampler,
    "speechbrain-stream": _render_stream,
}
