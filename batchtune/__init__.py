"""batchtune: finds the largest batches that fit your GPU, and the buckets that waste least."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from batchtune.sampler import BucketBatchSampler, BucketedStream, PooledBatchSampler, sampler_from_config
    from batchtune.shapes import BatchShape
    from batchtune.workloads import Workload

__all__ = [
    "BatchShape",
    "BucketBatchSampler",
    "BucketedStream",
    "PooledBatchSampler",
    "Workload",
    "__version__",
    "sampler_from_config",
]

_HOMES = {
    "BatchShape": "batchtune.shapes",
    "BucketBatchSampler": "batchtune.sampler",
    "BucketedStream": "batchtune.sampler",
    "PooledBatchSampler": "batchtune.sampler",
    "Workload": "batchtune.workloads",
    "sampler_from_config": "batchtune.sampler",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import batchtune` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'batchtune' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
