"""Reads a probe's costs: which batches fit, and how long a step takes.

The memory must hold the worst target of all examples. A batch that happens has the longest of its own few: how long
that is on average decides how long its step takes by its longest length alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.batching.expectation import BatchCost
from batchtune.batching.table import BucketTable
from batchtune.cost import Frontier, JointFrontier, StepTimes, scaled
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Probe
from batchtune.trust import WORST_TIME_ERROR

# Examples, evenly taken in order of length, that say what is typical; more would only be slower.
_SAMPLE = 1 << 17
# Distinct targets to tell apart.
_LEVELS = 4096
# Without a known bucket, a batch is taken to be of one of this many, with as many examples each.
_BUCKETS = 16
# Look up the times of at most this many batches.
_EACH = 512
# The mean of the longest of several is taken over these parts of its distribution, each by its middle: smaller ones
# towards the end, where targets that differ much (log-normally, say) have much of their mean.
_PARTS = (0.0, 0.4, 0.75, 0.9, 0.97, 0.993, 1.0)

Sizes: TypeAlias = Callable[[FloatArray], IntArray]
JointSizes: TypeAlias = Callable[[FloatArray, FloatArray], IntArray]
ProvenBy: TypeAlias = Callable[[float, int], "int | None"]
StepSeconds: TypeAlias = Callable[..., FloatArray]
"""Batch sizes, longest lengths and (if any) longest target lengths → seconds of one training step, by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The measurements of a probe; all None without one.

    Attributes:
        frontier: Lengths → the largest batch size that fits, at least 1.
        continued_frontier: The same, also beyond the longest length, where batches are padded further.
        joint_frontier: (lengths, target lengths) → the same; None if only the longest targets were measured.
        proven: Lengths → the largest batch size that is proven to fit, 0 without a proof; `joint_proven` likewise.
        joint_lengths: The lengths at which pairs were measured.
        proven_by: (longest length, batch size) → index of the trial that proves such a batch, or None.
    """

    frontier: Sizes | None = None
    continued_frontier: Sizes | None = None
    step_seconds: StepSeconds | None = None
    device_name: str | None = None
    joint_frontier: JointSizes | None = None
    proven: Sizes | None = None
    joint_proven: JointSizes | None = None
    joint_lengths: FloatArray = field(default_factory=lambda: np.empty(0))
    proven_by: ProvenBy | None = None


def costs_of(probe: Probe) -> Costs:
    """Return what is proven to fit, and the step times, by the model between measured ones.

    No times are known if the model misses even the measurements by far. Nothing is proven by a probe that was
    interrupted before its batches ran in turns.
    """
    model, times = probe.models.step_seconds, None
    if model is not None and model.relative_error <= WORST_TIME_ERROR:
        times = StepTimes.of(probe.trials, model)
        # Steps in turns with other shapes, as in training. Corrections are ratios to the model: this scales all times.
        if probe.confirmation is not None and probe.confirmation.time_ratio is not None:
            times = replace(times, model=scaled(times.model, probe.confirmation.time_ratio))
    frontier = Frontier.of(probe.frontier)
    joint = JointFrontier.of([*probe.frontier, *probe.joint_frontier]) if probe.joint_frontier else None

    def proven_by(longest: float, batch_size: int) -> int | None:
        if batch_size > int(frontier.proven(longest)):
            return None
        fitting = (point for point in probe.frontier if point.length >= longest and point.batch_size >= batch_size)
        return next(fitting).trial

    return Costs(
        frontier=frontier,
        continued_frontier=frontier.continued,
        joint_frontier=joint,
        joint_proven=joint and joint.proven,
        joint_lengths=np.unique(joint.lengths) if joint else np.empty(0),
        proven=frontier.proven if probe.is_proven else lambda lengths: np.zeros(lengths.shape, dtype=np.int64),
        proven_by=proven_by,
        step_seconds=times,
        device_name=probe.device.name,
    )


def capped(costs: Costs, max_batch_length: float) -> Costs:
    """Return the same costs, but no batch longer than the user wants."""

    def cap(sizes: Callable[..., IntArray] | None) -> Callable[..., IntArray] | None:
        def capped_sizes(lengths: FloatArray, *targets: FloatArray) -> IntArray:
            assert sizes is not None
            return np.minimum(sizes(lengths, *targets), np.maximum(1, (max_batch_length / lengths).astype(np.int64)))

        return sizes and capped_sizes

    return replace(
        costs,
        frontier=cap(costs.frontier),
        continued_frontier=cap(costs.continued_frontier),
        joint_frontier=cap(costs.joint_frontier),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TypicalTargets:
    """The longest target that a batch has on average, by its size and its longest length.

    `lengths`, shape (n,), ascending, are of examples that stand for all; `targets` are those of any run of them.
    """

    lengths: FloatArray
    targets: RangeQuantiles

    @classmethod
    def of(cls, lengths: Lengths) -> TypicalTargets | None:
        """Return those of a data set; None without targets."""
        if lengths.targets is None:
            return None
        # The middles of as many equal parts, in ascending order.
        taken = min(lengths.count, _SAMPLE)
        chosen = lengths.count - 1 - ((2 * np.arange(taken) + 1) * lengths.count) // (2 * taken)
        return cls(lengths.values[chosen], RangeQuantiles.of(lengths.targets[chosen]))

    def __call__(
        self, batch_sizes: npt.ArrayLike, lengths: npt.ArrayLike, above: npt.ArrayLike | None = None
    ) -> FloatArray:
        """Return the mean of the longest target over batches drawn from the examples up to a length.

        With F the distribution of the targets there, the longest of B has F^B (but for examples that can't be drawn
        twice). All examples are longer than `above`, the boundary of the bucket before; without it the sixteenth of the
        data that is nearest in length is taken. Arguments are broadcast against each other.
        """
        size, length = np.broadcast_arrays(
            np.asarray(batch_sizes, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
        )
        end = np.maximum(np.searchsorted(self.lengths, length, side="right"), 1)
        if above is None:
            start = end - max(1, self.lengths.size // _BUCKETS)
        else:
            start = np.searchsorted(self.lengths, np.broadcast_to(above, length.shape), side="right")
        start = np.clip(start, 0, end - 1)
        total = np.zeros(length.shape)
        for low, high in itertools.pairwise(_PARTS):
            rank = np.ceil(((low + high) / 2) ** (1 / size) * (end - start)).astype(np.int64) - 1
            total += (high - low) * self.targets(start, end, np.clip(rank, 0, end - start - 1))
        return total


@dataclass(frozen=True, slots=True, eq=False)
class RangeQuantiles:
    """The k-th smallest value of any run of an array, for many runs at once.

    A wavelet matrix (Claude, Navarro and Ordóñez 2015): for each bit of the values' ranks, from the highest, how many
    before each place have a 0 there (`zeros`, shape (bits, n + 1)), the values then being sorted stably by that bit. A
    query follows its run through the bits. `values` are those that are distinguished, ascending.
    """

    values: FloatArray
    zeros: npt.NDArray[np.int32]

    @classmethod
    def of(cls, array: FloatArray) -> RangeQuantiles:
        """Index an array of at least one value; of more than 4096 different ones, neighbours are taken for one."""
        distinct, ranks = np.unique(array, return_inverse=True)
        if distinct.size > _LEVELS:
            ranks = ranks * _LEVELS // distinct.size
            levels = np.arange(distinct.size) * _LEVELS // distinct.size
            distinct = distinct[np.append(np.flatnonzero(np.diff(levels)), -1)]
        bits = max(1, int(distinct.size - 1).bit_length())
        zeros = np.zeros((bits, array.size + 1), dtype=np.int32)
        for row in range(bits):
            is_zero = (ranks >> (bits - 1 - row)) & 1 == 0
            np.cumsum(is_zero, out=zeros[row, 1:])
            ranks = np.concatenate((ranks[is_zero], ranks[~is_zero]))
        return cls(distinct, zeros)

    def __call__(self, start: IntArray, end: IntArray, rank: IntArray) -> FloatArray:
        """Return the value with this rank, from 0, among array[start:end]; arrays of one shape, start + rank < end."""
        found = np.zeros(np.shape(rank), dtype=np.int64)
        for zeros in self.zeros:
            before, until = zeros[start], zeros[end]
            here = until - before
            one = rank >= here
            start = np.where(one, zeros[-1] + start - before, before)
            end = np.where(one, zeros[-1] + end - until, until)
            rank = np.where(one, rank - here, rank)
            found = 2 * found + one
        return self.values[found]


def batch_seconds(
    step_seconds: StepSeconds, targets: TypicalTargets | None, above: Callable[[FloatArray], FloatArray] | None = None
) -> BatchCost:
    """Return the time of one step by batch size and longest length alone, with the target that is typical of both.

    `above` maps the longest length to a bound that all lengths of the batch exceed; None: not known.
    """
    if targets is None:
        return lambda batch_sizes, lengths: step_seconds(batch_sizes, lengths)

    return lambda batch_sizes, lengths: step_seconds(
        batch_sizes, lengths, targets(batch_sizes, lengths, None if above is None else above(lengths))
    )


def epoch_batch_seconds(table: BucketTable, step_seconds: StepSeconds, targets: TypicalTargets | None) -> BatchCost:
    """Return the time of one step of the table's batches, by batch size and longest length in ascending order.

    Of more than 512 batches so many are looked up, evenly spaced, and on both sides wherever the batch size changes:
    between them only the length does, by so little that the time is as good as linear in it.
    """
    cost = batch_seconds(step_seconds, targets, table.lower_edges)

    def seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
        if lengths.size <= _EACH:
            return np.asarray(cost(batch_sizes, lengths), dtype=np.float64)
        changes = np.flatnonzero(np.diff(batch_sizes)) + 1
        even = np.linspace(0, lengths.size - 1, _EACH).astype(np.int64)
        chosen = np.unique(np.concatenate((even, changes - 1, changes)))
        at = np.asarray(cost(batch_sizes[chosen], lengths[chosen]), dtype=np.float64)
        return np.interp(lengths, lengths[chosen], at)

    return seconds
