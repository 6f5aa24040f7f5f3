"""Finds the parameters that a workload trains, and tells whether its steps change them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def trained_parameters() -> list[torch.Tensor]:
    """Return the parameters of all live optimizers, each once; without an optimizer, all live parameters."""
    import torch
    from torch.nn.parameter import is_lazy

    live = gc.get_objects()
    # By type, not isinstance, which asks an object for its __class__: a lazy module would import things to answer.
    optimizers = [thing for thing in live if issubclass(type(thing), torch.optim.Optimizer)]
    if optimizers:
        trained = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                trained += group["params"]
    else:
        trained = [thing for thing in live if issubclass(type(thing), torch.nn.Parameter)]
    each_once = {id(parameter): parameter for parameter in trained}.values()
    return [parameter for parameter in each_once if parameter.requires_grad and not is_lazy(parameter)]


def gradient_bytes() -> int:
    """Return the bytes of the gradients of what the workload trains, which DDP's gradient buckets take too.

    (DDP keeps its buckets in addition to the gradients unless given `gradient_as_bucket_view=True`:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.)
    """
    gc.collect()  # drop what is no longer trained
    return sum(parameter.numel() * parameter.element_size() for parameter in trained_parameters())


class Training:
    """Tells whether any step so far has changed a parameter, without keeping one alive or copying it.

    An operation in place raises a tensor's version, but neither a write to `parameter.data` nor a CUDA graph does. So
    where no version has risen, the sums of the values are compared from then on.
    """

    def __init__(self) -> None:
        """Begin before the first step, once the workload is built."""
        self._before = [(weakref.ref(parameter), parameter._version) for parameter in trained_parameters()]
        self._sums: list[float] | None = None
        self._has_changed = False

    def has_changed(self) -> bool | None:
        """Return whether a parameter has changed by now; None if that is not known, or not known yet."""
        if self._has_changed:
            return True
        now = [(reference(), version) for reference, version in self._before]
        parameters = [parameter for parameter, _ in now if parameter is not None]
        if not parameters or len(parameters) < len(now):  # made in a step, or replaced by others
            return None
        if any(parameter is not None and parameter._version != version for parameter, version in now):
            self._has_changed = True
            return True
        return self._sums_have_changed(parameters)

    def _sums_have_changed(self, parameters: list[torch.Tensor]) -> bool | None:
        import torch

        sums = None
        with contextlib.suppress(Exception):  # no memory is left, or a tensor of a kind that has no sum
            sums = [float(parameter.detach().sum(dtype=torch.float64)) for parameter in parameters]
        if sums is None or self._sums is None:
            self._sums = sums
            return None
        self._has_changed = sums != self._sums
        return self._has_changed
