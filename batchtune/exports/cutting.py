"""Shared by the exports to toolkits that know no bucket table: they sort the examples by length and cut the list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from batchtune.exports.base import Tuned, choose_table
from batchtune.exports.text import about_data, about_row, padded_remark
from batchtune.results import Sweep
from batchtune.units import format_length, format_number

# What toolkits for speech count where lengths are in seconds; comments say what to multiply by at another rate.
SAMPLE_RATE = 16_000
AUDIO_UNITS: dict[str | None, float] = {"s": SAMPLE_RATE, "ms": SAMPLE_RATE / 1000, "samples": 1}


def what_runs(tuned: Tuned, toolkit: str, batch_size_at: Callable[[float], float]) -> Iterator[str]:
    """Yield what was tuned, and what the toolkit makes of it instead of a bucket table.

    `batch_size_at` says of a length how many examples of it are a batch.

    Raises:
        ResultError: The sweep recommends nothing, or has no row with batch sizes from max_batch_length.
    """
    sweep, probe = tuned.needed_sweep, tuned.probe
    why = f"{toolkit} knows no bucket table, only a limit for a batch"
    chosen = choose_table(sweep, toolkit, lambda row: row.sizing == "length", why)
    yield about_data(sweep)
    yield f"The best table with batch sizes from max_batch_length: {about_row(chosen.row, sweep)}"
    yield from chosen.remarks
    if probe is not None and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        used, fits = (format_length(one.max_batch_length, sweep.lengths.unit) for one in (sweep, probe))
        yield f"max_batch_length {used} is more than the {fits} that was measured to fit: batches may run out of memory"
    yield from padded_remark(sweep, toolkit)
    about = about_batches(sweep, batch_size_at)
    epoch = f", about {about} an epoch" if about else ""
    yield f"{toolkit} does not run it: it sorts the examples by length and cuts the list into batches{epoch}"
    yield "The same examples are together in every epoch; only the order of the batches is shuffled"


def at_most(length: float, scale: float) -> int:
    """Return a length in whole steps of a finer unit, rounded down; noise of floating point does not cost one."""
    return math.floor(round(length * scale, 3))


def at_least(length: float, scale: float) -> int:
    """Return a length in whole steps of a finer unit, rounded up."""
    return math.ceil(round(length * scale, 3))


def counting_remark(unit: str | None, what: str) -> str:
    """Say what a toolkit's setting counts, and what to do where the data differ."""
    if unit in ("s", "ms"):
        rate = f"{SAMPLE_RATE:,}"
        return f"{what} counts audio samples, here at {rate} a second: at another rate multiply by rate / {rate}"
    if unit in ("samples", "frames", "tokens"):
        return f"{what} counts {unit}, as the lengths do"
    return f"{what} is in the unit of the lengths, {unit or 'which is unknown'}: multiply by what one is in the toolkit"


def about_batches(sweep: Sweep, batch_size_at: Callable[[float], float]) -> str | None:
    """Estimate the batches of an epoch if examples are sorted and cut; None if the sweep has no quantiles."""
    if len(sweep.quantiles) < 2:
        return None
    middles = [(low + high) / 2 for low, high in pairwise(sweep.quantiles)]
    share = sweep.lengths.count / len(middles)
    return format_number(math.ceil(sum(share / max(1.0, batch_size_at(middle)) for middle in middles)))
