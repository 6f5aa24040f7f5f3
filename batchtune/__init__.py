"""batchtune: finds the largest batches that fit your GPU, and the buckets that waste least."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from batchtune.results import BatchShape
    from batchtune.sampler import (
        BucketBatchSampler,
        BucketedStream,
        PooledBatchSampler,
        sampler_from_config,
    )
    from batchtune.scripts.recorder import Recorder
    from batchtune.workloads import Workload

__all__ = [
    "BatchShape",
    "BucketBatchSampler",
    "BucketedStream",
    "PooledBatchSampler",
    "Recorder",
    "Workload",
    "__version__",
    "sampler_from_config",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import batchtune` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'batchtune' has no attribute {name!r}")
    from importlib import import_module

    homes = {
        "BatchShape": "results",
        "Recorder": "scripts.recorder",
        "Workload": "workloads",
    }
    home = homes.get(name, "sampler")
    return getattr(import_module(f"batchtune.{home}"), name)


def __dir__() -> list[str]:
    """List the public names, which are imported on first use."""
    return __all__
