"""What surrounds a training step: settings that decide memory and time, and what its training needs besides.

Runs in the worker process, after the workload's setup; `batchtune doctor` asks for the environment.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from batchtune.probe.devices import backends

if TYPE_CHECKING:
    import torch

# Of PyTorch's allocators on every device. Recorded where they are set, as those of each kind of device are.
_VARIABLES = ("PYTORCH_ALLOC_CONF",)


def describe_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change a step's memory or time, those that are set."""
    names = [*_VARIABLES, *(name for backend in backends() for name in backend.VARIABLES)]
    return {name: environment[name] for name in names if environment.get(name)}


def describe_settings(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else decides memory and time, for `Device.settings`, as it is after the workload's setup.

    Environment variables and torch's own switches, those of the device among them. A switch that torch can't tell
    (its older and its newer form were both used) is None.
    """
    import torch

    return {
        **describe_environment(),
        "float32_matmul_precision": _float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        **switches,
    }


def _float32_matmul_precision() -> str | None:
    """`highest`, `high` or `medium`. From torch 2.9 on this raises where the newer switches were used besides."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def gradient_bytes() -> int:
    """Return one copy of the gradients of what the workload trains, in bytes: what DDP's gradient buckets take.

    Counted are the parameters of all live optimizers that require a gradient, each once; where there is no
    optimizer, all live parameters. (DistributedDataParallel keeps its buckets besides the gradients, of their full
    size, unless it is given `gradient_as_bucket_view=True`:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.)
    """
    import torch

    gc.collect()  # what is only waiting to be collected is not trained
    live = gc.get_objects()
    # By type, not isinstance: that asks an object for its __class__, which a lazy module answers by importing things.
    optimizers = [thing for thing in live if issubclass(type(thing), torch.optim.Optimizer)]
    if optimizers:
        trained = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    else:
        trained = (thing for thing in live if issubclass(type(thing), torch.nn.Parameter))
    return _total_bytes(trained)


def _total_bytes(parameters: Iterable[torch.Tensor]) -> int:
    from torch.nn.parameter import is_lazy

    each_once = {id(parameter): parameter for parameter in parameters}.values()
    return sum(p.numel() * p.element_size() for p in each_once if p.requires_grad and not is_lazy(p))
