"""The recommendation for Lhotse's DynamicBucketingSampler: a Python snippet that makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Export, Tuned, choose_table
from batchtune.exports.text import LengthLimits, about_data, about_row, from_template, one_line, padded_remark
from batchtune.results import Sweep
from batchtune.units import format_number

# Unit → what a cut calls it, where Lhotse is not to measure seconds.
_MEASURES = {"samples": "num_samples", "frames": "num_frames"}


def covering_table(sweep: Sweep, framework: str) -> Chosen:
    """Choose the best table for a framework with a batch size for each bucket.

    Raises:
        ResultError: Nothing is recommended, or the table does not cover the longest example.
    """
    chosen = choose_table(sweep, framework)
    if chosen.row.boundaries[-1] < sweep.lengths.max:
        raise ResultError(
            f"The sweep's recommended row ends at {format_number(chosen.row.boundaries[-1])}, before the longest "
            f"example of {format_number(sweep.lengths.max)}",
            "Make it anew with `batchtune sweep-buckets`.",
        )
    return chosen


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


def unit_remark(sweep: Sweep, edges: str, framework: str) -> Iterator[str]:
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
    unit = sweep.lengths.unit
    row, remarks = covering_table(sweep, "Lhotse")
    measure = _MEASURES.get(unit or "")
    boundaries = row.boundaries if measure else in_seconds(row.boundaries, unit, "Lhotse")
    limits = LengthLimits.of(sweep).scaled(1.0 if measure else in_seconds([1.0], unit, "Lhotse")[0])
    return from_template(
        "lhotse.py.j2",
        about_row=about_row(row, sweep),
        about_data=about_data(sweep),
        remarks=remarks,
        units=unit_remark(sweep, "Boundaries", "Lhotse"),
        padded=padded_remark(sweep, "Lhotse"),
        two_dimensional=bool(sweep.two_dimensional),
        boundaries=boundaries,
        batch_sizes=row.batch_sizes,
        buffer=least_buffer(row.batch_sizes),
        unit=unit,
        measure=measure,
        constraint="BatchSizes" if measure else "FixedBucketBatchSizeConstraint",
        limits=limits,
        seed=sweep.settings.get("seed", 0),
    )


EXPORTS = (Export(name="lhotse", title="Lhotse", file="lhotse_sampler.py", render=render),)
