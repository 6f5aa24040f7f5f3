"""Compares the gradient of one optimizer step between cuts of its examples into micro-batches.

The script's own loop is fed the micro-batches of a step. Gradients are read as the optimizers get them, clipped if the
script clips them, and then dropped: an optimizer leaves a parameter without a gradient as it is.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from batchtune.epochs.batchers import Cutter, StepCutter
from batchtune.epochs.table import BucketTable
from batchtune.packing import Budget, StepPacker
from batchtune.probe.ranks import RankPlace
from batchtune.results import StepGradient
from batchtune.results.shared import SAME_GRADIENT
from batchtune.scripts.drawing import Drawn
from batchtune.scripts.feeding import Loop
from batchtune.workloads import live_objects, own_part

# Of larger models, so many entries of the gradient that are evenly spaced.
_MOST_ENTRIES = 10_000_000
# A micro-batch that was not run before has at most so many times the examples of the script's own.
_MOST_TIMES = 4
# No other cut is tried after this.
_SECONDS = 60.0

Gradient = dict[int, Any]
"""Parameter, by its id → entries of its gradient: a tensor on the CPU."""
MicroBatches = Sequence[Sequence[int]]


class Step:
    """The examples of one optimizer step of all ranks, drawn at random; each is read once."""

    def __init__(
        self, drawn: Drawn, batch_size: int, accumulation: int, place: RankPlace
    ) -> None:
        self._drawn = drawn
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._rank = place.rank
        self._ranks = place.world_size
        count = batch_size * accumulation * self._ranks
        self._positions, self._lengths = drawn.random(count)
        self._examples: dict[int, Any] = {}
        self.packs = drawn.packed

    @property
    def first(self) -> Sequence[int]:
        """The first of all micro-batches in the script's own cut, the same on every rank."""
        return range(self._batch_size)

    def own(self) -> MicroBatches:
        """Return this rank's micro-batches in the script's own cut: as they were drawn."""
        batches = np.arange(self._lengths.size).reshape(-1, self._batch_size)
        first = self._rank * self._accumulation
        own: MicroBatches = batches[first : first + self._accumulation].tolist()
        return own

    def recut(self, *, equal_counts: bool) -> MicroBatches:
        """Return this rank's micro-batches in the cut of the least padding, or packed anew.

        Padded, none of them is larger than the script's own that has the longest example. Packed, they are as even as
        can be, and so hold few more tokens than the largest of its own.
        """
        if self.packs:
            tokens = np.ceil(self._lengths).astype(np.int64)
            cutter: Cutter = StepPacker(
                tokens,
                Budget(max_tokens=int(tokens.sum())),
                world_size=self._ranks,
            )
            return self._of_this_rank(cutter)
        boundaries = np.unique(self._lengths)
        largest = self._batch_size * boundaries[-1]
        fits = np.floor(largest / boundaries * (1 + 1e-9)).astype(np.int64)
        table = BucketTable(boundaries, fits.clip(max=_MOST_TIMES * self._batch_size))
        cutter = StepCutter(self._lengths, table, equal_counts, world_size=self._ranks)
        return self._of_this_rank(cutter)

    def _of_this_rank(self, cutter: Cutter) -> MicroBatches:
        batches, _ = cutter.cut(np.arange(self._lengths.size), self._accumulation)
        return [batch.tolist() for batch in batches[self._rank :: self._ranks]]

    def collated(self, batches: MicroBatches) -> list[Any]:
        """Return micro-batches as the script's collate function makes them."""
        made = []
        for batch in batches:
            for index in batch:
                if index not in self._examples:
                    self._examples[index] = self._drawn.example(self._positions[index])
            made.append(self._drawn.collated([self._examples[i] for i in batch]))
        return made


class Gradients:
    """What optimizers get, taken away from them: none of them changes a parameter."""

    def __init__(self) -> None:
        """Begin to take it; in the script's thread."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.taken: Gradient = {}
        self._hook = register_optimizer_step_pre_hook(self._on_step)

    def remove(self) -> None:
        """Leave the gradients to the optimizers again."""
        self._hook.remove()

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Take the gradient, or do so once a closure, as Lightning gives one, has computed it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._take(optimizer)
            return None

        def computed() -> Any:
            loss = closure()
            self._take(optimizer)
            return loss

        return (args[0], computed), {}

    def _take(self, optimizer: Any) -> None:
        import torch

        groups = optimizer.param_groups
        parameters = [each for group in groups for each in group["params"]]
        entries = sum(own_part(parameter).numel() for parameter in parameters)
        # An odd one meets all columns of a matrix.
        stride = max(1, math.ceil(entries / _MOST_ENTRIES)) | 1
        for parameter in parameters:
            if parameter.grad is None:
                continue
            values = own_part(parameter.grad)
            if values.layout != torch.strided:
                values = values.to_dense()
            kept = values.reshape(-1)[::stride]
            self.taken[id(parameter)] = kept.to("cpu", torch.float32, copy=True)
            parameter.grad = None


def step_gradient(
    loop: Loop, step: Step, accumulation: int, stale: int, place: RankPlace
) -> StepGradient:
    """Return how the gradient of a step differs between cuts; on several ranks all of them call this.

    `stale` is how many batches the loop holds when it gets one more. Dropout is off meanwhile.
    """
    started = time.monotonic()
    batch_norm = loop.call(batch_norms)
    restore = loop.call(without_dropout)
    gradients = loop.call(Gradients)

    def gradient(batches: MicroBatches) -> Gradient:
        collated = itertools.cycle(loop.call(lambda: step.collated(batches)))
        # As many in a row as a step has are all of its micro-batches, wherever the step begins.
        for _ in range(1 + math.ceil(stale / accumulation)):
            gradients.taken = {}
            loop.train(lambda: copy.copy(next(collated)), accumulation)
        return gradients.taken

    def differs(share: float) -> bool:
        return place.agree(not share <= SAME_GRADIENT)

    def compared() -> StepGradient:
        own = step.own()
        reference = gradient(own)
        turned = [batch[::-1] for batch in own[::-1]]
        found = StepGradient(
            again=difference(reference, gradient(turned)), batch_norm=batch_norm
        )
        if place.agree(not math.isfinite(found.again or 0.0)):
            return StepGradient(
                unknown="it is zero, or not finite", batch_norm=batch_norm
            )
        if place.agree(time.monotonic() - started > _SECONDS):
            return replace(found, unknown=f"two steps took more than {_SECONDS:g} s")
        any_counts = gradient(step.recut(equal_counts=False))
        found = replace(found, any_counts=difference(reference, any_counts))
        if step.packs or not differs(found.any_counts or 0.0):
            return found
        equal_counts = gradient(step.recut(equal_counts=True))
        found = replace(found, equal_counts=difference(reference, equal_counts))
        whole = step.first
        if not differs(found.equal_counts or 0.0) or len(whole) < 2:
            return found
        half = len(whole) // 2
        parts = [
            gradient([part] * accumulation) for part in (whole[:half], whole[half:])
        ]
        return replace(found, mates=beyond(gradient([whole] * accumulation), parts))

    found = compared()
    loop.call(gradients.remove)
    loop.call(restore)
    return found


def difference(gradient: Gradient, other: Gradient) -> float:
    """Return the norm of the difference of two gradients, relative to the first one's norm; what is missing is 0."""
    squared = _product(gradient, gradient)
    if not squared:
        return math.nan
    change = squared - 2 * _product(gradient, other) + _product(other, other)
    return math.sqrt(max(0.0, change) / squared)


def beyond(gradient: Gradient, parts: Iterable[Gradient]) -> float:
    """Return the norm of the part of a gradient that no weighted sum of others gives, relative to its whole norm."""
    squared = _product(gradient, gradient)
    if not squared:
        return math.nan
    rest = gradient
    directions: list[Gradient] = []
    for part in parts:
        for direction in directions:
            part = _without(part, direction)
        if _product(part, part) > 0:
            directions.append(part)
            rest = _without(rest, part)
    return math.sqrt(_product(rest, rest) / squared)


def _without(gradient: Gradient, direction: Gradient) -> Gradient:
    """Return a gradient less its part in a direction."""
    share = _product(gradient, direction) / _product(direction, direction)
    return {
        parameter: gradient.get(parameter, 0.0) - share * direction.get(parameter, 0.0)
        for parameter in gradient.keys() | direction.keys()
    }


def _product(gradient: Gradient, other: Gradient) -> float:
    return sum(
        float((gradient[parameter].double() * other[parameter].double()).sum())
        for parameter in gradient.keys() & other.keys()
    )


def _training_modules() -> list[Any]:
    """Return all live modules in training mode."""
    import torch

    live = live_objects(torch.nn.Module)
    return [module for module in live if getattr(module, "training", False)]


def batch_norms() -> list[str]:
    """Return the kinds of modules that normalise over a micro-batch, and how many there are: `3 × BatchNorm1d`."""
    from torch.nn.modules.batchnorm import _BatchNorm

    kinds = Counter(
        type(module).__name__
        for module in _training_modules()
        if isinstance(module, _BatchNorm)
    )
    return [f"{count} × {kind}" for kind, count in sorted(kinds.items())]


def without_dropout() -> Callable[[], None]:
    """Turn dropout off in all modules, by every number of theirs that is named for it; return what turns it on again.

    What drops at random otherwise (a mask of the features, a layer left out by its index) stays.
    """
    from torch.nn.modules.dropout import _DropoutNd

    before = []
    for module in _training_modules():
        for name, value in vars(module).items():
            is_rate = name == "p" and isinstance(module, _DropoutNd)
            if isinstance(value, float) and (is_rate or "drop" in name):
                before.append((module, name, value))
    for module, name, _ in before:
        setattr(module, name, 0.0)

    def restore() -> None:
        for module, name, value in before:
            setattr(module, name, value)

    return restore
