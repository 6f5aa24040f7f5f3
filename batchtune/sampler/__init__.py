"""The drop-in torch samplers that run a recommendation, and the stream that makes batches as it is read."""

from batchtune.sampler.batch_samplers import (
    BucketBatchSampler,
    PooledBatchSampler,
    sampler_from_config,
)
from batchtune.sampler.stream import BucketedStream

__all__ = [
    "BucketBatchSampler",
    "BucketedStream",
    "PooledBatchSampler",
    "sampler_from_config",
]
