"""The cost of every bucket that ends at a given length: its batches, counted, or by their expected longest example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from batchtune.epochs.expectation import all_within, log_factorials_up_to
from batchtune.lengths import FloatArray, Histogram, IntArray

# Up to this many distinct lengths every sum is written out, in time that grows with their cube.
MOST_EXACT = 96
# Beyond, some ends stand for all: the number of examples from each to the bucket's end is about this many times that
# from the next one.
_SPACING = 1.15
# A remainder's cost is tabulated at this many batch sizes and lengths,
_TABLED_SIZES = 256
_TABLED_LENGTHS = 256
# interpolated to this many sizes, and looked up at this many ranks among the examples.
_ROWS = 4096
_RANKS = 1 << 18
# Gauss's points and weights on (0, 1), for the distribution of a remainder's longest.
_NODES = ((0.5 - 0.15**0.5, 5 / 18), (0.5, 8 / 18), (0.5 + 0.15**0.5, 5 / 18))


class ShapeCost(Protocol):
    """The cost of batches by their sizes and longest lengths, and the boundaries below their buckets if known."""

    def __call__(self, batch_sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None, /) -> FloatArray:
        """Return costs, element by element."""


class BucketCosts(ABC):
    """The cost of every bucket (u_i, u_j], for `num_ends` ends u_1 < u_2 < ... and u_0 below all lengths.

    `ends` are indices of distinct lengths, as `few_ends` returns them, `batch_sizes` of buckets that end there.
    """

    def __init__(self, histogram: Histogram, ends: IntArray, batch_sizes: IntArray) -> None:
        self.num_ends = ends.size
        # Shape (ends + 1,): the number of examples up to each end.
        self._counts = np.concatenate(([0], histogram.cumulative[ends])).astype(np.int64)
        self._sizes: list[int] = batch_sizes.tolist()

    @abstractmethod
    def up_to(self, end: int) -> FloatArray:
        """Return the cost of the bucket (u_i, u_end] for each i < end, shape (end,)."""


class BatchCounts(BucketCosts):
    """The number of batches of a bucket: ceil(n / B) of its n examples, with the batch size B at its end."""

    def up_to(self, end: int) -> FloatArray:
        """As for every `BucketCosts`."""
        batches = -((self._counts[:end] - self._counts[end]) // self._sizes[end - 1])
        return cast(FloatArray, batches.astype(np.float64))


class ExactCosts(BucketCosts):
    """The sum of the cost over every length that can be the longest, as `ExpectedBatches.sum_of` does.

    It takes O(U²) evaluations of the cost for each end, for U distinct lengths, each of which may be an end.
    """

    def __init__(self, histogram: Histogram, batch_sizes: IntArray, cost: ShapeCost) -> None:
        super().__init__(histogram, np.arange(histogram.lengths.size), batch_sizes)
        self._lengths = histogram.lengths
        self._cost = cost
        self._below = np.concatenate(([0.0], histogram.lengths))
        self._log_factorials = log_factorials_up_to(histogram.count)

    def up_to(self, end: int) -> FloatArray:
        """As for every `BucketCosts`."""
        examples = self._counts[end] - self._counts[:end]
        batches, rest = np.divmod(examples, self._sizes[end - 1])
        total = np.zeros(end)
        for drawn, times in ((np.full(end, self._sizes[end - 1]), batches), (rest, (rest > 0).astype(np.int64))):
            some = np.flatnonzero(times)
            total[some] += times[some] * self._mean(end, some, drawn[some])
        return total

    def _mean(self, end: int, starts: npt.NDArray[np.intp], drawn: IntArray) -> FloatArray:
        """Return the mean cost of a batch of `drawn` examples from each of the buckets (u_start, u_end]."""
        start, longest = np.nonzero(starts[:, None] <= np.arange(end))
        first = starts[start]
        size = drawn[start]
        of = self._counts[end] - self._counts[first]
        upper = all_within(self._counts[longest + 1] - self._counts[first], of, size, self._log_factorials)
        lower = all_within(self._counts[longest] - self._counts[first], of, size, self._log_factorials)
        each = np.asarray(self._cost(size.astype(np.float64), self._lengths[longest], self._below[first]))
        return cast(FloatArray, np.bincount(start, np.maximum(upper - lower, 0.0) * each, starts.size))


class SmoothCosts(BucketCosts):
    """The same cost estimated from fewer lengths, for data whose lengths are too many for `ExactCosts`.

    Full batches: for some starts of the bucket, ever farther apart towards the shortest length, and linear in the
    number of examples between them. P(longest ≤ x) is exact at such lengths too; between two of them, a < b in numbers
    of examples, lengths are taken to rise evenly, so that Σ C(c, B) over a ≤ c < b, which is C(b, B+1) - C(a, B+1),
    gives the mean; or to lie together at either end of the interval, as far as their own mean shows that.

    The remainder, one batch in each bucket: by the longest at three points of its distribution,
    P(longest ≤ c-th) ≈ ((c - 1/2 - h) / (n - h))^r with h = (r - 1) / 2, whose mean is exact; its cost from a table.

    The cost is called without `above`: a bucket's typical targets come from the examples nearest in length.
    """

    def __init__(self, histogram: Histogram, ends: IntArray, batch_sizes: IntArray, cost: ShapeCost) -> None:
        # No batch is larger than the data set.
        super().__init__(histogram, ends, np.minimum(batch_sizes, histogram.count + 1))
        self._log_factorials = log_factorials_up_to(histogram.count)
        self._lengths = np.concatenate((histogram.lengths[:1], histogram.lengths[ends]))
        self._totals = np.concatenate(([0.0], histogram.cumulative_total[ends]))
        self._set_full_costs(cost)
        self._set_rest_costs(histogram, cost)

    def up_to(self, end: int) -> FloatArray:
        """As for every `BucketCosts`, approximately."""
        examples = self._counts[end] - self._counts[:end]
        batches = examples // self._sizes[end - 1]
        rest = examples - batches * self._sizes[end - 1]
        total = batches * self._full(end)
        total += self._rest(end, examples, rest)
        return cast(FloatArray, total)

    def _set_full_costs(self, cost: ShapeCost) -> None:
        """Choose the points that stand for all ends up to each one; price its full batches with those as longest."""
        self._points: list[npt.NDArray[np.intp]] = []
        for end in range(1, self.num_ends + 1):
            # As far apart as they are from the end, in numbers of examples.
            log_before = np.log(self._counts[end] - self._counts[:end]) * (1 / np.log(_SPACING))
            first = np.flatnonzero(np.diff(np.floor(log_before))) + 1
            self._points.append(np.unique(np.concatenate(([0], first, [end - 1, end]))))
        numbers = [points.size for points in self._points]
        sizes = np.repeat(np.asarray(self._sizes, dtype=np.float64), numbers)
        each = np.asarray(cost(sizes, self._lengths[np.concatenate(self._points)]), dtype=np.float64)
        self._full_costs = np.split(each, np.cumsum(numbers)[:-1])

    def _full(self, end: int) -> FloatArray:
        """Return the mean cost of a full batch of each bucket that ends here, shape (end,)."""
        size = self._sizes[end - 1]
        points = self._points[end - 1]
        costs = self._full_costs[end - 1]
        up_to = self._counts[points]
        all_of = up_to[-1] - up_to[:-1]
        starts = int(np.searchsorted(-all_of, -size, side="right"))  # this many have a full batch
        if starts == 0:
            return np.full(end, costs[-1])
        inside = np.maximum(up_to - up_to[:starts, None], 0)
        logs = self._log_factorials
        log_all = logs[all_of[:starts]] - logs[all_of[:starts] - size]
        within = np.exp(logs[inside] - logs[np.maximum(inside - size, 0)] - log_all[:, None])
        within[inside < size] = 0.0
        spans = np.diff(up_to)
        summed = within * (inside - size)
        even = np.diff(summed, axis=1) / ((size + 1) * spans)
        # Where an interval's lengths lie: 1 all at its longest, 0 rising evenly, -1 all at its shortest.
        low = self._lengths[points[:-1]]
        high = self._lengths[points[1:]]
        mean_place = (np.diff(self._totals[points]) / spans - low) / np.where(high > low, high - low, 1.0)
        even_place = (spans + 1) / (2 * spans)
        side = np.clip((mean_place - even_place) / np.maximum(1 - even_place, 0.25), -1.0, 1.0)
        below = even + np.maximum(side, 0) * (within[:, :-1] - even) + np.maximum(-side, 0) * (within[:, 1:] - even)
        mean = costs[-1] - below @ np.diff(costs)
        # If one batch holds all examples, its longest is the longest of all.
        known = np.append(up_to[:starts], up_to[-1] - size)
        return cast(FloatArray, np.interp(self._counts[:end], known, np.append(mean, costs[-1])))

    def _set_rest_costs(self, histogram: Histogram, cost: ShapeCost) -> None:
        """Tabulate costs by rows of sizes and columns of lengths, and where to look in the table."""
        largest = max(1, min(max(self._sizes) - 1, histogram.count))
        sizes = np.unique(np.round(np.geomspace(1, largest, _TABLED_SIZES)))
        rows = np.unique(np.round(np.geomspace(1, largest, _ROWS)))
        columns = np.unique(np.linspace(0, self._lengths.size - 1, _TABLED_LENGTHS).astype(np.int64))
        each = cost(np.repeat(sizes, columns.size), np.tile(self._lengths[columns], sizes.size))
        tabled = np.asarray(each, dtype=np.float64).reshape(sizes.size, columns.size)
        left = np.clip(np.searchsorted(sizes, rows, side="right") - 1, 0, max(sizes.size - 2, 0))
        right = np.minimum(left + 1, sizes.size - 1)
        part = (rows - sizes[left]) / np.maximum(sizes[right] - sizes[left], 1.0)
        table = tabled[left] + part[:, None] * (tabled[right] - tabled[left])
        self._table = np.append(table.ravel(), 0.0)  # so that the last column has a next one
        drawn = np.arange(largest + 1)
        nearest = np.searchsorted((rows[1:] + rows[:-1]) / 2, drawn)
        self._row_starts = nearest * columns.size
        self._shares = [np.exp(np.log(node) / np.maximum(drawn, 1)) for node, _ in _NODES]
        self._ranks_each = (_RANKS - 1) / histogram.count
        # All examples behind one end are taken to be as long as the next end.
        ranks = np.stack((self._counts[:-1] + 1, self._counts[1:]), axis=1).ravel()
        length = np.interp(np.arange(_RANKS) / self._ranks_each, ranks, np.repeat(self._lengths[1:], 2))
        self._places = np.interp(length, self._lengths[columns], np.arange(columns.size))

    def _rest(self, end: int, examples: IntArray, rest: IntArray) -> FloatArray:
        """Return the mean cost of the last batch of each bucket that ends here, shape (end,), 0 if all are full."""
        row = self._row_starts[rest]
        half = (rest - 1) / 2
        first = self._counts[:end] + (half + 0.5)
        spread = examples - half
        last = self._counts[end]
        total = np.zeros(end)
        for (_, weight), shares in zip(_NODES, self._shares, strict=True):
            rank = np.minimum(first + shares[rest] * spread, last)
            place = self._places[(rank * self._ranks_each).astype(np.int64)]
            column = place.astype(np.int64)
            left = self._table[row + column]
            right = self._table[row + column + 1]
            total += weight * (left + (place - column) * (right - left))
        return np.where(rest > 0, total, 0.0)
