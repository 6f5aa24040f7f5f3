"""What surrounds a training step: settings that decide memory and time, and what its training needs besides.

Runs in the worker process, after the workload's setup.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Environment variables that change what a step takes of memory or time. Recorded where they are set.
ENVIRONMENT = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def gradient_bytes() -> int:
    """One copy of the gradients of what the workload trains, in bytes: what DDP's gradient buckets take.

    Counted are the parameters of all live optimizers that require a gradient, each once; where there is no
    optimizer, all live parameters. A gradient has its parameter's size and type. (DistributedDataParallel keeps its
    buckets besides the gradients, of their full size, unless it is given `gradient_as_bucket_view=True`:
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


def describe_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of `ENVIRONMENT` that are set."""
    return {name: environment[name] for name in ENVIRONMENT if environment.get(name)}


def describe_settings(kind: str | None = None) -> dict[str, Any]:
    """What else decides memory and time, for `Device.settings`; to be taken after the workload's setup.

    Args:
        kind: `cpu` or `cuda`; told from what torch has in use unless given.

    Returns:
        Name → value: the environment's variables that are set, and torch's own switches. A switch that torch can't
        tell (its older and its newer form were both used) is None.
    """
    import torch

    kind = kind or ("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]  # torch's
    settings: dict[str, Any] = {
        **describe_environment(),
        "float32_matmul_precision": _float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if kind == "cpu":
        settings["threads"] = torch.get_num_threads()
        return settings
    settings.update(_fp32_precisions())
    settings["cudnn_benchmark"] = torch.backends.cudnn.benchmark
    settings["cudnn_deterministic"] = torch.backends.cudnn.deterministic
    return settings


def _float32_matmul_precision() -> str | None:
    """`highest`, `high` or `medium`. From torch 2.9 on this raises where the newer switches were used besides."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _fp32_precisions() -> dict[str, str]:
    """Whether float32 is computed in TF32 (`tf32`) or in full (`ieee`), for matmul and for cuDNN.

    Torch 2.9 has new switches, and warns or raises where the old ones are read after the new ones were set; the new
    ones can be read in either case. `none` there means that nobody has asked for less than full precision.
    """
    import torch

    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(cudnn, "conv") and hasattr(cudnn, "rnn"):
        found = {
            "matmul_precision": matmul.fp32_precision,
            "cudnn_conv_precision": cudnn.conv.fp32_precision,
            "cudnn_rnn_precision": cudnn.rnn.fp32_precision,
        }
    else:
        cudnn_precision = "tf32" if cudnn.allow_tf32 else "ieee"
        found = {
            "matmul_precision": "tf32" if matmul.allow_tf32 else "ieee",
            "cudnn_conv_precision": cudnn_precision,
            "cudnn_rnn_precision": cudnn_precision,
        }
    return {name: "ieee" if value == "none" else value for name, value in found.items()}
