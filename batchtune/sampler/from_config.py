"""The sampler that a `sampler.yaml` describes, whichever that is."""

from batchtune.sampler import packed, tables  # noqa: F401  # a file may name any of their classes
from batchtune.sampler.base import EpochBatchSampler

sampler_from_config = EpochBatchSampler.from_config
