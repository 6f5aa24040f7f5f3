"""Shared by the exports to toolkits without bucket tables: they sort the examples by length and cut the list."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

from batchtune.exports.base import Tuned, choose_table
from batchtune.exports.fields import Loading, table_fields
from batchtune.results import Sweep
from batchtune.units import format_number

# Toolkits for speech count samples if lengths are in seconds; comments say what to multiply by at another rate.
SAMPLE_RATE = 16_000
AUDIO_UNITS: dict[str | None, float] = {"s": SAMPLE_RATE, "ms": SAMPLE_RATE / 1000, "samples": 1}


def cutting_fields(
    tuned: Tuned, toolkit: str, setting: str, loads: Collection[str], batch_size_at: Callable[[float], float]
) -> dict[str, Any]:
    """Return what the templates of these toolkits have in common.

    `setting` is the toolkit's limit for a batch, `loads` are the arguments of torch's DataLoader that it can set, and
    `batch_size_at` says how many examples of a length are a batch.
    """
    sweep = tuned.needed_sweep
    probe = tuned.probe
    loading = Loading.of(tuned)
    why = f"{toolkit} knows no bucket table, only a limit for a batch"
    chosen = choose_table(sweep, toolkit, lambda row: row.sizing == "length", why)
    return {
        **table_fields(chosen, tuned, toolkit),
        "workers": loading.workers,
        "loading": loading.remarks(toolkit, loads),
        "toolkit": toolkit,
        "setting": setting,
        "audio": sweep.lengths.unit in AUDIO_UNITS,
        "rate": f"{SAMPLE_RATE:,}",
        "epoch": about_batches(sweep, batch_size_at),
        "max_batch_length": sweep.max_batch_length,
        "too_large": probe is not None and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9),
        "probe": probe,
    }


def at_most(length: float, scale: float) -> int:
    """Return a length in whole steps of a finer unit, rounded down except for floating-point noise."""
    return math.floor(round(length * scale, 3))


def at_least(length: float, scale: float) -> int:
    """Return a length in whole steps of a finer unit, rounded up except for floating-point noise."""
    return math.ceil(round(length * scale, 3))


def about_batches(sweep: Sweep, batch_size_at: Callable[[float], float]) -> str | None:
    """Estimate the batches of an epoch if examples are sorted and cut; None if the sweep has no quantiles."""
    if len(sweep.quantiles) < 2:
        return None
    middles = [(low + high) / 2 for low, high in pairwise(sweep.quantiles)]
    share = sweep.lengths.count / len(middles)
    return format_number(math.ceil(sum(share / max(1.0, batch_size_at(middle)) for middle in middles)))
