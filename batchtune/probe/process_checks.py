"""Checks of the worker's process: limits that the workload lowers, what it trains, and what torch.compile did."""

from __future__ import annotations

import contextlib
import gc
import re
import resource
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchtune.units import format_size

if TYPE_CHECKING:
    import torch

# Limits that look like a lack of memory, or end the process.
_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_CPU")
# "Dynamo recompile limit exceeded"; before torch 2.7 "recompile_limit reached" and "cache_size_limit reached".
_RECOMPILE_LIMIT = re.compile(r"(recompile|cache_size)[ _]limit")


def process_limits() -> dict[str, int]:
    """Return the soft limits by name, those that are not set left out."""
    limits = {name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS}
    return {
        name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY
    }


def lowered_limit(before: Mapping[str, int]) -> str | None:
    """Return a message that names a limit lower than `before`; None if there is none.

    The limit is lifted again as far as possible: below it, the worker might lack the memory to answer.
    """
    for name, limit in process_limits().items():
        if limit < before.get(name, limit + 1):
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (hard, hard))
            value = (
                format_size(limit)
                if name in ("RLIMIT_AS", "RLIMIT_DATA")
                else f"{limit:,}"
            )
            return (
                f"the workload lowers the limit {name} of its process to {value}: the probe would measure that instead "
                "of memory. Take resource.setrlimit out of it, and give the limit with --memory"
            )
    return None


def compilations() -> int:
    """Return how many times torch.compile has compiled a function in this process, or tried to."""
    return int(_dynamo_counters().get("frames", {}).get("total", 0))


def at_recompile_limit() -> bool:
    """Return whether some function reached torch's limit of compiled versions: other shapes run it uncompiled."""
    return any(
        _RECOMPILE_LIMIT.search(reason)
        for reason in _dynamo_counters().get("unimplemented", {})
    )


def _dynamo_counters() -> Mapping[str, Mapping[str, Any]]:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "counters", {})


def trained_parameters() -> list[torch.Tensor]:
    """Return the parameters of all live optimizers, each once; without an optimizer, all live parameters."""
    import torch
    from torch.nn.parameter import is_lazy

    live = gc.get_objects()
    # By type, not isinstance, which asks an object for its __class__: a lazy module would import things to answer.
    optimizers = [
        thing for thing in live if issubclass(type(thing), torch.optim.Optimizer)
    ]
    trained = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trained += group["params"]
    if not optimizers:
        trained = [
            thing for thing in live if issubclass(type(thing), torch.nn.Parameter)
        ]
    each_once = {id(parameter): parameter for parameter in trained}.values()
    return [
        parameter
        for parameter in each_once
        if parameter.requires_grad and not is_lazy(parameter)
    ]


def gradient_bytes() -> int:
    """Return the bytes of the gradients of what the workload trains, which DDP's gradient buckets take too.

    (DDP keeps its buckets in addition to the gradients unless given `gradient_as_bucket_view=True`:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.)
    """
    gc.collect()  # drop what is no longer trained
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in trained_parameters()
    )


class Training:
    """Tells whether any step so far has changed a parameter, without keeping one alive or copying it.

    An operation in place raises a tensor's version, but neither a write to `parameter.data` nor a CUDA graph does. So
    where no version has risen, the sums of the values are compared from then on.
    """

    def __init__(self) -> None:
        """Begin before the first step, once the workload is built."""
        self._before = [
            (weakref.ref(parameter), parameter._version)
            for parameter in trained_parameters()
        ]
        self._sums: list[float] | None = None
        self._has_changed = False

    def has_changed(self) -> bool | None:
        """Return whether a parameter has changed by now; None if that is not known, or not known yet."""
        if self._has_changed:
            return True
        sums = []
        for reference, version in self._before:
            parameter = reference()
            if parameter is None:  # replaced by another
                return None
            if parameter._version != version:
                self._has_changed = True
                return True
            with contextlib.suppress(
                Exception
            ):  # no memory is left, or a tensor of a kind that has no sum
                sums.append(_sum(parameter))
        if not sums or len(sums) < len(
            self._before
        ):  # made in a step, or without a sum
            return None
        if self._sums is None:
            self._sums = sums
            return None
        self._has_changed = sums != self._sums
        return self._has_changed


def _sum(parameter: torch.Tensor) -> float:
    import torch

    return float(parameter.detach().sum(dtype=torch.float64))
