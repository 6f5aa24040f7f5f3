"""The boundaries that no others beat: an exact dynamic programme over the distinct lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from batchtune.batching.remainders import TIE
from batchtune.lengths import FloatArray, Histogram, IntArray

# Where a vectorised pass over the hull's points drops less than this part of them, their neighbourhoods go one by one.
_WORTHWHILE_PASS = 0.02
_WIDENING = 8

# One point of so many makes the first, rough hull.
_SAMPLE_STEP = 64


def optimal_boundaries(histogram: Histogram, example_costs: FloatArray, num_buckets: Sequence[int]) -> list[FloatArray]:
    """Return the boundaries that minimise the cost of all examples, for several bucket counts in one run.

    An example costs what its bucket's end says: a bucket (u_i, u_j] costs w_j·(C_j - C_i), where w are the example
    costs and C the number of examples up to a length. With f_k(j) the least cost of the examples up to u_j in at most k
    buckets, f_k(j) = w_j·C_j + min over i of (f_{k-1}(i) - w_j·C_i): the least of lines at w_j, read off the lower
    convex hull of the points (C_i, f_{k-1}(i)).

    Two facts make it O(K·U) after the hull, and all of it array operations; both hold for any costs:

    - An end u_j with a later u_m that costs no more is never needed: extending the bucket to u_m (over whole
      buckets where they cost no less) is no dearer. So only ends with w_j < w_m for all m > j take part, and
      along those the costs rise strictly.
    - With rising costs, i > j never gives less than i = j (an empty bucket): each example between them costs
      more than w_j in f_{k-1}(i). So the minimum may run over all i, and one hull serves every j of a layer.

    Args:
        histogram: U distinct lengths and their counts.
        example_costs: Shape (U,), not negative and finite: what an example costs in a bucket that ends at
            that length. It need not be monotone.
        num_buckets: The largest number of buckets allowed, at least 1 each.

    Returns:
        For each entry of `num_buckets` the boundaries: ascending, all of them lengths of examples, the last
        one the longest. Where fewer buckets cost the same, fewer are given.
    """
    least_after = np.minimum.accumulate(example_costs[::-1])[::-1]
    ends = np.flatnonzero(np.append(example_costs[:-1] < least_after[1:], True))
    costs = example_costs[ends]
    counts = np.concatenate(([0], histogram.cumulative[ends])).astype(np.float64)
    own = np.arange(1, counts.size)
    least = np.concatenate(([0.0], costs * counts[1:]))
    # The least cost of everything in at most 1, 2, … buckets, and for each the end before each end, counted from 1.
    totals, previous = [float(least[-1])], [np.zeros(counts.size, dtype=np.int64)]
    for _ in range(min(max(num_buckets), ends.size) - 1):
        hull = _lower_hull(counts, least)
        slopes = np.diff(least[hull]) / np.diff(counts[hull])
        # Rounding can make an end beyond one's own look as good as one's own; it never is better.
        before = np.minimum(hull[np.searchsorted(slopes, costs)], own)
        least = np.concatenate(([0.0], least[before] + costs * (counts[1:] - counts[before])))
        totals.append(float(least[-1]))
        previous.append(np.concatenate(([0], before)))
    return [histogram.lengths[ends[_buckets(totals, previous, most) - 1]] for most in num_buckets]


def _buckets(totals: list[float], previous: list[IntArray], most: int) -> IntArray:
    """The ends (from 1) of the best buckets, at most `most` of them, as few as cost the same."""
    most = min(most, len(totals))
    enough = next(k for k in range(most) if totals[k] <= totals[most - 1] * (1 + TIE))
    end, ends = previous[0].size - 1, []
    for layer in range(enough, -1, -1):
        before = int(previous[layer][end])
        if before < end:
            ends.append(end)
        end = before
    return np.array(ends[::-1], dtype=np.int64)


def _lower_hull(x: FloatArray, y: FloatArray) -> npt.NDArray[np.intp]:
    """Indices of the lower convex hull's vertices, for strictly ascending x.

    A point on or above the segment between any two others is no vertex. So points may be dropped in any order,
    and many at once, until each of those left lies below the segment between its neighbours: only the hull is
    like that. First go the points above the hull of a sample. Then all that lie above their neighbours go, pass
    by pass; where these are few, the ones around them go by the hull of just that neighbourhood, taken wider
    from pass to pass, since a dent that unravels point by point would take as many passes as it has points.
    """
    kept = _below_a_sample(x, y)
    reach = 1
    while kept.size > 2:
        dx, dy = np.diff(x[kept]), np.diff(y[kept])
        bent = 1 + np.flatnonzero(dy[:-1] * dx[1:] >= dy[1:] * dx[:-1])
        if bent.size == 0:
            break
        if bent.size >= _WORTHWHILE_PASS * kept.size:
            kept = np.delete(kept, bent)
            continue
        # All that are at most `reach` from one of these.
        steps = np.bincount(np.maximum(bent - reach, 0), minlength=kept.size)
        steps -= np.bincount(np.minimum(bent + reach + 1, kept.size), minlength=kept.size + 1)[:-1]
        near = np.flatnonzero(np.cumsum(steps) > 0)
        corners = _lower_hull_one_by_one(x[kept[near]].tolist(), y[kept[near]].tolist())
        kept = np.delete(kept, np.delete(near, corners))
        reach *= _WIDENING
    return kept


def _below_a_sample(x: FloatArray, y: FloatArray) -> npt.NDArray[np.intp]:
    """Indices of the points below the hull of an evenly spaced sample, and of that hull's own vertices."""
    sample = np.append(np.arange(0, x.size - 1, _SAMPLE_STEP), x.size - 1)
    corners = sample[_lower_hull_one_by_one(x[sample].tolist(), y[sample].tolist())]
    spans = np.diff(corners)
    dx, dy = np.repeat(np.diff(x[corners]), spans), np.repeat(np.diff(y[corners]), spans)
    from_x, from_y = np.repeat(x[corners[:-1]], spans), np.repeat(y[corners[:-1]], spans)
    below = np.append((y[:-1] - from_y) * dx < dy * (x[:-1] - from_x), True)
    below[corners] = True
    return np.flatnonzero(below)


def _lower_hull_one_by_one(x: list[float], y: list[float]) -> npt.NDArray[np.intp]:
    """As `_lower_hull`, point by point, in time linear in them whatever they are (Andrew's monotone chain)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return cast("npt.NDArray[np.intp]", np.array(hull, dtype=np.intp))
