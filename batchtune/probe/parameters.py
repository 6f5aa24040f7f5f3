"""The parameters that a workload trains: found by their optimizers, wherever these are."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
        if parameter.requires_grad and not is_lazy(parameter) and _is_held(parameter)
    ]


def training_gpu() -> int | None:
    """Return which GPU holds most of what is trained, torch's current one if none does; None before CUDA is used."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    trained: Counter[int] = Counter()
    for parameter in trained_parameters():
        if parameter.device.type == "cuda":
            trained[parameter.device.index] += parameter.numel()
    if not trained:
        return torch.cuda.current_device()
    return max(trained, key=trained.__getitem__)


def _is_held(parameter: torch.Tensor) -> bool:
    """Return whether its values are in memory: FSDP frees those of whole parameters between steps."""
    values = own_part(parameter)
    return values.numel() == 0 or values.untyped_storage().size() > 0


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, of a sharded one those of this rank: all of them would take a collective."""
    values = parameter.detach()
    if hasattr(values, "to_local"):
        own: torch.Tensor = values.to_local()
        return own
    return values


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


def drop_gradients() -> None:
    """Free the gradients that the last step left, as the next one will; a view is kept, whose memory is a buffer's.

    Until then an allocator can't free what they are part of: the next shape would run beside the last one's blocks.
    """
    for parameter in trained_parameters():
        if parameter.grad is not None and not parameter.grad._is_view():
            parameter.grad = None


class TrainingCheck:
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
        import torch

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
            # There may be no memory left, or a tensor of a kind that has no sum.
            with contextlib.suppress(Exception):
                if _is_held(parameter):
                    sums.append(float(own_part(parameter).sum(dtype=torch.float64)))
        # Without any, all were made in a step.
        if not sums or len(sums) < len(self._before):
            return None
        if self._sums is None:
            self._sums = sums
            return None
        self._has_changed = sums != self._sums
        return self._has_changed
