"""A user's own limit on the examples in a batch: kept where it makes batches smaller, at a cost that is told."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.exports.speechbrain import derived_sizes, needed_cap
from batchtune.results import Row, Sweep
from batchtune.units import counted, format_number


@dataclass(frozen=True, slots=True)
class KeptCap:
    """What becomes of a limit.

    Attributes:
        cap: The limit to write; the user's own where it stays.
        notes: What that changes, as full sentences; empty where it changes nothing.
    """

    cap: int
    notes: tuple[str, ...] = ()


def kept_cap(cap: int, row: Row, sweep: Sweep, run: str) -> KeptCap:
    """Keeps a `max_batch_ex`, or lowers it to what the table was swept with.

    Args:
        cap: The user's, at least 1.
        row: The table that is written; its batch sizes are SpeechBrain's.
        sweep: It is of this sweep.
        run: The run folder, for the command that sweeps with the cap.
    """
    sizes, needed = derived_sizes(sweep, row.boundaries, cap), needed_cap(sweep, row)
    if sizes == row.batch_sizes:
        return KeptCap(cap)
    if needed is not None and cap > needed:
        lowered = f"max_batch_ex is lowered from {cap} to {needed}: the table was swept with --max-batch-size {needed}."
        return KeptCap(needed, (lowered,))
    cut = sum(size < full for size, full in zip(sizes, row.batch_sizes, strict=True))
    command = f"batchtune sweep-buckets MANIFEST --max-batch-size {cap} --run {shlex.quote(run)}"
    note = (
        f"max_batch_ex: {cap} is kept. It cuts {cut} of {counted(len(sizes), 'batch size')}, the largest from "
        f"{max(row.batch_sizes):,}{_cost(row, sizes, sweep)}. `{command}` finds the best table under it; for the "
        "larger batches take it out. Then patch again."
    )
    return KeptCap(cap, (note,))


def _cost(row: Row, sizes: Sequence[int], sweep: Sweep) -> str:
    """How many batches an epoch then has; empty where the sweep does not tell what the buckets hold."""
    if row is not sweep.recommended_row or len(sweep.buckets) != len(sizes):
        return ""
    capped, full = (
        sum(-(-use.examples // size) for use, size in zip(sweep.buckets, batch_sizes, strict=True))
        for batch_sizes in (sizes, row.batch_sizes)
    )
    return f": {format_number(capped)} batches an epoch instead of {format_number(full)}"
