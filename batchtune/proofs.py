"""Says of a table's batch sizes whether they are proven to fit, and what was not run."""

from __future__ import annotations

import msgspec

from batchtune.results import Probe, Row, Sweep, TwoDimensionalRow
from batchtune.units import format_length, format_number

_PROBE_AGAIN = "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."


def with_unproven(sweep: Sweep, probe: Probe | None) -> Sweep:
    """Counts all batch sizes as unproven where an older batchtune took them from a probe.

    It interpolated between lengths, ran few of the batches in turns, and left no margin.

    Args:
        sweep: As its file has it; a row of an older batchtune does not know how many of its sizes are unproven.
        probe: Of the same run folder; None: nothing is known of what was run.
    """
    if probe is None or (probe.is_proven and sweep.device_name is None):
        return sweep

    def counted(row: Row) -> Row:
        return row if row.unproven is not None else msgspec.structs.replace(row, unproven=row.used_buckets)

    return msgspec.structs.replace(
        sweep,
        rows=[counted(row) for row in sweep.rows],
        current=None if sweep.current is None else counted(sweep.current),
        two_dimensional=[
            row if row.unproven is not None else msgspec.structs.replace(row, unproven=len(row.buckets))
            for row in sweep.two_dimensional
        ],
    )


def unproven_sizes(row: Row | TwoDimensionalRow) -> str | None:
    """Says how many batch sizes are not proven: `4 of 13 batch sizes are not proven to fit`; None where all are."""
    if not row.unproven:
        return None
    sizes = row.used_buckets if isinstance(row, Row) else len(row.buckets)
    if row.unproven == sizes > 1:
        return f"none of the {sizes} batch sizes is proven to fit"
    return f"{row.unproven} of {sizes} batch sizes {'is' if row.unproven == 1 else 'are'} not proven to fit"


def what_was_not_run(sweep: Sweep, row: Row, probe: Probe | None) -> str | None:
    """Says which batch sizes of a row are not proven, why, and what to do; None where all are, or no probe is known."""
    sizes = unproven_sizes(row)
    if sizes is None:
        return None
    why, remedy = _why(sweep, row, probe)
    return f"{sizes[0].upper()}{sizes[1:]}: {why}. {remedy}"


def _why(sweep: Sweep, row: Row, probe: Probe | None) -> tuple[str, str]:
    if probe is None or not probe.frontier:
        return "no batch as large was run, alone and in turns with the others", _PROBE_AGAIN
    if not probe.is_proven:
        return (
            f"batchtune {probe.meta.batchtune} interpolated between the lengths that it measured, ran few batches in "
            "turns with the others and left no margin",
            _PROBE_AGAIN,
        )
    unit, longest = sweep.lengths.unit, probe.frontier[-1].length
    cap, multiple = probe.settings.get("max_batch_size"), sweep.settings.get("multiple_of")
    if isinstance(cap, int) and max(row.batch_sizes) > cap:
        return (
            f"no batch of more than {cap:,} examples was run (--max-batch-size)",
            f"Sweep with --max-batch-size {cap} too, or run `batchtune probe-oom` without it, with --force.",
        )
    if row.sizing == "length" and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        return (
            f"max_batch_length = {format_length(sweep.max_batch_length, unit)} is more than the "
            f"{format_length(probe.max_batch_length, unit)} that was measured to fit",
            "Sweep again without --max-batch-length.",
        )
    if multiple is not None and row.boundaries[-1] > longest >= probe.lengths.max:
        return (
            f"padding to a multiple of {_number(multiple)} makes batches up to "
            f"{format_length(row.boundaries[-1], unit)} long, and none longer than {format_length(longest, unit)} was "
            "run",
            "`batchtune tune` with --multiple-of and --force probes batches as they are padded; or leave the longest "
            "examples out with --max-length.",
        )
    if longest < probe.lengths.max:
        return (
            f"no batch with examples longer than {format_length(longest, unit)} passed",
            "Leave longer ones out with --max-length, or give the probe more memory.",
        )
    return (
        "the probe ran no batch as large, alone and in turns with the others",
        "Run `batchtune sweep-buckets` again; if that does not help, `batchtune probe-oom` with --force.",
    )


def _number(value: object) -> str:
    return format_number(value) if isinstance(value, (int, float)) else str(value)
