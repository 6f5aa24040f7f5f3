"""ESPnet: `batch_type` and `batch_bins`, so that no batch exceeds max_batch_length."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from batchtune.exports.base import Export, Tuned
from batchtune.exports.cutting import AUDIO_UNITS, SAMPLE_RATE, about_batches, at_least, counting_remark, what_runs
from batchtune.exports.loader import Loading
from batchtune.exports.text import LengthLimits, from_template, number
from batchtune.results import Sweep
from batchtune.units import counted, format_length

# A hint that costs a thousandth of the examples is worth a line only where it saves more than so much.
_WORTH_TELLING = 1.05


def batch_bins(sweep: Sweep, *, scale: float = 1.0, up_to: float = math.inf) -> int:
    """Return the largest `batch_bins` with which no batch can exceed max_batch_length.

    `NumElementsBatchSampler` and `LengthBatchSampler` (espnet2/samplers/, ESPnet 202511) sort by length, ascending, and
    end a batch with the example that makes its padded length *exceed* `batch_bins`: n examples up to length L with
    (n - 1)·K ≤ batch_bins, K the length before L. So n·L ≤ max_batch_length holds where batch_bins < K·floor(
    max_batch_length / L) for all lengths K, L that follow each other. These are not in the sweep, but each lies between
    two quantiles that do occur and in neighbouring bins of the histogram that are not empty, which bounds both. Other
    features that are counted too, such as the text, only make batches smaller.

    ESPnet can't limit the number of examples. So that max_batch_size C holds too, batch_bins < K·C for every K that is
    not among the C - 1 shortest lengths: no batch goes on after its C-th example.

    Args:
        sweep: With quantiles, these bound it. Without (older files), lengths are taken to be dense.
        scale: What one of the lengths' unit is in ESPnet's.
        up_to: Only for examples up to this length, for data sets without the longer ones.

    Returns:
        In ESPnet's unit; at least 1, the least that ESPnet takes.
    """
    limit, cap = sweep.max_batch_length, sweep.settings.get("max_batch_size") or math.inf
    if len(sweep.quantiles) < 2:
        most = math.floor(round((limit - min(sweep.lengths.max, up_to)) * scale, 3))
        return max(1, most if cap == math.inf else min(most, at_least(cap * sweep.lengths.min, scale) - 1))
    bounds = [
        low * min(cap, max(1, int(limit / high)))
        for low, high, rank in _neighbours(sweep)
        if high <= up_to and (rank * high > limit or rank > cap)
    ]
    # Without a bound all examples are in one batch that does not exceed it.
    return max(1, at_least(min([*bounds, limit]), scale) - 1)


def _neighbours(sweep: Sweep) -> Iterator[tuple[float, float, int]]:
    """Yield (K, L, r), bounds of lengths that follow each other: the first is at least K, the second at most L.

    The second is among the r shortest examples.
    """
    filled = [bin for bin in sweep.histogram if bin.count]
    starts, ends = [bin.from_ for bin in filled] or [0.0], [bin.to for bin in filled] or [sweep.lengths.max]
    steps = len(sweep.quantiles) - 1
    for index, (low, high) in enumerate(pairwise(sweep.quantiles)):
        rank = math.ceil((index + 1) * sweep.lengths.count / steps)
        if low == high:
            yield low, high, rank
            continue
        first, last = bisect_left(ends, low), bisect_left(starts, high)
        if first >= last:  # a damaged histogram
            yield low, high, rank
        for place in range(first, last):
            yield max(low, starts[place]), min(high, ends[min(place + 1, len(ends) - 1)]), rank


def render(tuned: Tuned) -> str:
    """Return the config fragment; raise ResultError if the sweep recommends nothing."""
    sweep = tuned.needed_sweep
    unit = sweep.lengths.unit
    scale = AUDIO_UNITS.get(unit, 1.0)
    bins, loading = batch_bins(sweep, scale=scale), Loading.of(tuned)
    return from_template(
        "espnet.yaml.j2",
        runs=what_runs(tuned, "ESPnet", lambda length: bins // (length * scale) + 1),
        limit=_limits(sweep, bins, scale),
        left_out=_leaving_out(sweep, scale),
        counting=counting_remark(unit, "batch_bins"),
        audio=unit in AUDIO_UNITS,
        bins=bins,
        workers=None if loading is None else loading.workers,
        # Its trainer pins memory where it has a GPU.
        loading=() if loading is None else loading.remarks("ESPnet", ("num_workers", "pin_memory")),
        batch_size=max(1, int(sweep.max_batch_length / sweep.lengths.max)),
        fold_length=at_least(sweep.lengths.max, scale),
    )


def _limits(sweep: Sweep, bins: int, scale: float) -> Iterator[str]:
    """Explain why batch_bins is below max_batch_length, and how it could be larger."""
    unit, cap = sweep.lengths.unit, sweep.settings.get("max_batch_size")
    capped = f", or holds more than {counted(cap, 'example')} (--max-batch-size)" if cap else ""
    yield (
        "ESPnet ends a batch with the example that exceeds batch_bins; so that none exceeds "
        f"{format_length(sweep.max_batch_length, unit)}{capped}, it is "
        f"{bins / (sweep.max_batch_length * scale):.1%} of that"
    )
    if sweep.lengths.max > sweep.max_batch_length:
        longest = format_length(sweep.lengths.max, unit)
        yield f"The longest example, {longest}, exceeds it by itself: leave out what does"
    if len(sweep.quantiles) < 2:
        yield "The sweep, of an older batchtune, does not hold what is needed to prove that: sweep again"
        return
    cut = sweep.quantiles[-2]
    larger = batch_bins(sweep, scale=scale, up_to=cut)
    if larger > _WORTH_TELLING * bins:
        about = about_batches(sweep, lambda length: larger // (length * scale) + 1)
        yield (
            f"Without the few examples longer than {format_length(cut, unit)}, batch_bins: {larger} would be as safe, "
            f"with about {about} batches"
        )


def _leaving_out(sweep: Sweep, scale: float) -> Iterator[str]:
    """Say how to leave out what was left out at tuning: ESPnet's trainer can't, its recipes can.

    Source: stage 4 of egs2/TEMPLATE/asr1/asr.sh, which keeps min_wav_duration < duration < max_wav_duration.
    """
    limits = LengthLimits.of(sweep)
    yield from limits.left_out
    if not limits:
        return
    if sweep.lengths.unit not in AUDIO_UNITS:
        yield (
            "ESPnet's trainer trains on what the shape files hold: take the lines of what is not "
            f"{limits.condition('length')} out of every train_shape_file"
        )
        return
    seconds = limits.scaled(scale / SAMPLE_RATE)
    ends = [("min_wav_duration", seconds.shortest), ("max_wav_duration", seconds.longest)]
    flags = " ".join(f"--{name} {number(limit)}" for name, limit in ends if limit is not None)
    rate = f" at {SAMPLE_RATE:,} samples a second" if sweep.lengths.unit == "samples" else ""
    exactly = " or ".join(f"{number(limit)} s" for _, limit in ends if limit is not None)
    yield (
        f"ESPnet's trainer can't leave them out; stage 4 of a recipe's asr.sh does: {flags}, in seconds{rate}. It "
        f"leaves out those of exactly {exactly}, too, and without --max_wav_duration what is not below 20 s"
    )


EXPORTS = (Export(name="espnet", title="ESPnet", file="batchtune_espnet.yaml", render=render),)
