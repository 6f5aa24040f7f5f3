"""The recommendation for Lhotse's DynamicBucketingSampler, and for NeMo, which loads data with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from batchtune.errors import ResultError, shortened
from batchtune.exports.base import (
    Chosen,
    Tuned,
    choose_stream,
    choose_table,
)
from batchtune.exports.templating import (
    from_template,
    number,
    stream_fields,
    table_fields,
)
from batchtune.lengths import SPEECH_UNITS
from batchtune.results import AnyFigures, Row, Sweep, Swept, unproven_sizes
from batchtune.units import format_number

# Unit → what a cut calls it, if Lhotse is not to measure seconds.
_MEASURES: dict[str | None, str] = {"samples": "num_samples", "frames": "num_frames"}
# The default buffer sizes of Lhotse and NeMo.
_LHOTSE_BUFFER = 20_000
_NEMO_BUFFER = 10_000
# The arguments of the DataLoader that NeMo can set; for tarred data it keeps workers by itself.
_OF_NEMO = ("num_workers", "pin_memory")


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

    It takes a partial batch when no bucket holds a full one. With Σ (B_b - 1) + 1 examples, one does. It reads on after
    each batch, so it holds as many until the data end; then each bucket has at most one partial batch, and the epoch
    has Σ ceil(n_b / B_b) batches.

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
        **_nemo_fields(table_fields(chosen, tuned, _OF_NEMO)),
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
        **_nemo_fields(stream_fields(chosen, tuned, _OF_NEMO)),
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
