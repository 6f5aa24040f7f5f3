"""SpeechBrain's DynamicBatchSampler, reproduced."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchtune.epochs.table import BucketTable, batch_sizes_for
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
