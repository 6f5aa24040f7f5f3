"""The share of the sizes that fit with which an epoch keeps enough optimizer steps, or batches their throughput."""

from __future__ import annotations

import numpy as np

from batchtune.epochs.layout import RankSplit
from batchtune.epochs.measured_costs import batch_seconds, share_of
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.table import Limits, batch_sizes_for
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Keep
from batchtune.units import counted

# Halvings of the range in which a share is searched.
_HALVINGS = 30
# Lengths and shares of the batch sizes at which throughput is compared.
_OF_THROUGHPUT = 128
_SHARES = 128


def share_for(lengths: Lengths, limits: Limits, fewest: int) -> float:
    """Return the largest share of the batch sizes that fit with which no way to batch has fewer batches than `fewest`.

    An example takes at least the share of a batch that it would take among as many of its own length as may be in one,
    or of a longer example.
    """
    histogram = lengths.histogram
    fits: IntArray = np.zeros(histogram.lengths.size, dtype=np.int64)
    if limits.frontier is not None:
        fits = limits.frontier(histogram.lengths)

    def has_enough(share: float) -> bool:
        by_length = batch_sizes_for(histogram.lengths, share * limits.max_batch_length)
        sizes = np.maximum(by_length, share_of(fits, share)).astype(np.float64)
        if limits.max_batch_size is not None:
            sizes = np.minimum(sizes, limits.max_batch_size)
        return bool(
            # Rounding must not make it one too many.
            np.sum(histogram.counts / greatest_from_here_on(sizes)) * (1 - 1e-12)
            > fewest - 1
        )

    if has_enough(1.0):
        return 1.0
    share = 0.0
    too_large = 1.0
    for _ in range(_HALVINGS):
        middle = (share + too_large) / 2
        if has_enough(middle):
            share = middle
        else:
            too_large = middle
    return share


def share_within(
    fraction: float, pricing: Pricing, limits: Limits, keep: Keep
) -> float:
    """Return the smallest share of the batch sizes that fit with which full batches reach a part of the throughput.

    It is that of the best share, in examples a second, by the times of batches of equal lengths. Raises UsageError if
    these are not known, or steps are kept.
    """
    if keep != "nothing":
        raise UsageError(
            f"--throughput-fraction makes batches smaller, but --keep {keep} already decides their size",
            "Leave out one of the two, or add --keep nothing.",
        )
    if pricing.step_seconds is None:
        raise UsageError(
            "--throughput-fraction needs step times, and none are known",
            "Measure them with `batchtune probe-oom`, or leave it out.",
        )
    lengths = pricing.lengths.evenly(_OF_THROUGHPUT)
    fits = limits.largest_sizes(lengths.values)
    cost = batch_seconds(pricing.step_seconds, pricing.targets)
    shares = np.geomspace(1 / fits.max(), 1.0, _SHARES)
    seconds = []
    for share in shares:
        sizes = share_of(fits, share).astype(np.float64)
        seconds.append(float((cost(sizes, lengths.values) / sizes).sum()))
    best = min(seconds)
    reaching = [seconds_of_share * fraction <= best for seconds_of_share in seconds]
    return float(shares[reaching.index(True)])


def check_min_steps(min_steps: int, lengths: Lengths, dealing: RankSplit) -> None:
    """Raise UsageError if even batches of one example make fewer optimizer steps."""
    if dealing.fewest_batches(min_steps) <= lengths.count:
        return
    ranks = ""
    if dealing.world_size * dealing.accumulate > 1:
        ranks = f" on {counted(dealing.world_size, 'rank')}, with an accumulation of {dealing.accumulate:,}"
    raise UsageError(
        f"--min-steps {min_steps}: an epoch of {counted(lengths.count, 'example')} has at most "
        f"{counted(dealing.steps(lengths.count), 'optimizer step')}{ranks}, with batches of one",
        "Lower it.",
    )


def greatest_from_here_on(values: FloatArray) -> FloatArray:
    """Return the greatest of each value and those after it."""
    return np.maximum.accumulate(values[::-1])[::-1]
