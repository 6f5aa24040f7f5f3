"""ESPnet: `batch_type` and `batch_bins`, so that no batch exceeds max_batch_length."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from batchtune.exports.base import Export, Tuned
from batchtune.exports.cutting import AUDIO_UNITS, SAMPLE_RATE, about_batches, at_least, cutting_fields
from batchtune.exports.fields import LengthLimits
from batchtune.exports.text import from_template
from batchtune.results import Sweep

# To leave out a thousandth of the examples must allow batches this much larger to be worth a line.
_WORTH_A_LINE = 1.05


def batch_bins(sweep: Sweep, *, scale: float = 1.0, up_to: float = math.inf) -> int:
    """Return the largest `batch_bins`, in ESPnet's unit, with which no batch can exceed max_batch_length; at least 1.

    `NumElementsBatchSampler` and `LengthBatchSampler` (espnet2/samplers/, ESPnet 202511) sort by length, ascending, and
    end a batch with the example that makes its padded length *exceed* `batch_bins`: n examples up to length L with
    (n - 1)·K ≤ batch_bins, K the length before L. So n·L ≤ max_batch_length holds if batch_bins < K·floor(
    max_batch_length / L) for all lengths K, L that follow each other. These are not in the sweep, but each lies between
    two quantiles that do occur and in neighbouring bins of the histogram that are not empty, which bounds both. Other
    features that are counted too, such as the text, only make batches smaller.

    ESPnet can't limit the number of examples. So that max_batch_size C holds too, batch_bins < K·C for every K that is
    not among the C - 1 shortest lengths: no batch goes on after its C-th example.

    Args:
        sweep: Its quantiles and histogram bound the lengths.
        scale: One of the lengths' units in ESPnet's.
        up_to: Only count examples up to this length.
    """
    limit = sweep.max_batch_length
    cap = sweep.settings.get("max_batch_size") or math.inf
    bounds = [
        low * min(cap, max(1, int(limit / high)))
        for low, high, rank in _neighbours(sweep)
        if high <= up_to and (rank * high > limit or rank > cap)
    ]
    # Without a bound all examples are in one batch that does not exceed it.
    return max(1, at_least(min([*bounds, limit]), scale) - 1)


def _neighbours(sweep: Sweep) -> Iterator[tuple[float, float, int]]:
    """Yield (K, L, r): of two lengths that follow each other, a lower and an upper bound, and a bound of L's rank."""
    filled = [bin for bin in sweep.histogram if bin.count]
    starts = [bin.from_ for bin in filled] or [0.0]
    ends = [bin.to for bin in filled] or [sweep.lengths.max]
    steps = len(sweep.quantiles) - 1
    for index, (low, high) in enumerate(pairwise(sweep.quantiles)):
        rank = math.ceil((index + 1) * sweep.lengths.count / steps)
        if low == high:
            yield low, high, rank
            continue
        first = bisect_left(ends, low)
        last = bisect_left(starts, high)
        if first >= last:  # a damaged histogram
            yield low, high, rank
        for place in range(first, last):
            yield max(low, starts[place]), min(high, ends[min(place + 1, len(ends) - 1)]), rank


def render(tuned: Tuned) -> str:
    """Return the config fragment; raise ResultError if the sweep recommends nothing.

    How to leave out what was left out at tuning: stage 4 of egs2/TEMPLATE/asr1/asr.sh, which keeps
    min_wav_duration < duration < max_wav_duration.
    """
    sweep = tuned.needed_sweep
    scale = AUDIO_UNITS.get(sweep.lengths.unit, 1.0)
    bins = batch_bins(sweep, scale=scale)
    cut = sweep.quantiles[-2]
    larger = batch_bins(sweep, scale=scale, up_to=cut)
    seconds = LengthLimits.of(sweep).scaled(scale / SAMPLE_RATE)
    ends = (("min_wav_duration", seconds.shortest), ("max_wav_duration", seconds.longest))
    loads = ("num_workers", "pin_memory")  # the trainer pins memory by itself on a GPU
    return from_template(
        "espnet.yaml.j2",
        **cutting_fields(tuned, "ESPnet", "batch_bins", loads, lambda length: bins // (length * scale) + 1),
        bins=bins,
        share=f"{bins / (sweep.max_batch_length * scale):.1%}",
        cap=sweep.settings.get("max_batch_size"),
        longest=sweep.lengths.max,
        cut=cut,
        larger=larger if larger > _WORTH_A_LINE * bins else None,
        larger_epoch=about_batches(sweep, lambda length: larger // (length * scale) + 1),
        ends=[(name, limit) for name, limit in ends if limit is not None],
        batch_size=max(1, int(sweep.max_batch_length / sweep.lengths.max)),
        fold_length=at_least(sweep.lengths.max, scale),
    )


EXPORTS = (Export(name="espnet", title="ESPnet", file="batchtune_espnet.yaml", render=render),)
