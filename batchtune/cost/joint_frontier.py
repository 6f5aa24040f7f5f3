"""The largest batch size that fits, by length and target length, from the memory model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.cost.frontier import Frontier
from batchtune.cost.models import per_example
from batchtune.lengths import IntArray
from batchtune.results import CostModel


@dataclass(frozen=True, slots=True, eq=False)
class JointFrontier:
    """How many examples fit whose longest length and whose longest target are given.

    The frontier was measured with the worst target of each length: what fits there fits with shorter targets too.
    How many more do, the memory model says: as many as leave its own error, doubled, free of the limit.

    Attributes:
        frontier: As measured, with the worst targets.
        model: Of the peak memory; it depends on the target length.
        limit_bytes: The limit that was measured under.
    """

    frontier: Frontier
    model: CostModel
    limit_bytes: int

    def __call__(self, lengths: npt.ArrayLike, targets: npt.ArrayLike) -> IntArray:
        """The largest batch size.

        Args:
            lengths: Any shape; broadcast against the targets.
            targets: Target lengths, none above the worst that occurs at or below the length.

        Returns:
            Batch sizes of the broadcast shape, at least 1.
        """
        long, target = np.broadcast_arrays(np.asarray(lengths, dtype=np.float64), np.asarray(targets, dtype=np.float64))
        measured = self.frontier(long)
        room = self.limit_bytes * (1 - 2 * self.model.relative_error) - self.model.constant
        need = per_example(self.model, long, target)
        with np.errstate(divide="ignore"):
            modelled = np.where(need > 0, room / need, np.inf)
        # Beyond the longest measured length nothing is known.
        known = long <= self.frontier.lengths[-1]
        sizes = np.where(known, np.clip(modelled, measured, 2.0**53), measured)
        return sizes.astype(np.int64)
