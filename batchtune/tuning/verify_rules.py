"""Judging a verification (failures, memory that creeps, times), and proposing smaller sizes if it does not hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchtune.batching.layout import Dealing, batches_per_rank
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Device, Proposal, Trial, Verification, VerifyFailure, VerifyPhase, WorkloadRecord, meta_of
from batchtune.tuning.costs import Costs, ProvenBy
from batchtune.tuning.epoch_cost import estimated_epoch_seconds
from batchtune.tuning.memory_growth import FEWEST_STEPS, Growth, growth_of, interquartile_range
from batchtune.tuning.verify_plan import Candidate, PlannedBatch, VerifyPlan
from batchtune.units import counted, format_length, format_seconds

# By how much a batch size is lowered, try by try, if the probe knows no better.
_CUTS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
_WENT = {"oom": "ran out of memory", "crash": "ended its process", "timeout": "took too long", "error": "failed"}


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was run, the number-th of its phase."""

    phase: VerifyPhase
    number: int
    planned: PlannedBatch
    stepped: Trial

    def failure(self) -> VerifyFailure:
        """Return the step as the record of a failure."""
        shape = self.planned.shape
        assert self.stepped.outcome != "ok"
        return VerifyFailure(
            phase=self.phase,
            step=self.number,
            bucket=self.planned.bucket,
            batch_size=shape.batch_size,
            length=shape.length,
            target_length=shape.target_length,
            outcome=self.stepped.outcome,
            error=self.stepped.error,
        )


@dataclass(slots=True)
class DoneSteps:
    """All steps of a verification, in their order.

    Attributes:
        worst, shuffled: Those of each phase.
        first_round: How many of `worst` ran each worst shape for the first time.
    """

    worst: list[DoneStep] = field(default_factory=list)
    shuffled: list[DoneStep] = field(default_factory=list)
    first_round: int = 0

    @property
    def failures(self) -> list[VerifyFailure]:
        """The steps that failed."""
        return [done.failure() for done in (*self.worst, *self.shuffled) if done.stepped.outcome != "ok"]

    @property
    def alloc_retries(self) -> int | None:
        """How often the allocator emptied its cache in steps that passed, after each worst shape had been run once."""
        later = (*self.worst[self.first_round :], *self.shuffled)
        retries = [done.stepped.alloc_retries for done in later if done.stepped.outcome == "ok"]
        known = [count for count in retries if count is not None]
        return sum(known) if known else None

    def most(self, figure: Callable[[Trial], int | None]) -> int | None:
        """Return the largest of a figure over all steps; None if it is unknown."""
        figures = [figure(done.stepped) for done in (*self.worst, *self.shuffled)]
        return max((one for one in figures if one is not None), default=None)

    def rest_growth(self) -> Growth | None:
        """Return how memory in use between steps grew over the shuffled ones, or the worst if none were shuffled."""
        return growth_of([stepped.rest_bytes for stepped in _until_failure(self.shuffled or self.worst)])


def _until_failure(steps: Sequence[DoneStep]) -> list[Trial]:
    """Return the steps before the first that failed: a failure changes what is in use."""
    failed = next((index for index, done in enumerate(steps) if done.stepped.outcome != "ok"), len(steps))
    return [done.stepped for done in steps[:failed]]


def judge(
    steps: DoneSteps,
    plan: VerifyPlan,
    workload: WorkloadRecord,
    device: Device,
    costs: Costs,
    planned_steps: int | None,
) -> Verification:
    """Judge all steps that were run; `planned_steps` is the number of shuffled ones, None if time decided."""
    candidate, lengths = plan.candidate, plan.candidate.padded(plan.lengths)
    limit_bytes, tolerance = device.limit_bytes, plan.settings.time_tolerance
    passed, rest, failures = _until_failure(steps.shuffled), steps.rest_growth(), steps.failures
    reserved = growth_of([one.reserved_bytes for one in passed])
    unused = growth_of(
        [None if one.reserved_bytes is None else one.reserved_bytes - (one.rest_bytes or 0) for one in passed]
    )
    timing = _timing_of_steps(steps.shuffled, lengths, candidate, costs)
    reasons = failure_reasons(failures, candidate.table.boundaries.tolist(), lengths.unit, costs.proven_by)
    if rest is not None and rest.leaks(limit_bytes):
        reasons.insert(0, leak_reason(rest))
    if unused is not None and unused.fragments(limit_bytes):
        reasons.append(
            f"The allocator's cache {unused} and was still growing: batches of different shapes fragment the memory. "
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True, or keep more memory free with --memory-fraction, and "
            "probe again"
        )
    if not failures and not timing.within(tolerance):
        reasons.append(_time_reason(timing, tolerance))
    return Verification(
        meta=meta_of(Verification),
        lengths=plan.lengths.summary(),
        workload=workload,
        device=device,
        settings={**plan.settings.recorded(), "multiple_of": candidate.multiple_of},
        bucket_boundaries=candidate.table.boundaries.tolist(),
        bucket_batch_sizes=candidate.table.batch_sizes.tolist(),
        max_batch_length=candidate.max_batch_length,
        worst_steps=len(steps.worst),
        steps=sum(done.stepped.outcome == "ok" for done in steps.shuffled),
        planned_steps=planned_steps,
        epoch_batches=_epoch_batches(lengths, candidate),
        failures=failures,
        alloc_retries=steps.alloc_retries,
        peak_bytes=steps.most(lambda stepped: stepped.peak_bytes),
        reserved_bytes=steps.most(lambda stepped: stepped.reserved_bytes),
        rest_growth_bytes=None if rest is None else round(rest.total_bytes),
        reserved_growth_bytes=None if reserved is None else round(reserved.total_bytes),
        estimated_epoch_seconds=timing.estimated_epoch_seconds,
        measured_epoch_seconds=timing.measured_epoch_seconds,
        time_ratio=timing.ratio,
        time_ratio_spread=timing.spread,
        holds=not reasons,
        reasons=reasons,
        warnings=list(_warnings(steps, rest, costs, limit_bytes, failed=bool(failures))),
        proposal=None,
    )


def _warnings(steps: DoneSteps, rest: Growth | None, costs: Costs, limit_bytes: int, *, failed: bool) -> Iterator[str]:
    if steps.alloc_retries:
        yield (
            f"The allocator emptied its cache {counted(steps.alloc_retries, 'time')} to go on, which costs time and is "
            "the last step before running out of memory. Keep more free with --memory-fraction or --reserve, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, and probe again"
        )
    if rest is not None and rest.settles(limit_bytes):
        yield settling_warning(rest)
    if failed:
        return
    if rest is None:
        known = any(done.stepped.rest_bytes is not None for done in steps.shuffled)
        yield (
            f"Whether memory creeps is unknown: that takes {FEWEST_STEPS} steps. Run more with --steps"
            if known
            else "Whether memory creeps is unknown: this system does not report how much is in use"
        )
    if costs.step_seconds is None:
        yield (
            "The time of an epoch was not compared with an estimate, because no step times are known: "
            "`batchtune probe-oom` measures them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Measured against estimated time.

    Attributes:
        estimated_epoch_seconds: By the probe's step times; None without them.
        measured_epoch_seconds: Scaled from the steps that were run to the epoch; None if none were.
        ratio: Sum of the measured / sum of the estimated times of exactly the steps that were run.
        spread: Interquartile range of that ratio over the steps; None for fewer than four.
    """

    estimated_epoch_seconds: float | None
    measured_epoch_seconds: float | None
    ratio: float | None
    spread: float | None

    def within(self, tolerance: float) -> bool:
        """Return whether the time is as estimated; true if there is nothing to compare."""
        return self.ratio is None or abs(self.ratio - 1) <= tolerance


def timing_of(
    seconds: Sequence[float],
    estimated: FloatArray | None,
    estimated_epoch_seconds: float | None,
    epoch_batches: int,
) -> Timing:
    """Return what the shuffled steps say about an epoch's time.

    The same batches are compared: the ratio of the sums over the steps that were run, which weighs each step by its
    time, scales the epoch's estimate. Without an estimate the mean step is multiplied by the number of batches.
    `seconds` and `estimated` are of the same steps.
    """
    measured = np.array(seconds, dtype=np.float64)
    epoch = ratio = spread = None
    if measured.size and estimated is not None and float(estimated.sum()) > 0:
        ratio = float(measured.sum() / estimated.sum())
        spread = interquartile_range(measured / np.maximum(estimated, 1e-12)) if measured.size >= 4 else None
    if ratio is not None and estimated_epoch_seconds is not None:
        epoch = ratio * estimated_epoch_seconds
    elif measured.size:
        epoch = float(measured.mean()) * epoch_batches
    return Timing(
        estimated_epoch_seconds=estimated_epoch_seconds, measured_epoch_seconds=epoch, ratio=ratio, spread=spread
    )


def _timing_of_steps(shuffled: Sequence[DoneStep], lengths: Lengths, candidate: Candidate, costs: Costs) -> Timing:
    timed = [(done.planned.shape, done.stepped.step_seconds) for done in shuffled if done.stepped.step_seconds]
    seconds = [step_seconds for _, step_seconds in timed if step_seconds is not None]
    batches = _epoch_batches(lengths, candidate)
    if costs.step_seconds is None:
        return timing_of(seconds, None, None, batches)
    epoch = estimated_epoch_seconds(lengths, candidate.table, costs.step_seconds, drop_last=candidate.drop_last)
    if not timed:
        return timing_of(seconds, None, epoch, batches)
    sizes = np.array([shape.batch_size for shape, _ in timed], dtype=np.float64)
    longest = np.array([shape.length for shape, _ in timed])
    targets = [shape.target_length for shape, _ in timed if shape.target_length is not None]
    estimated = costs.step_seconds(sizes, longest, *([np.array(targets)] if targets else []))
    return timing_of(seconds, np.asarray(estimated, dtype=np.float64), epoch, batches)


def _epoch_batches(lengths: Lengths, candidate: Candidate) -> int:
    """Return the number of batches of one epoch."""
    counts = candidate.table.counts(lengths.histogram)
    return batches_per_rank(counts, candidate.table.batch_sizes, Dealing(drop_last=candidate.drop_last))


def failure_reasons(
    failures: Sequence[VerifyFailure],
    boundaries: Sequence[float],
    unit: str | None,
    proven_by: ProvenBy | None = None,
) -> list[str]:
    """Return a sentence for each bucket with a batch that failed: its first, and how many more."""
    reasons = []
    for bucket in dict.fromkeys(failure.bucket for failure in failures):
        own = [failure for failure in failures if failure.bucket == bucket]
        first = own[0]
        target = "" if first.target_length is None else f" with targets up to {first.target_length:g}"
        batch = f"{first.batch_size:,} × {format_length(first.length, unit)}{target}"
        more = f", and {len(own) - 1} more of it" if len(own) > 1 else ""
        error = f": {first.error}" if first.error and first.outcome != "oom" else ""
        proof = ""
        if proven_by is not None and first.outcome == "oom":
            trial = proven_by(first.length, first.batch_size)
            proof = (
                "; the probe ran no batch as large with memory to spare, so this size was not proven"
                if trial is None
                else f"; trial {trial} of the probe ran a batch as large with memory to spare: memory use has changed"
            )
        reasons.append(
            f"A batch of {batch} {_WENT[first.outcome]} (bucket {bucket + 1} of {len(boundaries)}, up to "
            f"{format_length(boundaries[bucket], unit)}){more}{error}{proof}"
        )
    return reasons


def leak_reason(rest: Growth) -> str:
    """Describe memory in use that creeps, at the end as fast as before."""
    return (
        f"Memory in use between steps {rest}, at the end as fast as before: the workload leaks, or fills a cache for "
        "which these steps are too few (run more with --steps to find out). If it goes on, memory runs out whatever "
        "the batch size. Look for code that keeps tensors, such as a loss that is accumulated without .item() or "
        ".detach()"
    )


def settling_warning(rest: Growth) -> str:
    """Describe memory in use that crept, but less at the end."""
    how, cache = ("more slowly", "fills up") if rest.pace > 0 else ("no more", "is full")
    return (
        f"Memory in use between steps {rest}, but {how} at the end, as with a cache that {cache}. Run more with "
        "--steps to see whether it has stopped"
    )


def _time_reason(timing: Timing, tolerance: float) -> str:
    assert timing.ratio is not None
    assert timing.measured_epoch_seconds is not None and timing.estimated_epoch_seconds is not None
    why = (
        "something slows the steps down that did not when the probe timed them (other programs, a hot device, a "
        "changed workload)"
        if timing.ratio > 1
        else "the probe timed the steps under worse conditions, or with another workload"
    )
    return (
        f"An epoch takes {format_seconds(timing.measured_epoch_seconds)} measured against "
        f"{format_seconds(timing.estimated_epoch_seconds)} estimated ({timing.ratio:.2f} times, where "
        f"{1 - tolerance:.2f} to {1 + tolerance:.2f} is allowed): {why}. Probe again with --force while the machine "
        "does nothing else, or allow more with --time-tolerance"
    )


def propose(
    lengths: Lengths,
    candidate: Candidate,
    failing: Collection[int],
    run: Callable[[Candidate], DoneSteps],
    frontier: Callable[[FloatArray], IntArray] | None = None,
) -> Proposal | None:
    """Return the next smaller sizes that pass when they are run like the ones that failed.

    A bucket that failed gets what the probe's frontier allows if that is less, then 5%, 10%, 20%, 40% and so on
    less, at least one less each time. Sizes of other buckets stay: they were run, and passed. So a bucket may get
    fewer examples than one of longer examples that was seen to fit.

    Args:
        lengths: The data set.
        candidate: The sampler that failed.
        failing: Indices of the buckets that failed.
        run: Runs a candidate in a fresh worker.
        frontier: Lengths → the largest batch size that the probe found to fit.

    Returns:
        Sizes that passed; if none did, the last that were tried, not verified. None if a batch of one failed.
    """
    table, counts = candidate.table, candidate.table.counts(lengths.histogram)
    sizes, failing, steps = np.minimum(table.batch_sizes, np.maximum(counts, 1)), set(failing), 0
    lowered = set(failing)
    for attempt, cut in enumerate(_CUTS):
        if any(sizes[bucket] <= 1 for bucket in failing):
            return None
        for bucket in failing:
            most = min(int(sizes[bucket]) - 1, int(sizes[bucket] * (1 - cut)))
            if attempt == 0 and frontier is not None:
                fits = int(frontier(np.array([_longest_of(lengths, table, bucket)]))[0])
                most = fits if fits < sizes[bucket] else most
            sizes[bucket] = max(1, most)
        # A size beyond what the data can fill stays as it is.
        proposed: IntArray = np.where(np.isin(np.arange(table.num_buckets), list(lowered)), sizes, table.batch_sizes)
        tried = run(candidate.with_sizes(proposed))
        steps += len(tried.worst) + len(tried.shuffled)
        failing = {failure.bucket for failure in tried.failures}
        if not failing or attempt == len(_CUTS) - 1:
            break
        lowered |= failing
    return Proposal(
        bucket_batch_sizes=proposed.tolist(),
        max_batch_length=lower_max_batch_length(candidate, counts, proposed, lowered),
        verified=not failing,
        steps=steps,
    )


def _longest_of(lengths: Lengths, table: BucketTable, bucket: int) -> float:
    known = lengths.histogram.lengths
    return float(known[int(np.searchsorted(known, table.boundaries[bucket], side="right")) - 1])


def lower_max_batch_length(
    candidate: Candidate, counts: IntArray, proposed: IntArray, lowered: Collection[int]
) -> float:
    """Return the largest that gives no lowered bucket more than proposed, for samplers that divide by the boundary.

    int(M / boundary) is at most the size as long as M is below (size + 1) · boundary. A bucket that was not lowered
    and has all its examples in one batch sets no limit. At most the candidate's own. Six digits, rounded down.
    """
    ends = [
        float((proposed[bucket] + 1) * candidate.table.boundaries[bucket])
        for bucket in range(candidate.table.num_buckets)
        if bucket in lowered or proposed[bucket] < counts[bucket]
    ]
    below = min([math.nextafter(end, 0) for end in ends], default=math.inf)
    if below >= candidate.max_batch_length:
        return candidate.max_batch_length
    digits = 10.0 ** (math.floor(math.log10(below)) - 5)
    return float(f"{math.floor(below / digits) * digits:.6g}")
