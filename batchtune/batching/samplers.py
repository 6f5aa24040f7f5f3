"""The samplers of other libraries, reproduced."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchtune.batching.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Histogram


def speechbrain_boundaries(num_buckets: int, max_batch_length: float) -> FloatArray:
    """Return the boundaries that SpeechBrain's DynamicBatchSampler takes, to the bit.

    Quantiles of lognormal(s=1), that is exp of the normal's, at the points i / (num_buckets + 1), scaled so
    that the last is max_batch_length (but for rounding). They depend on neither data nor seed.
    Source: `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0.

    Raises ValueError if `num_buckets` is below 1.
    """
    from scipy.special import ndtri

    if num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    parts = num_buckets + 1
    quantiles = np.exp(ndtri(np.linspace(1 / parts, num_buckets / parts, num_buckets)))
    return np.asarray(quantiles * max_batch_length / quantiles[-1], dtype=np.float64)


def speechbrain_table(
    histogram: Histogram,
    max_batch_length: float,
    *,
    num_buckets: int | None = None,
    bucket_boundaries: npt.ArrayLike | None = None,
    max_batch_ex: int | None = None,
) -> BucketTable:
    """Return the buckets that SpeechBrain's DynamicBatchSampler sorts these lengths into, by its own arguments.

    `bucket_boundaries`, positive, go before `num_buckets`; ValueError without either. Its one bucket more, of batch
    size 1, for examples beyond the last boundary, is in the table only if there are any, up to the longest length.
    """
    if bucket_boundaries is not None:
        boundaries = np.asarray(bucket_boundaries, dtype=np.float64)
    elif num_buckets is not None:
        boundaries = speechbrain_boundaries(num_buckets, max_batch_length)
    else:
        raise ValueError("either num_buckets or bucket_boundaries is needed")
    sizes = batch_sizes_for(boundaries, max_batch_length, max_batch_ex)
    return BucketTable(boundaries, sizes).extended_to(float(histogram.lengths[-1]))


def lhotse_boundaries(lengths: npt.ArrayLike, num_buckets: int) -> FloatArray:
    """Return the inner boundaries that Lhotse estimates, to the bit: buckets of about the same total length.

    There are at most num_buckets - 1, ascending. It goes through the sorted lengths and begins a bucket as soon as the
    one before holds more than total / num_buckets. So a boundary is the shortest length of the bucket that begins
    there; but its sampler puts a length on a boundary into the bucket below (`bisect_left`). As every bucket overshoots
    its share, there can silently be fewer buckets than asked for; boundaries can be repeated, which leaves buckets
    empty. Only the length counts, whatever the constraint's `quadratic_duration`. DynamicBucketingSampler shows it the
    first 10,000 cuts (`num_cuts_for_bins_estimate`), not all.

    Source: `lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`, Lhotse 1.33.

    Raises ValueError if `num_buckets` is below 2 or above the number of examples, where Lhotse fails an assertion, or
    if a length is negative or NaN.
    """
    values = np.array(lengths, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {values.shape}")
    if not (values >= 0).all():
        raise ValueError("lengths must not be negative or NaN")
    if not 2 <= num_buckets <= values.size:
        raise ValueError(f"num_buckets must be from 2 to the number of lengths, {values.size}, got {num_buckets}")
    values.sort()
    share = values.sum() / num_buckets
    boundaries = []
    start = 0
    while (start := _overshoot(values, start, share, values.size // num_buckets)) < values.size:
        boundaries.append(values[start])
    return np.array(boundaries, dtype=np.float64)


def _overshoot(values: FloatArray, start: int, share: float, window: int) -> int:
    """Return the end of the shortest run from `start` that sums to more than `share`, or of all values."""
    while True:
        # Summed one after another, as Lhotse does, to round alike.
        totals = np.cumsum(values[start : start + window])
        end = start + int(np.searchsorted(totals, share, side="right"))
        if end < start + totals.size:
            return end + 1
        if start + window >= values.size:
            return int(values.size)
        window *= 2
