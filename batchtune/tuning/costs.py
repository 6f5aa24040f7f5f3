"""The measurements of a probe: which batches fit, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from batchtune.cost import Frontier, JointFrontier, StepTimes, scaled
from batchtune.lengths import FloatArray, IntArray
from batchtune.results import Probe
from batchtune.trust import WORST_TIME_ERROR
from batchtune.tuning.targets import StepSeconds

JointSizes: TypeAlias = Callable[[FloatArray, FloatArray], IntArray]
"""(lengths, target lengths) → the largest batch size that fits, element by element, at least 1."""

ProvenBy: TypeAlias = Callable[[float, int], "int | None"]
"""(longest length, batch size) → index of the trial that proves that such a batch fits; None where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The measurements of a probe; all None without one.

    Attributes:
        frontier: Lengths → the largest batch size that fits, at least 1.
        continued_frontier: The same, and beyond the longest length, where batches are padded further.
        step_seconds: (batch sizes, lengths, target lengths) → seconds of one training step, element by element,
            broadcasting; called without target lengths where the data set has none.
        device_name: The device that was measured.
        joint_frontier: (lengths, target lengths) → the largest batch size that fits, at least 1; None where shorter
            targets than the longest were not measured.
        proven: Lengths → the largest batch size that is proven to fit, 0 where none is.
        joint_proven: The same for pairs of lengths and target lengths.
        joint_lengths: The lengths at which pairs were measured.
        proven_by: (longest length, batch size) → index of the trial that proves such a batch; None where none does.
    """

    frontier: Callable[[FloatArray], IntArray] | None = None
    continued_frontier: Callable[[FloatArray], IntArray] | None = None
    step_seconds: StepSeconds | None = None
    device_name: str | None = None
    joint_frontier: JointSizes | None = None
    proven: Callable[[FloatArray], IntArray] | None = None
    joint_proven: JointSizes | None = None
    joint_lengths: FloatArray = field(default_factory=lambda: np.empty(0))
    proven_by: ProvenBy | None = None


def costs_of(probe: Probe) -> Costs:
    """Return what is proven to fit, and the step times, by the model between measured ones.

    Where the model misses even the measurements by far, no times are known. Nothing is proven by a probe of version
    0.1.0, which ran few of its batches in turns and kept no margin.
    """
    model = probe.models.step_seconds
    if model is not None and model.relative_error > WORST_TIME_ERROR:
        model = None
    frontier = Frontier.of(probe.frontier)
    joint = JointFrontier.of([*probe.frontier, *probe.joint_frontier]) if probe.joint_frontier else None
    return Costs(
        frontier=frontier,
        continued_frontier=frontier.continued,
        joint_frontier=joint,
        joint_proven=joint and joint.proven,
        joint_lengths=np.unique(joint.lengths) if joint else np.empty(0),
        proven=frontier.proven if probe.is_proven else lambda lengths: np.zeros(lengths.shape, dtype=np.int64),
        proven_by=_proven_by(probe, frontier),
        step_seconds=None if model is None else _in_turns(StepTimes.of(probe.trials, model), probe),
        device_name=probe.device.name,
    )


def _proven_by(probe: Probe, frontier: Frontier) -> ProvenBy:
    """Return the trial of the first point that is no shorter and no smaller; None beyond what is proven."""

    def proven_by(longest: float, batch_size: int) -> int | None:
        if batch_size > int(frontier.proven(longest)):
            return None
        fitting = (point for point in probe.frontier if point.length >= longest and point.batch_size >= batch_size)
        return next(fitting).trial

    return proven_by


def _in_turns(times: StepTimes, probe: Probe) -> StepTimes:
    """Return the times that steps take one after another with other shapes, as training runs them.

    Corrections are ratios to the model, so scaling it scales every time.
    """
    ratio = probe.confirmation.time_ratio if probe.confirmation else None
    return times if ratio is None else replace(times, model=scaled(times.model, ratio))


def capped(costs: Costs, max_batch_length: float) -> Costs:
    """Return the same costs, but no batch longer than the user wants."""
    frontier, joint, further = costs.frontier, costs.joint_frontier, costs.continued_frontier

    def wanted(lengths: FloatArray) -> IntArray:
        return np.maximum(1, (max_batch_length / lengths).astype(np.int64))

    return replace(
        costs,
        frontier=frontier and (lambda lengths: np.minimum(frontier(lengths), wanted(lengths))),
        continued_frontier=further and (lambda lengths: np.minimum(further(lengths), wanted(lengths))),
        joint_frontier=joint and (lambda lengths, targets: np.minimum(joint(lengths, targets), wanted(lengths))),
    )
