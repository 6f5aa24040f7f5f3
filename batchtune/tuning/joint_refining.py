"""Where another measured pair of length and target is worth most, for tables over both lengths.

As `refining`, but the targets count too. First a few pairs with shorter targets are measured, so that the memory model
knows what targets cost; then the buckets of the table that would be best by what is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.batching.table import BucketTable
from batchtune.batching.two_dimensional import optimal_table_2d
from batchtune.cost import fit_step_seconds, predict
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.probe.findings import Findings
from batchtune.probe.outcomes import Anchor

# Examples that stand for all, evenly taken in order of length, and boundaries in each dimension to choose from.
_EXAMPLES = 4096
_RESOLUTION = 12
# A table may cost so much more than with all sizes known.
_AT_STAKE = 0.005
# Where targets are the same multiple of the length to within this, they say nothing that lengths do not say.
_PROPORTIONAL = 0.05
# Parts of the examples, in order of length, up to which a pair with the typical target is measured first.
_SPANNING = (1.0, 0.75, 0.25)
_TYPICAL_OF = 0.1

Sizes = Callable[[FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True, eq=False)
class JointRefinement:
    """Says which pair to measure next.

    Attributes:
        lengths, targets: Shape (examples,): of examples that stand for all, in ascending order of length.
        spanning: Pairs that are measured first.
    """

    lengths: FloatArray
    targets: FloatArray
    spanning: tuple[Anchor, ...]

    @classmethod
    def of(cls, data: Lengths, targets: FloatArray) -> JointRefinement | None:
        """Of a data set; None where its targets follow from its lengths."""
        ratio = targets / data.values
        if np.ptp(ratio) <= _PROPORTIONAL * ratio.max():
            return None
        taken = min(data.count, _EXAMPLES)
        # The longest is among them.
        chosen = (np.arange(taken) * data.count // taken)[::-1]
        lengths, longest = data.values[chosen], targets[chosen]
        spanning = []
        for part in _SPANNING:
            end = max(1, int(part * taken))
            near = longest[max(0, end - max(1, int(_TYPICAL_OF * taken))) : end]
            spanning.append(Anchor(float(lengths[end - 1]), float(np.quantile(near, 0.5, method="nearest"))))
        return cls(lengths, longest, tuple(dict.fromkeys(spanning)))

    def worst_pair(self, findings: Findings, num_buckets: Sequence[int]) -> Anchor | None:
        """Return the pair whose size decides most, in the table that loses most; None where none loses much."""
        tried = set(findings.anchors)
        for anchor in self.spanning:
            if anchor not in tried and anchor != findings.anchor(anchor.length) and self._is_open(findings, anchor):
                return anchor
        model = fit_step_seconds(findings.trials)

        def example_costs(sizes_of: Sizes) -> Sizes:
            def costs(lengths: FloatArray, targets: FloatArray) -> FloatArray:
                sizes = sizes_of(lengths, targets)
                seconds = np.ones(sizes.shape) if model is None else predict(model, sizes, lengths, targets)
                return np.maximum(seconds, 1e-12) / sizes

            return costs

        now = example_costs(_flat(lambda long, target: np.maximum(findings.proven_sizes(long, target), 1.0)))
        best = example_costs(_flat(lambda long, target: np.maximum(findings.possible_sizes(long, target), 1.0)))
        most = max(num_buckets)
        (ours,), (theirs,) = (self._tables(costs, most, findings) for costs in (now, best))
        if self._cost(ours, now) <= (1 + _AT_STAKE) * self._cost(theirs, best):
            return None
        ends, tops = theirs.pairs
        gain = self._counts(theirs) * (now(ends, tops) - best(ends, tops))
        for bucket in np.argsort(-gain, kind="stable"):
            anchor = Anchor(float(ends[bucket]), float(tops[bucket]))
            if gain[bucket] > 0 and self._is_open(findings, anchor):
                return anchor
        return None

    def _is_open(self, findings: Findings, anchor: Anchor) -> bool:
        return findings.closed_by(findings.bracket(anchor)) is None

    def _tables(self, costs: Sizes, most: int, findings: Findings) -> list[BucketTable]:
        measured = np.array([anchor.length for anchor in findings.anchors])
        return optimal_table_2d(
            self.lengths,
            self.targets,
            costs,
            [most],
            candidates=measured[:: max(1, measured.size // _RESOLUTION)],
            resolution=_RESOLUTION,
        )

    def _counts(self, table: BucketTable) -> IntArray:
        return np.bincount(table.assign(self.lengths, self.targets), minlength=table.num_buckets)

    def _cost(self, table: BucketTable, costs: Sizes) -> float:
        return float(np.sum(self._counts(table) * costs(*table.pairs)))


def _flat(sizes_of: Sizes) -> Sizes:
    """Return the same for arrays of any shape."""

    def sizes(lengths: FloatArray, targets: FloatArray) -> FloatArray:
        long, target = np.broadcast_arrays(lengths, targets)
        found: FloatArray = np.asarray(sizes_of(long.ravel(), target.ravel()), dtype=np.float64).reshape(long.shape)
        return found

    return sizes
