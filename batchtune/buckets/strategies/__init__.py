"""The ways to choose boundaries.

To add one: a module with a subclass of `Strategy`, and a line in `STRATEGIES`.
"""

from __future__ import annotations

from batchtune.buckets.strategies.base import Problem, ProblemCosts, Strategy
from batchtune.buckets.strategies.optimal import Optimal
from batchtune.buckets.strategies.pooled import Pooled
from batchtune.buckets.strategies.spaced import Exponential, Linear, Quantile
from batchtune.buckets.strategies.speechbrain import SpeechBrain

__all__ = ["STRATEGIES", "Problem", "ProblemCosts", "Strategy"]

STRATEGIES: dict[str, Strategy] = {
    "speechbrain": SpeechBrain(),
    "quantile": Quantile(),
    "linear": Linear(),
    "exponential": Exponential(),
    "optimal": Optimal(),
    "pooled": Pooled(),
}
