"""batchtune: finds the largest batches that fit your GPU, and the buckets that waste the least."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from batchtune.api import probe, read_run, sweep, tune
    from batchtune.errors import BatchtuneError
    from batchtune.packing import TimeLaw, pack
    from batchtune.results import BatchShape
    from batchtune.sampler.base import BucketBatchSampler, PooledBatchSampler
    from batchtune.sampler.micro_batches import (
        PackedBatchSampler,
        SameStepBatchSampler,
        SameStepStream,
        sampler_from_config,
    )
    from batchtune.sampler.stream import BucketedStream
    from batchtune.scripts.recorder import Recorder
    from batchtune.workloads import Workload

__all__ = [
    "BatchShape",
    "BatchtuneError",
    "BucketBatchSampler",
    "BucketedStream",
    "PackedBatchSampler",
    "PooledBatchSampler",
    "Recorder",
    "SameStepBatchSampler",
    "SameStepStream",
    "TimeLaw",
    "Workload",
    "__version__",
    "pack",
    "probe",
    "read_run",
    "sampler_from_config",
    "sweep",
    "tune",
]
_HOMES = {
    "BatchShape": "results",
    "BatchtuneError": "errors",
    "BucketBatchSampler": "sampler.base",
    "BucketedStream": "sampler.stream",
    "PackedBatchSampler": "sampler.micro_batches",
    "PooledBatchSampler": "sampler.base",
    "Recorder": "scripts.recorder",
    "SameStepBatchSampler": "sampler.micro_batches",
    "SameStepStream": "sampler.micro_batches",
    "TimeLaw": "packing",
    "Workload": "workloads",
    "pack": "packing",
    "read_run": "api",
    "sampler_from_config": "sampler.micro_batches",
    "sweep": "api",
    "tune": "api",
}


class CallablePackage(ModuleType):
    """The package `batchtune.probe`, which can be called as the function of that name.

    Whenever one of its modules is imported, by us or by a user, the import system sets
    `batchtune.probe` to the package. So the name always means the package, which passes each call
    on to the function, whatever was imported first.
    """

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Measure what fits: `batchtune.api.probe`, which see."""
        from batchtune.api import probe

        return probe(*args, **settings)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        from batchtune.api import probe

        return signature(probe)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import batchtune` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'batchtune' has no attribute {name!r}")
    from importlib import import_module

    if name == "probe":
        return import_module("batchtune.probe")
    return getattr(import_module(f"batchtune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, which are imported on first use."""
    return __all__
