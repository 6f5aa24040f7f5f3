"""Smaller batch sizes for a table that did not hold, found by running them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Proposal
from batchtune.tuning.verify_plan import Candidate

# How much smaller a batch size is made, try by try, where the probe knows no better.
_CUTS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a run of smaller sizes.

    Attributes:
        failing: Indices of the buckets that failed.
        steps: Steps that were run.
    """

    failing: frozenset[int]
    steps: int


def propose(
    lengths: Lengths,
    candidate: Candidate,
    failing: Collection[int],
    run: Callable[[Candidate], Tried],
    frontier: Callable[[FloatArray], IntArray] | None = None,
) -> Proposal | None:
    """The next smaller sizes that pass when they are run like the ones that failed.

    A bucket that failed gets what the probe's frontier allows where that is less, then 5%, 10%, 20%, 40% and so on
    less, at least one less each time. Sizes of other buckets stay as they are: they were run, and passed. So a bucket
    may get fewer examples than one of longer examples that has been seen to fit.

    Args:
        lengths: The data set.
        candidate: What failed.
        failing: Indices of the buckets that failed.
        run: Runs a candidate in a fresh worker.
        frontier: Lengths → the largest batch size that the probe found to fit.

    Returns:
        Sizes that passed; the last that were tried, not verified, where none did; None where a batch of one failed.
    """
    counts = candidate.table.counts(lengths.histogram)
    sizes, failing, steps = np.minimum(candidate.table.batch_sizes, np.maximum(counts, 1)), set(failing), 0
    lowered = set(failing)
    for attempt, cut in enumerate(_CUTS):
        if any(sizes[bucket] <= 1 for bucket in failing):
            return None
        for bucket in failing:
            most = _known_to_fit(lengths, candidate.table, bucket, frontier) if attempt == 0 else None
            if most is None or most >= sizes[bucket]:
                most = min(int(sizes[bucket]) - 1, int(sizes[bucket] * (1 - cut)))
            sizes[bucket] = max(1, most)
        tried = run(candidate.with_sizes(_with_lowered(candidate.table, sizes, lowered)))
        steps += tried.steps
        if not tried.failing:
            return _proposal(candidate, counts, sizes, lowered, steps, verified=True)
        failing = set(tried.failing)
        lowered |= failing
    return _proposal(candidate, counts, sizes, lowered, steps, verified=False)


def _known_to_fit(
    lengths: Lengths, table: BucketTable, bucket: int, frontier: Callable[[FloatArray], IntArray] | None
) -> int | None:
    if frontier is None:
        return None
    known = lengths.histogram.lengths
    longest = known[int(np.searchsorted(known, table.boundaries[bucket], side="right")) - 1]
    return int(frontier(np.array([longest]))[0])


def _with_lowered(table: BucketTable, sizes: IntArray, lowered: set[int]) -> IntArray:
    """The table's sizes, those of lowered buckets replaced; a size beyond what the data fill stays as it is."""
    buckets = np.array(sorted(lowered), dtype=np.int64)
    new: IntArray = table.batch_sizes.copy()
    new[buckets] = sizes[buckets]
    return new


def _proposal(
    candidate: Candidate, counts: IntArray, sizes: IntArray, lowered: set[int], steps: int, *, verified: bool
) -> Proposal:
    proposed = _with_lowered(candidate.table, sizes, lowered)
    return Proposal(
        bucket_batch_sizes=proposed.tolist(),
        max_batch_length=lower_max_batch_length(candidate, counts, proposed, lowered),
        verified=verified,
        steps=steps,
    )


def lower_max_batch_length(
    candidate: Candidate, counts: IntArray, proposed: IntArray, lowered: Collection[int]
) -> float:
    """The largest that gives no lowered bucket more than was proposed, for samplers that divide by the boundary.

    int(M / boundary) is at most the size as long as M is below (size + 1) · boundary. Where a bucket that was not
    lowered has all its examples in one batch, it sets no limit; else the candidate's own holds. Six digits, rounded
    down.
    """
    ends = [
        float((proposed[bucket] + 1) * candidate.table.boundaries[bucket])
        for bucket in range(candidate.table.num_buckets)
        if bucket in lowered or proposed[bucket] < counts[bucket]
    ]
    below = min([math.nextafter(end, 0) for end in ends], default=math.inf)
    if below >= candidate.max_batch_length:
        return candidate.max_batch_length
    digits = 10.0 ** (math.floor(math.log10(below)) - 5)
    return float(f"{math.floor(below / digits) * digits:.6g}")
