"""The recommendation for Lhotse's DynamicBucketingSampler: a Python snippet that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchtune.errors import ResultError
from batchtune.exports.base import AnyRow, Chosen, Export, Tuned, choose_stream, choose_table
from batchtune.exports.fields import stream_fields, table_fields
from batchtune.exports.text import from_template, one_line
from batchtune.results import Row, StreamRow, StreamSweep, Sweep
from batchtune.units import format_number

# Unit → what a cut calls it, if Lhotse is not to measure seconds.
_MEASURES: dict[str | None, str] = {"samples": "num_samples", "frames": "num_frames"}
# Lhotse's own default of buffer_size.
_BUFFER = 20_000


def covering_table(tuned: Tuned, framework: str) -> Chosen[Row]:
    """Choose the best table for a framework with a batch size for each bucket.

    Raises ResultError if nothing is recommended, or the table ends before the longest example.
    """
    return _covering(choose_table(tuned.needed_sweep, framework), tuned.needed_sweep, "sweep-buckets")


def covering_stream(tuned: Tuned, framework: str) -> Chosen[StreamRow]:
    """Choose the best bucket table of a stream; raises ResultError as `covering_table` does."""
    chosen = choose_stream(tuned.needed_stream, framework, "bucket")
    return _covering(chosen, tuned.needed_stream, "sweep-stream")


def _covering(chosen: Chosen[AnyRow], sweep: Sweep | StreamSweep, command: str) -> Chosen[AnyRow]:
    if chosen.row.boundaries[-1] < sweep.lengths.max:
        raise ResultError(
            f"The sweep's recommended row ends at {format_number(chosen.row.boundaries[-1])}, before the longest "
            f"example of {format_number(sweep.lengths.max)}",
            f"Create it again with `batchtune {command}`.",
        )
    return chosen


def in_seconds(values: Sequence[float], unit: str | None, framework: str) -> list[float]:
    """Return lengths in seconds, which an unknown unit is taken for; raise ResultError if they count something else."""
    if unit in ("s", "ms", None):
        return [value / 1000 for value in values] if unit == "ms" else list(values)
    what = "which are not a time"
    how = "(--length-key, --unit s)."
    if unit in _MEASURES:
        what = "at a rate that the sweep does not know"
        how = "--length-scale 1/16000 --unit s for samples at 16 kHz, 0.01 for frames of 10 ms."
    raise ResultError(
        f"{framework} counts seconds, but the lengths count {one_line(unit)[:40]}, {what}",
        f"Sweep again with lengths in seconds{':' if unit in _MEASURES else ''} {how}",
    )


def least_buffer(batch_sizes: Sequence[int]) -> int:
    """Return the fewest examples that Lhotse must hold for its batches to be full until the data end.

    It takes a partial batch when no bucket holds a full one. With Σ (B_b - 1) + 1 examples, one does. It reads on after
    each batch, so it holds as many until the data end; then each bucket has at most one partial batch, and the epoch
    has Σ ceil(n_b / B_b) batches.

    Source: `lhotse.dataset.sampling.dynamic_bucketing.DynamicBucketer`, Lhotse 1.33.
    """
    return sum(size - 1 for size in batch_sizes) + 1


def render(tuned: Tuned) -> str:
    """Return Python code that makes a `DynamicBucketingSampler` with a fixed batch size for each bucket.

    The bins that cuts are sorted into and those that decide batch sizes are the same list, or else a batch would mix
    buckets, which `FixedBucketBatchSizeConstraint` refuses. Both compare inclusively (`bisect_left`), as we do.

    Source: `lhotse.dataset.sampling.dynamic_bucketing`, Lhotse 1.33.
    """
    sweep = tuned.needed_sweep
    chosen = covering_table(tuned, "Lhotse")
    return from_template(
        "lhotse.py.j2",
        title="Lhotse's DynamicBucketingSampler",
        two_dimensional=bool(sweep.two_dimensional),
        buffer_size=max(_BUFFER, least_buffer(chosen.row.batch_sizes)),
        **_lhotse_fields(table_fields(chosen, tuned, "Lhotse")),
    )


def render_shar(tuned: Tuned) -> str:
    """Return the same for shards in the format Lhotse Shar, with a loader.

    Source: `lhotse.CutSet.from_shar` and `lhotse.dataset.iterable_dataset`, Lhotse 1.33.
    """
    chosen = covering_stream(tuned, "Lhotse")
    return from_template(
        "lhotse-shar.py.j2",
        title="Lhotse Shar with DynamicBucketingSampler",
        two_dimensional=False,
        buffer_size=max(chosen.row.buffer_size, least_buffer(chosen.row.batch_sizes)),
        **_lhotse_fields(stream_fields(chosen, tuned, "Lhotse")),
    )


def _lhotse_fields(shared: dict[str, Any]) -> dict[str, Any]:
    """Return what the templates need, with boundaries and limits as Lhotse measures cuts."""
    row = shared["row"]
    unit = shared["unit"]
    measure = _MEASURES.get(unit)
    return {
        **shared,
        "boundaries": row.boundaries if measure else in_seconds(row.boundaries, unit, "Lhotse"),
        "buffer": least_buffer(row.batch_sizes),
        "measure": measure,
        "constraint": "BatchSizes" if measure else "FixedBucketBatchSizeConstraint",
        "limits": shared["limits"].scaled(1.0 if measure else in_seconds([1.0], unit, "Lhotse")[0]),
    }


EXPORTS = (
    Export(name="lhotse", title="Lhotse", file="lhotse_sampler.py", render=render),
    Export(name="lhotse-shar", title="Lhotse Shar", file="lhotse_shar.py", render=render_shar),
)
