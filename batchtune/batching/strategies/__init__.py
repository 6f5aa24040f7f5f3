"""The ways to choose boundaries, one module each.

To add one: a module with a function of the type `Strategy`, and a line in `STRATEGIES`.
"""

from __future__ import annotations

from batchtune.batching.strategies.base import Problem, ProblemCosts, Strategy
from batchtune.batching.strategies.exponential import exponential
from batchtune.batching.strategies.linear import linear
from batchtune.batching.strategies.optimal import optimal
from batchtune.batching.strategies.quantile import quantile
from batchtune.batching.strategies.speechbrain import speechbrain

__all__ = ["STRATEGIES", "Problem", "ProblemCosts", "Strategy"]

STRATEGIES: dict[str, Strategy] = {
    "speechbrain": speechbrain,
    "quantile": quantile,
    "linear": linear,
    "exponential": exponential,
    "optimal": optimal,
}
