"""The recommendation for Lhotse's DynamicBucketingSampler: a Python snippet that makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Export, Tuned, choose_table
from batchtune.exports.loader import loading_fields
from batchtune.exports.stream import BUCKETS, choose_stream, stream_fields, swept_workers
from batchtune.exports.text import LengthLimits, about_data, about_row, from_template, one_line, padded_remark
from batchtune.results import Row, StreamRow, StreamSweep, Sweep
from batchtune.units import format_number

# Unit → what a cut calls it, where Lhotse is not to measure seconds.
_MEASURES = {"samples": "num_samples", "frames": "num_frames"}
# Lhotse's own default of buffer_size.
_BUFFER = 20_000


def covering_table(sweep: Sweep, framework: str) -> Chosen:
    """Choose the best table for a framework with a batch size for each bucket.

    Raises:
        ResultError: Nothing is recommended, or the table does not cover the longest example.
    """
    chosen = choose_table(sweep, framework)
    check_covers(chosen.row, sweep, "sweep-buckets")
    return chosen


def check_covers(row: Row | StreamRow, sweep: Sweep | StreamSweep, command: str) -> None:
    """Raise ResultError if a table ends before the longest example."""
    if row.boundaries[-1] < sweep.lengths.max:
        raise ResultError(
            f"The sweep's recommended row ends at {format_number(row.boundaries[-1])}, before the longest "
            f"example of {format_number(sweep.lengths.max)}",
            f"Make it anew with `batchtune {command}`.",
        )


def in_seconds(values: Sequence[float], unit: str | None, framework: str) -> list[float]:
    """Return lengths in seconds; without a unit they are taken to be.

    Raises:
        ResultError: The unit is neither seconds nor milliseconds.
    """
    if unit in ("s", "ms", None):
        return [value / 1000 for value in values] if unit == "ms" else list(values)
    what, how = "which are no time", "(--length-key, --unit s)."
    if unit in _MEASURES:
        what = "at a rate that the sweep does not know"
        how = "--length-scale 1/16000 --unit s for samples at 16 kHz, 0.01 for frames of 10 ms."
    raise ResultError(
        f"{framework} counts seconds, but the lengths count {one_line(unit)[:40]}, {what}",
        f"Sweep again with lengths in seconds{':' if unit in _MEASURES else ''} {how}",
    )


def unit_remark(sweep: Sweep | StreamSweep, edges: str, framework: str) -> Iterator[str]:
    """Yield what the edges of buckets count in a framework that counts seconds."""
    if sweep.lengths.unit == "ms":
        yield f"{edges} are in seconds, as {framework} counts them; the lengths counted milliseconds"
    if sweep.lengths.unit is None:
        yield f"The unit of the lengths is not known: they are taken to be seconds, as {framework} counts them"


def least_buffer(batch_sizes: Sequence[int]) -> int:
    """Return the fewest examples that Lhotse must hold for its batches to be full until the data end.

    It takes a batch that is not full when no bucket holds a full one. With Σ (B_b - 1) + 1 examples held, one does. It
    reads on after each batch, so it holds as many until the data end; then each bucket has at most one batch that is
    not full, and the epoch has Σ ceil(n_b / B_b) batches.

    Source: `lhotse.dataset.sampling.dynamic_bucketing.DynamicBucketer`, Lhotse 1.33.
    """
    return sum(size - 1 for size in batch_sizes) + 1


def render(tuned: Tuned) -> str:
    """Return Python code that makes a `DynamicBucketingSampler` with a fixed batch size for each bucket.

    The bins that cuts are sorted into and those that decide batch sizes are the same list, or else a batch would mix
    buckets, which `FixedBucketBatchSizeConstraint` refuses. Both compare inclusively (`bisect_left`), as we do.

    Source: `lhotse.dataset.sampling.dynamic_bucketing`, Lhotse 1.33.

    Raises:
        ResultError: Nothing is recommended, or Lhotse can't measure cuts in the unit of the lengths.
    """
    sweep = tuned.needed_sweep
    row, remarks = covering_table(sweep, "Lhotse")
    buffer = least_buffer(row.batch_sizes)
    return from_template(
        "lhotse.py.j2",
        title="Lhotse's DynamicBucketingSampler",
        about_row=about_row(row, sweep),
        about_data=about_data(sweep),
        remarks=remarks,
        two_dimensional=bool(sweep.two_dimensional),
        buffer_size=max(_BUFFER, buffer),
        **_table_fields(row, sweep),
        unit=sweep.lengths.unit,
        seed=sweep.settings.get("seed", 0),
        **loading_fields(tuned),
    )


def render_shar(tuned: Tuned) -> str:
    """Return the same for shards in the format Lhotse Shar, with a loader.

    Source: `lhotse.CutSet.from_shar` and `lhotse.dataset.iterable_dataset`, Lhotse 1.33.

    Raises:
        ResultError: The run holds no sweep of a stream with a bucket table, or Lhotse can't measure its unit.
    """
    sweep = tuned.needed_stream
    chosen = choose_stream(sweep, "Lhotse", BUCKETS)
    check_covers(chosen.row, sweep, "sweep-stream")
    return from_template(
        "lhotse-shar.py.j2",
        title="Lhotse Shar with DynamicBucketingSampler",
        two_dimensional=False,
        buffer_size=max(chosen.row.buffer_size, least_buffer(chosen.row.batch_sizes)),
        **{**stream_fields(chosen, sweep), **_table_fields(chosen.row, sweep)},
        **loading_fields(tuned, swept_workers(sweep)),
    )


def _table_fields(row: Row | StreamRow, sweep: Sweep | StreamSweep) -> dict[str, Any]:
    """Return what the templates need of a table."""
    unit = sweep.lengths.unit
    measure = _MEASURES.get(unit or "")
    return {
        "units": unit_remark(sweep, "Boundaries", "Lhotse"),
        "padded": padded_remark(sweep, "Lhotse"),
        "boundaries": row.boundaries if measure else in_seconds(row.boundaries, unit, "Lhotse"),
        "batch_sizes": row.batch_sizes,
        "buffer": least_buffer(row.batch_sizes),
        "measure": measure,
        "constraint": "BatchSizes" if measure else "FixedBucketBatchSizeConstraint",
        "limits": LengthLimits.of(sweep).scaled(1.0 if measure else in_seconds([1.0], unit, "Lhotse")[0]),
    }


EXPORTS = (
    Export(name="lhotse", title="Lhotse", file="lhotse_sampler.py", render=render),
    Export(name="lhotse-shar", title="Lhotse Shar", file="lhotse_shar.py", render=render_shar),
)
