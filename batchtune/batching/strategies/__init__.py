"""The ways to choose boundaries.

To add one: a module with a subclass of `Strategy`, and a line in `STRATEGIES`.
"""

from __future__ import annotations

from batchtune.batching.strategies.base import Problem, ProblemCosts, Strategy
from batchtune.batching.strategies.optimal import Optimal
from batchtune.batching.strategies.pooled import Pooled
from batchtune.batching.strategies.spaced import Exponential, Linear, Quantile
from batchtune.batching.strategies.speechbrain import SpeechBrain

__all__ = ["STRATEGIES", "Problem", "ProblemCosts", "Strategy"]

STRATEGIES: dict[str, Strategy] = {
    "speechbrain": SpeechBrain(),
    "quantile": Quantile(),
    "linear": Linear(),
    "exponential": Exponential(),
    "optimal": Optimal(),
    "pooled": Pooled(),
}
