"""The bucket table, which every sampler config comes down to; SpeechBrain's; and the limits on batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.epochs import floats
from batchtune.lengths import AnyArray, BoolArray, FloatArray, Histogram, IntArray
from batchtune.records import Sizing

# No data set fills a larger batch, and a quotient far beyond would not fit int64.
_LARGEST_BATCH_SIZE = 2**53

Buckets: TypeAlias = npt.NDArray[np.integer[Any]]
"""Indices of buckets, in as few bits as possible."""
SizeFunction: TypeAlias = Callable[[FloatArray], IntArray]
"""Lengths → batch sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class BucketTable:
    """Boundaries and one batch size per bucket.

    With target boundaries it is a table over both lengths: buckets with the same boundary share a range of lengths, and
    an example belongs to the first bucket with neither boundary below its own lengths.

    Attributes:
        boundaries: Shape (buckets,), ascending, positive and finite; bucket b holds the lengths in
            (boundaries[b - 1], boundaries[b]]. Strictly ascending without target boundaries.
        batch_sizes: Shape (buckets,), at least 1 each.
        target_boundaries: Shape (buckets,), not negative and finite; strictly ascending among the buckets with the
            same boundary. None for a table over one length.
    """

    boundaries: FloatArray
    batch_sizes: IntArray
    target_boundaries: FloatArray | None = None

    @classmethod
    def of(cls, boundaries: npt.ArrayLike, batch_sizes: npt.ArrayLike) -> BucketTable:
        """Return the table of plain numbers, as users and files give them.

        Raises ValueError if boundaries or batch sizes break a rule; the message names the entry.
        """
        edges = _numbers("bucket_boundaries", boundaries)
        sizes = _numbers("bucket_batch_sizes", batch_sizes)
        if sizes.size != edges.size:
            raise ValueError(
                f"{sizes.size} bucket_batch_sizes for {edges.size} bucket_boundaries: give one batch size for each "
                "boundary"
            )
        _check_each(
            "bucket_boundaries must be positive and finite",
            edges,
            (edges > 0) & (edges < np.inf),
        )
        _check_each(
            "bucket_boundaries must ascend", edges, np.diff(edges, prepend=0) > 0
        )
        whole = (
            (sizes >= 1) & (sizes <= _LARGEST_BATCH_SIZE) & (sizes == np.floor(sizes))
        )
        _check_each(
            "bucket_batch_sizes must be whole numbers from 1 to 2**53", sizes, whole
        )
        return cls(edges.astype(np.float64), sizes.astype(np.int64))

    @property
    def num_buckets(self) -> int:
        """Number of buckets, empty ones included."""
        return int(self.boundaries.size)

    @property
    def pairs(self) -> tuple[FloatArray, FloatArray]:
        """The boundaries and target boundaries of a table over both lengths."""
        assert self.target_boundaries is not None
        return self.boundaries, self.target_boundaries

    def assign(self, lengths: AnyArray, targets: AnyArray | None = None) -> Buckets:
        """Return the bucket of each example, `num_buckets` for those that no bucket holds.

        Over one length it is `numpy.searchsorted(boundaries, length)`, left side. Lengths of fewer bits than float64
        are compared with the boundaries rounded alike: if the last boundary was the longest length, that length,
        rounded, is still not beyond it.

        With target boundaries it takes `targets` too and follows NeMo's rule without its strict mode. Strict mode
        differs only for targets beyond the last target boundary of their own boundary: they have no bucket.
        """
        if self.target_boundaries is not None:
            assert targets is not None
            assigned = np.full(
                lengths.size,
                self.num_buckets,
                dtype=np.min_scalar_type(self.num_buckets),
            )
            for bucket in range(self.num_buckets - 1, -1, -1):
                assigned[
                    (lengths <= self.boundaries[bucket])
                    & (targets <= self.target_boundaries[bucket])
                ] = bucket
            return assigned
        edges: AnyArray = self.boundaries
        if lengths.dtype.kind == "f" and lengths.dtype.itemsize < edges.dtype.itemsize:
            edges = edges.astype(lengths.dtype)
        return np.searchsorted(edges, lengths, side="left").astype(
            np.min_scalar_type(self.num_buckets)
        )

    def extended_to(self, longest: float) -> BucketTable:
        """Return the table; if `longest` is beyond the last boundary, with an additional bucket of batches of one."""
        if longest <= self.boundaries[-1]:
            return self
        return BucketTable(
            np.append(self.boundaries, longest), np.append(self.batch_sizes, 1)
        )

    def lower_edges(self, lengths: FloatArray) -> FloatArray:
        """Return the boundary below the bucket of each length."""
        return np.append(0.0, self.boundaries)[
            np.searchsorted(self.boundaries, lengths)
        ]

    def divide(self, histogram: Histogram) -> tuple[IntArray, IntArray]:
        """Return where the buckets begin and end, and the number of examples in each, shape (buckets,).

        Bucket b holds the distinct lengths edges[b] : edges[b + 1]. Raises ValueError if the longest length is beyond
        the last boundary.
        """
        if histogram.lengths[-1] > self.boundaries[-1]:
            raise ValueError(
                f"length {histogram.lengths[-1]} is beyond the last boundary {self.boundaries[-1]}"
            )
        ends = np.searchsorted(histogram.lengths, self.boundaries, side="right")
        up_to = np.where(ends > 0, histogram.cumulative[ends - 1], 0)
        edges = np.concatenate(([0], ends)).astype(np.int64)
        return edges, np.diff(up_to, prepend=0)


def _numbers(name: str, given: npt.ArrayLike, hint: str = "") -> AnyArray:
    try:
        values = np.asarray(given)
    except ValueError:  # nested lists of different lengths
        raise ValueError(f"{name} must be a list of numbers{hint}") from None
    if values.ndim != 1 or values.size == 0:
        raise ValueError(
            f"{name} must be one-dimensional and not empty, got shape {values.shape}{hint}"
        )
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be numbers, got {values.dtype}{hint}")
    return values


def _check_each(rule: str, values: AnyArray, sound: BoolArray) -> None:
    if not sound.all():
        entry = int(sound.argmin())
        raise ValueError(f"{rule}, but entry {entry} is {values[entry]}")


def batch_sizes_for(
    boundaries: npt.ArrayLike,
    max_batch_length: float,
    max_batch_size: int | None = None,
) -> IntArray:
    """Return the batch size of each bucket: max(1, int(max_batch_length / boundary)), at most `max_batch_size`.

    It divides and cuts as SpeechBrain does, to round alike. `max_batch_length` is positive and finite.
    """
    cap = _LARGEST_BATCH_SIZE if max_batch_size is None else max_batch_size
    with np.errstate(over="ignore"):
        sizes = max_batch_length / floats(boundaries)
    return np.clip(sizes, 1, cap).astype(np.int64)


def speechbrain_boundaries(num_buckets: int, max_batch_length: float) -> FloatArray:
    """Return the boundaries that SpeechBrain's DynamicBatchSampler takes, but for rounding.

    Quantiles of lognormal(s=1), that is exp of the normal's, at the points i / (num_buckets + 1), scaled so
    that the last is max_batch_length (but for rounding). They depend on neither data nor seed.
    Source: `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0.

    Raises ValueError if `num_buckets` is below 1.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    parts = num_buckets + 1
    points = np.linspace(1 / parts, num_buckets / parts, num_buckets)
    inverse = NormalDist().inv_cdf
    quantiles = np.exp([inverse(point) for point in points.tolist()])
    return floats(quantiles * max_batch_length / quantiles[-1])


def speechbrain_table(
    histogram: Histogram,
    max_batch_length: float,
    *,
    num_buckets: int | None = None,
    bucket_boundaries: npt.ArrayLike | None = None,
    max_batch_ex: int | None = None,
) -> BucketTable:
    """Return the buckets that SpeechBrain's DynamicBatchSampler sorts these lengths into, by its own arguments.

    `bucket_boundaries`, positive, take precedence over `num_buckets`; one of the two is needed.
    SpeechBrain's additional bucket of batch size 1, for examples beyond the last boundary, is in
    the table only if there are any; it ends at the longest length.
    """
    if bucket_boundaries is not None:
        boundaries = floats(bucket_boundaries)
    else:
        assert num_buckets is not None
        boundaries = speechbrain_boundaries(num_buckets, max_batch_length)
    sizes = batch_sizes_for(boundaries, max_batch_length, max_batch_ex)
    return BucketTable.of(boundaries, sizes).extended_to(float(histogram.lengths[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on the batch size: max_batch_length, max_batch_size, and the frontier of a probe.

    `frontier` gives the largest batch size that fits at each length, at least 1; None without a probe. Beyond
    `measured_up_to` max_batch_length was not measured: there the frontier limits every size.
    """

    max_batch_length: float
    max_batch_size: int | None = None
    frontier: SizeFunction | None = None
    measured_up_to: float | None = None

    @property
    def sizings(self) -> tuple[Sizing, ...]:
        """The sources of batch sizes; the last knows the device best."""
        if self.frontier is None:
            return ("length",)
        return ("length", "frontier")

    def batch_sizes(self, lengths: FloatArray, sizing: Sizing) -> IntArray:
        """Return the batch size of a bucket that ends at each length."""
        if sizing == "length":
            sizes = batch_sizes_for(lengths, self.max_batch_length, self.max_batch_size)
            if self.measured_up_to is None or self.frontier is None:
                return sizes
            return np.where(
                lengths > self.measured_up_to,
                np.minimum(sizes, self.frontier(lengths)),
                sizes,
            )
        assert self.frontier is not None
        sizes = np.asarray(self.frontier(lengths), dtype=np.int64)
        if self.max_batch_size is None:
            return sizes
        return np.minimum(sizes, self.max_batch_size)

    def largest_sizes(self, lengths: FloatArray) -> IntArray:
        """Return the batch sizes by the source that knows the device best."""
        return self.batch_sizes(lengths, self.sizings[-1])

    def allow(self, batch_sizes: IntArray, longest: FloatArray) -> bool:
        """Return whether all these batches stay within the limits; a batch of one always does."""
        fits = batch_sizes <= self.largest_sizes(longest)
        return bool(((batch_sizes == 1) | fits).all())

    def pooled_table(self, histogram: Histogram) -> BucketTable:
        """Return how many examples fit with the longest of a batch that need not be of one bucket."""
        sizes = self.largest_sizes(histogram.lengths)
        ends = ends_of_runs(sizes)
        return BucketTable(histogram.lengths[ends], sizes[ends])


def ends_of_runs(batch_sizes: IntArray) -> IntArray:
    """Return the last place of each run of equal batch sizes."""
    return np.append(np.flatnonzero(np.diff(batch_sizes)), batch_sizes.size - 1)


class OverlongError(ValueError):
    """Examples beyond the last boundary."""


def checked_lengths(
    lengths: npt.ArrayLike,
    hint: str = "; for a manifest, use from_config; for a data set, also give it length_of=",
) -> AnyArray:
    """Return the lengths that a user gave as an array; raise ValueError for one that is not positive and finite.

    The message for a value that is not an array ends with the hint.
    """
    values = _numbers("lengths", lengths, hint)
    _check_each(
        "lengths must be positive and finite", values, (values > 0) & (values < np.inf)
    )
    return values


def holding_all(values: AnyArray, table: BucketTable, overlong: str) -> BucketTable:
    """Return the table, extended if there are overlong examples; raise OverlongError if `overlong` is "error"."""
    if table.assign(values.max(keepdims=True))[0] < table.num_buckets:
        return table
    if overlong == "error":
        beyond = np.flatnonzero(table.assign(values) == table.num_buckets)
        index = int(beyond[0])
        last = float(table.boundaries[-1])
        raise OverlongError(
            f"example {index} has the length {values[index]}, beyond the last of bucket_boundaries, {last}; "
            f"{beyond.size:,} of {values.size:,} examples are. Leave them out of the data set and of the lengths, add "
            'a boundary, or say overlong="single" for batches of one'
        )
    return table.extended_to(float(values.max()))
