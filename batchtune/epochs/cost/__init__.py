"""The cost of a batch shape: models of peak memory and step time, the frontier."""

from batchtune.epochs.cost.fitting import fit_cost, needs_targets, predict, scaled
from batchtune.epochs.cost.frontier import Frontier, JointFrontier, largest_max_batch_length
from batchtune.epochs.cost.step_times import StepTimes, fit_step_seconds

__all__ = [
    "Frontier",
    "JointFrontier",
    "StepTimes",
    "fit_cost",
    "fit_step_seconds",
    "largest_max_batch_length",
    "needs_targets",
    "predict",
    "scaled",
]
