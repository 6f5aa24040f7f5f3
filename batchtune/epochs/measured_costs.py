"""The costs that a probe measured: which batches fit, and how long a step takes.

The memory must hold the worst target of all examples. A batch that happens has the longest of its own few: how long
that is on average decides how long its step takes by its longest length alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.epochs.cost_model import scaled
from batchtune.epochs.step_times import StepTimes
from batchtune.epochs.table import SizeFunction, batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths
from batchtune.results import FrontierPoint, PackedModel, PackedProbe, Probe, Script
from batchtune.trust import (
    WITHOUT_COMMUNICATION,
    WORST_COMPARED_ERROR,
    WORST_TIME_ERROR,
    rough_times,
)

_UNLIMITED = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The measured frontier as a function of the length, and of the target if shapes have one; nothing is interpolated.

    Memory grows with the shape, so what fits at a measured one fits at any that is no larger: the batch size is the
    largest of those.
    """

    lengths: FloatArray  # shape (points,)
    targets: FloatArray  # shape (points,), infinite if the worst targets were measured at each length
    batch_sizes: IntArray  # shape (points,), ascending

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier by length alone of points in strictly ascending order of length.

        If a shorter length held fewer (not for want of examples), longer ones get no more.
        """
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        # Where the data or the probe's time ended, the memory did not.
        is_open = [point.closed_by in ("data", "time") for point in points]
        held = np.where(is_open, _UNLIMITED, sizes)
        failed = np.array(
            [point.oom_batch_size or _UNLIMITED for point in points], dtype=np.int64
        )
        # A step of the search lies between what passed and what failed, so only a failure shows a dip.
        dips = np.minimum.accumulate(
            np.where(np.append(held[:-1] < held[1:], False), held, failed - 1)
        )
        return cls._sorted(points, np.full(sizes.size, np.inf), np.minimum(sizes, dips))

    @classmethod
    def of_pairs(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier by length and target, through points in any order, all with a target."""
        targets = np.array([point.target_length for point in points], dtype=np.float64)
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        return cls._sorted(points, targets, sizes)

    @classmethod
    def _sorted(
        cls, points: Sequence[FrontierPoint], targets: FloatArray, sizes: IntArray
    ) -> Frontier:
        lengths = np.array([point.length for point in points])
        order = np.argsort(sizes, kind="stable")
        return cls(lengths[order], targets[order], sizes[order])

    def __call__(
        self, lengths: npt.ArrayLike, targets: npt.ArrayLike = 0.0
    ) -> IntArray:
        """Return the largest batch size that fits, at least 1, of lengths and targets broadcast against each other."""
        return np.maximum(self.proven(lengths, targets), 1)

    def proven(self, lengths: npt.ArrayLike, targets: npt.ArrayLike = 0.0) -> IntArray:
        """Return the same, but 0 if no measured shape is as large."""
        long, target = np.broadcast_arrays(
            np.asarray(lengths, dtype=np.float64), np.asarray(targets, dtype=np.float64)
        )
        proven = np.zeros(long.shape, dtype=np.int64)
        # From the smallest size up, so that the largest stays.
        for length, longest_target, size in zip(
            self.lengths, self.targets, self.batch_sizes, strict=True
        ):
            proven[(long <= length) & (target <= longest_target)] = size
        return proven

    def continued(self, lengths: npt.ArrayLike) -> IntArray:
        """Return the same, and what should fit if batches are padded a little beyond the longest measured length.

        An example of length L needs at most (L / longest)² times the memory of the longest: memory grows with the
        length or its square. Such batches were not run.
        """
        longest = self.lengths.max()
        stretched = np.maximum(np.asarray(lengths, dtype=np.float64) / longest, 1.0)
        beyond = np.maximum(1.0, np.floor(self.proven(longest) / stretched**2))
        return np.where(stretched > 1, beyond, self(lengths)).astype(np.int64)


def largest_max_batch_length(
    frontier: SizeFunction, histogram: Histogram, max_batch_size: int | None = None
) -> float:
    """Return the largest M such that for every distinct length u max(1, int(M / u)) examples of length u fit.

    If the frontier reaches the number of examples of length at most u, or `max_batch_size`, beyond which nothing was
    tried, u sets no limit. Every example must fit alone. If all lengths are whole numbers, M is whole; else it is
    rounded down to six significant digits.
    """
    lengths = histogram.lengths
    fits = frontier(lengths)
    fillable = (
        histogram.cumulative
        if max_batch_size is None
        else np.minimum(histogram.cumulative, max_batch_size)
    )
    limited = fits < fillable
    if not limited.any():
        return float((lengths * fillable).max())
    # int(M / u) = fits + 1 from here on.
    beyond = float(((fits + 1) * lengths)[limited].min())
    if (lengths == np.floor(lengths)).all():
        return math.ceil(beyond) - 1.0
    digits = _sixth_digit(beyond)
    rounded = math.floor(beyond / digits) * digits
    # Six digits of a binary fraction may lie a hair above the decimal one.
    while (np.maximum(1, (rounded / lengths).astype(np.int64)) > fits)[limited].any():
        rounded -= digits
    return float(f"{rounded:.6g}")


def shrunk_limit(max_batch_length: float, share: float, lengths: Lengths) -> float:
    """Return this share of max_batch_length, rounded down; no less than the shortest length.

    It is whole if all lengths are whole numbers, else it has six significant digits.
    """
    smaller = max_batch_length * share
    values = lengths.histogram.lengths
    digits = 1.0
    if (values != np.floor(values)).any():
        digits = _sixth_digit(smaller)
    rounded = float(f"{math.floor(smaller / digits) * digits:.15g}")
    return max(rounded, lengths.shortest)


def _sixth_digit(value: float) -> float:
    """Return the unit of a number's sixth significant digit."""
    return 10.0 ** (math.floor(math.log10(value)) - 5)


# Targets are told apart by so many even steps of their logarithm.
_LEVELS = 64
# Groups of examples next to each other in length; a bucket is taken to hold whole groups.
_GROUPS = 1024
# Without a known bucket, a batch is taken to be of one of this many, with as many examples each.
_BUCKETS = 16
JointSizes: TypeAlias = Callable[[FloatArray, FloatArray], IntArray]
ProvenBy: TypeAlias = Callable[[float, int], "int | None"]
StepTimeFunction: TypeAlias = Callable[..., FloatArray]
"""Batch sizes, longest lengths and (if any) longest target lengths → seconds of one training step, by element."""

BatchCost = Callable[[FloatArray, FloatArray], FloatArray]
"""(batch sizes, lengths of their longest examples) → cost of each batch, element by element."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedCosts:
    """The measurements of a probe of packed batches.

    Attributes:
        max_tokens: The token budget; without proofs the largest that passed.
        proofs: Shape (proofs, 4): tokens, Σ of their squares, sequences and the longest of each proven batch.
        step_seconds: The time of a batch among others, as training runs it; None if it is not known.
        why_unproven: Why there are no proofs, if the probe was not interrupted.
    """

    max_tokens: int
    proofs: FloatArray
    step_seconds: PackedModel | None
    why_unproven: str | None = None

    @classmethod
    def of(cls, probe: Probe, packed: PackedProbe) -> PackedCosts:
        """Return those of a probe."""
        shapes = [probe.trials[index].shape for index in packed.proofs]
        if probe.why_unproven is not None:
            shapes = []
        proofs = [
            (shape.tokens, shape.squared_tokens, shape.batch_size, shape.length)
            for shape in shapes
        ]
        model = packed.step_seconds
        if model is not None and model.relative_error > WORST_TIME_ERROR:
            model = None
        if model is not None:
            model = scaled(model, _time_ratio(probe))
        return cls(
            max_tokens=packed.max_tokens,
            proofs=np.array(proofs, dtype=np.float64).reshape(-1, 4),
            step_seconds=model,
            why_unproven=probe.why_unproven,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The measurements of a probe; all None without one.

    Attributes:
        world_size: Number of ranks that trained together.
        accumulate: How many batches an optimizer step trains on; `step_seconds` is the time of one of them.
        max_batch_size: The most examples that were tried in a batch; None: as many as the data has.
        unfinished: Whether larger batches may fit, which a probe had no time to try.
        warnings: Why the times may be wrong, each with its remedy.
        frontier: Lengths → the largest batch size that fits, at least 1.
        continued_frontier: The same, also beyond the longest length, where batches are padded further.
        joint_frontier: (lengths, target lengths) → the same; None if only the longest targets were measured.
        proven: Lengths → the largest batch size that is proven to fit, 0 without a proof; `joint_proven` likewise.
        joint_lengths: The lengths at which pairs were measured.
        proven_by: (longest length, batch size) → index of the trial that proves such a batch, or None.
        compares_times: Whether the step times are exact enough to tell which batches are faster.
        packed: What a probe of packed batches measured; then there is nothing of padded ones.
        script: What was learned of an unchanged script.
    """

    frontier: SizeFunction | None = None
    continued_frontier: SizeFunction | None = None
    step_seconds: StepTimeFunction | None = None
    device_name: str | None = None
    world_size: int = 1
    accumulate: int = 1
    max_batch_size: int | None = None
    unfinished: bool = False
    warnings: tuple[str, ...] = ()
    joint_frontier: JointSizes | None = None
    proven: SizeFunction | None = None
    joint_proven: JointSizes | None = None
    joint_lengths: FloatArray = field(default_factory=lambda: np.empty(0))
    proven_by: ProvenBy | None = None
    compares_times: bool = True
    packed: PackedCosts | None = None
    script: Script | None = None


def costs_of(probe: Probe) -> Costs:
    """Return what is proven to fit, and the step times, by the model between measured ones.

    No times are known if the model misses even the measurements by far. Nothing is proven by a probe that was
    interrupted before its batches ran in turns.
    """
    measured = Costs(
        device_name=probe.device.text,
        world_size=probe.device.world_size,
        max_batch_size=probe.settings.get("max_batch_size"),
        accumulate=probe.device.accumulation,
        unfinished=probe.unfinished,
        script=probe.device.script,
    )
    if probe.packed is not None:
        packed = PackedCosts.of(probe, probe.packed)
        timed = packed.step_seconds is not None
        return replace(measured, packed=packed, warnings=_cautions(probe, timed))
    model = probe.models.step_seconds
    times = None
    if model is not None and model.relative_error <= WORST_TIME_ERROR:
        # Corrections are ratios to the model: this scales all times.
        times = StepTimes.of(probe.trials, model).scaled(_time_ratio(probe))
    compares_times = (
        model is not None
        and model.relative_error <= WORST_COMPARED_ERROR
        and not rough_times(probe.device, probe.trials)
    )
    frontier = Frontier.of(probe.frontier)

    def proven_by(longest: float, batch_size: int) -> int | None:
        is_larger = batch_size > int(frontier.proven(longest))
        if is_larger or probe.why_unproven is not None:
            return None
        fitting = (
            point
            for point in probe.frontier
            if point.length >= longest and point.batch_size >= batch_size
        )
        return next(fitting).trial

    costs = replace(
        measured,
        frontier=frontier,
        continued_frontier=frontier.continued,
        proven=frontier.proven
        if probe.is_proven
        else lambda lengths: np.zeros(lengths.shape, dtype=np.int64),
        proven_by=proven_by,
        step_seconds=times,
        compares_times=compares_times,
        warnings=_cautions(probe, timed=times is not None),
    )
    if not probe.joint_frontier:
        return costs
    joint = Frontier.of_pairs([*probe.frontier, *probe.joint_frontier])
    return replace(
        costs,
        joint_frontier=joint,
        joint_proven=joint.proven,
        joint_lengths=np.unique(joint.lengths),
    )


def _time_ratio(probe: Probe) -> float:
    """Return the time of a batch among others, as in training / that of a step of a trial.

    Such a step trains on all batches of an optimizer step, which are equal.
    """
    ratio = 1.0
    if probe.confirmation is not None:
        ratio = probe.confirmation.time_ratio or 1.0
    return ratio / probe.device.accumulation


def _cautions(probe: Probe, timed: bool) -> tuple[str, ...]:
    """Say why times, if there are any, may be wrong."""
    if timed and probe.device.simulated:
        return (WITHOUT_COMMUNICATION,)
    return ()


def capped(costs: Costs, max_batch_length: float) -> Costs:
    """Return the same costs, but no batch longer than the user wants."""
    return _with_sizes(
        costs,
        lambda sizes, lengths: np.minimum(
            sizes, batch_sizes_for(lengths, max_batch_length)
        ),
    )


def shrunk(costs: Costs, share: float) -> Costs:
    """Return the same costs, but no batch larger than this share of what fits."""
    return _with_sizes(costs, lambda sizes, lengths: share_of(sizes, share))


def share_of(sizes: IntArray, share: float) -> IntArray:
    """Return this share of batch sizes, in whole examples, at least 1."""
    whole: IntArray = np.floor(share * sizes).astype(np.int64)
    return np.maximum(1, whole)


def _with_sizes(
    costs: Costs, change: Callable[[IntArray, FloatArray], IntArray]
) -> Costs:
    """Return the same costs with other batch sizes that fit: `change` gets sizes and the lengths that they are for."""

    def changed(
        sizes: Callable[..., IntArray] | None,
    ) -> Callable[..., IntArray] | None:
        if sizes is None:
            return None
        return lambda lengths, *targets: change(sizes(lengths, *targets), lengths)

    return replace(
        costs,
        frontier=changed(costs.frontier),
        continued_frontier=changed(costs.continued_frontier),
        joint_frontier=changed(costs.joint_frontier),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TypicalTargets:
    """The longest target that a batch has on average, by its size and its longest length.

    Attributes:
        histogram: The lengths.
        means: The mean target of each of its distinct lengths.
        levels: Shape (levels,), ascending: the targets to tell apart.
        examples_up_to: Shape (groups + 1, levels): how many of the examples in the first groups, from the shortest
            length on, have targets up to each level. All groups have as many examples, to within one.
    """

    histogram: Histogram
    means: FloatArray
    levels: FloatArray
    examples_up_to: IntArray

    @classmethod
    def of(cls, lengths: Lengths) -> TypicalTargets | None:
        """Return those of a data set; None without targets."""
        runs = lengths.runs
        if runs.targets is None:
            return None
        targets = runs.targets
        edges = np.expm1(
            np.linspace(np.log1p(targets.min()), np.log1p(targets.max()), _LEVELS)
        )
        groups = min(lengths.count, _GROUPS)
        # Group g holds the examples from the g / groups-th on; a run may be in several.
        firsts = -(-np.arange(groups) * lengths.count // groups)
        parts = np.union1d(firsts, lengths.count - runs.ends)
        run = runs.at(lengths.count - 1 - parts)
        group = np.searchsorted(firsts, parts, side="right") - 1
        level = np.searchsorted(edges[:-1], targets)
        counts = np.zeros((groups, _LEVELS), dtype=np.int64)
        np.add.at(counts, (group, level[run]), np.diff(parts, append=lengths.count))
        up_to = np.concatenate(
            (
                np.zeros((1, _LEVELS), dtype=np.int64),
                counts.cumsum(axis=0).cumsum(axis=1),
            )
        )
        in_level = counts.sum(axis=0)
        totals = targets * runs.counts
        of_levels = np.bincount(level, totals, _LEVELS) / np.maximum(in_level, 1)
        starts = np.flatnonzero(np.diff(runs.values, prepend=np.nan) != 0)
        means = np.add.reduceat(totals, starts)[::-1] / lengths.histogram.counts
        return cls(
            lengths.histogram, means, np.where(in_level > 0, of_levels, edges), up_to
        )

    def __call__(
        self,
        batch_sizes: npt.ArrayLike,
        lengths: npt.ArrayLike,
        above: npt.ArrayLike | None = None,
    ) -> FloatArray:
        """Return the mean of the longest target over batches drawn from the examples up to a length.

        With F the distribution of the targets there, the longest of B has F^B (but for examples that can't be drawn
        twice). All examples are longer than `above`, the boundary of the bucket before; without it the sixteenth of the
        data that is nearest in length is taken. Arguments are broadcast against each other.
        """
        length = np.asarray(lengths, dtype=np.float64)
        count = self.histogram.count
        end = np.maximum(self.histogram.counts_up_to(length), 1)
        if above is None:
            start = end - max(1, count // _BUCKETS)
        else:
            start = self.histogram.counts_up_to(np.asarray(above, dtype=np.float64))
        groups_each = (self.examples_up_to.shape[0] - 1) / count
        last = np.ceil(end * groups_each).astype(np.int64)
        first = np.round(start * groups_each).astype(np.int64).clip(0, last - 1)
        examples = self.examples_up_to[last] - self.examples_up_to[first]
        sizes = np.asarray(batch_sizes, dtype=np.float64)[..., np.newaxis]
        within = (examples / examples[..., -1:]) ** sizes
        below: FloatArray = np.sum(within[..., :-1] * np.diff(self.levels), axis=-1)
        return float(self.levels[-1]) - below


def batch_seconds(
    step_seconds: StepTimeFunction, targets: TypicalTargets | None
) -> BatchCost:
    """Return the time of one step by batch size and longest length alone, with the target that is typical of both."""
    if targets is None:
        return step_seconds
    return lambda batch_sizes, lengths: step_seconds(
        batch_sizes, lengths, targets(batch_sizes, lengths)
    )
