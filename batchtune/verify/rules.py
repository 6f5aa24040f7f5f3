"""Judges the steps of a verification: failures, memory that creeps, times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from batchtune.buckets.epoch_cost import estimated_epoch_seconds
from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import FloatArray
from batchtune.results import (
    Device,
    StreamConfig,
    Trial,
    Verification,
    VerifyFailure,
    WorkloadRecord,
    meta_of,
)
from batchtune.trust import recompile_warnings
from batchtune.units import counted, format_length, format_seconds, format_size
from batchtune.verify.plan import VerifyPlan

FEWEST_STEPS = 12
"""With fewer steps growth can't be told from noise."""

# As for the trials of the probe: what would take less than 5% of the limit in 10,000 more steps does no harm.
_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05
# Growth counts if it is this many times as large as the spread of the figures, and more than a few pages: so much the
# interpreter itself takes now and then.
_ABOVE_NOISE = 4.0
_FEW_PAGES_BYTES = 64 << 10
# Growth at the end below this fraction of the growth before slows down, as that of a cache that fills up.
_SAME_PACE = 2 / 3
# The end has at least this many steps, and so many that growth at the same pace is so many times the noise of its mean.
_FEWEST_AT_THE_END = 4
_END_ABOVE_NOISE = 8.0
# The allocator's cache settles after some steps more than once: it creeps if it has grown by this fraction of the
# limit from the second to the last quarter, and in each half of that.
_CACHE_SHARE = 0.02
_FEWEST_FOR_ERROR = 4
_WHY = (
    "the probe timed the steps under worse conditions, or with another workload",
    "something slows the steps down that did not when the probe timed them (other programs, a hot device, a changed "
    "workload)",
)
_WENT = {"oom": "ran out of memory", "crash": "ended its process", "timeout": "took too long", "error": "failed"}


@dataclass(frozen=True, slots=True)
class Growth:
    """How a figure in bytes grew over steps.

    Attributes:
        total_bytes: Median of the last quarter of the steps - median of the second.
        steps: From the middle of the one to that of the other.
        steady: Whether it grew from the second quarter to the third, and from that to the last.
        noise_bytes: The interquartile range around a straight line within a quarter.
        pace: Growth per step at the end / from the second quarter to the third; 1 if it did not grow there.
    """

    total_bytes: float
    steps: float
    steady: bool
    noise_bytes: float
    pace: float

    @property
    def per_step_bytes(self) -> float:
        """Growth per step."""
        return self.total_bytes / self.steps

    def creeps(self, limit_bytes: int) -> bool:
        """Return whether memory in use between steps grew by more than is harmless (it leaks, or fills a cache)."""
        if not self.steady or self.total_bytes < max(_ABOVE_NOISE * self.noise_bytes, _FEW_PAGES_BYTES):
            return False
        return self.per_step_bytes * _FORESEEN_STEPS > _HARMLESS_SHARE * limit_bytes

    def leaks(self, limit_bytes: int) -> bool:
        """Return whether memory in use between steps creeps, at the same pace to the end."""
        return self.creeps(limit_bytes) and self.pace >= _SAME_PACE

    def fragments(self, limit_bytes: int) -> bool:
        """Return whether the allocator's cache, of the bytes beyond those in use between steps, still grows."""
        return self.steady and self.total_bytes > _CACHE_SHARE * limit_bytes

    def __str__(self) -> str:
        return (
            f"grew by {format_size(self.total_bytes)} in {self.steps:.0f} steps "
            f"({format_size(self.per_step_bytes)} a step)"
        )


def growth_of(figures: Sequence[int | None]) -> Growth | None:
    """Return how these figures, one per step, grew after the first quarter, in which they may still settle.

    Medians of quarters are compared, so single steps decide nothing. None if any is unknown, or for fewer than 12.
    """
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures) or len(known) < FEWEST_STEPS:
        return None
    _, second, third, last = np.array_split(np.array(known, dtype=np.float64), 4)
    before = float(np.median(second))
    after = float(np.median(last))
    steps = len(known) / 2
    return Growth(
        total_bytes=after - before,
        steps=steps,
        steady=before < float(np.median(third)) < after,
        noise_bytes=_noise([second, third, last], (after - before) / steps),
        pace=_pace(second, third, last),
    )


def _noise(quarters: Sequence[FloatArray], rise: float) -> float:
    """Return the largest spread around a line that rises by so much per step."""
    return max(_interquartile_range(quarter - rise * np.arange(quarter.size)) for quarter in quarters)


def _pace(second: FloatArray, third: FloatArray, end: FloatArray) -> float:
    """Return the growth per step at the end / before; the end is as short as the noise allows."""
    before = _rise(second, third)
    if before <= 0:
        return 1.0
    noise = _noise((second, third), before)  # without the last: a bend is not noise
    while True:
        later = end[end.size // 2 :]
        half = later.size / 2
        if later.size < _FEWEST_AT_THE_END or before * half < _END_ABOVE_NOISE * noise / math.sqrt(half):
            return _rise(*np.array_split(end, 2)) / before
        end = later


def _rise(first: FloatArray, second: FloatArray) -> float:
    """Return the growth per step from the middle of some steps to the middle of those that follow."""
    return float(np.median(second) - np.median(first)) / ((first.size + second.size) / 2)


def _interquartile_range(values: FloatArray) -> float:
    low, high = np.percentile(values, (25, 75))
    return float(high - low)


@dataclass(slots=True)
class DoneSteps:
    """All steps of a verification, in their order.

    The `first_round` of `worst` ran each worst shape for the first time; `planned` steps were to be shuffled.
    """

    worst: list[Trial] = field(default_factory=list)
    shuffled: list[Trial] = field(default_factory=list)
    failures: list[VerifyFailure] = field(default_factory=list)
    first_round: int = 0
    planned: int = 0

    @property
    def alloc_retries(self) -> int | None:
        """How often the allocator emptied its cache in steps that passed, after each worst shape had been run once."""
        later = (*self.worst[self.first_round :], *self.shuffled)
        known = [trial.alloc_retries for trial in later if trial.outcome == "ok" and trial.alloc_retries is not None]
        if known:
            return sum(known)
        return None

    def rest_growth(self) -> Growth | None:
        """Return how memory in use between steps grew over the shuffled ones, or the worst if none were shuffled."""
        return growth_of([trial.rest_bytes for trial in _until_failure(self.shuffled or self.worst)])

    def leak(self, limit_bytes: int) -> str | None:
        """Describe memory in use that creeps, at the end as fast as before; None if it does not."""
        rest = self.rest_growth()
        if rest is None or not rest.leaks(limit_bytes):
            return None
        return (
            f"Memory in use between steps {rest}, at the end as fast as before: the workload leaks, or fills a cache "
            "for which these steps are too few (run more with --steps to find out). If it goes on, memory runs out "
            "whatever the batch size. Look for code that keeps tensors, such as a loss that is accumulated without "
            ".item() or .detach()"
        )


def _until_failure(steps: Sequence[Trial]) -> list[Trial]:
    """Return the steps before the first that failed: a failure changes what is in use."""
    return list(itertools.takewhile(lambda trial: trial.outcome == "ok", steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The time of an epoch, measured and estimated; None where unknown.

    Attributes:
        ratio: Measured / estimated time of exactly the batches that were run.
        ratio_error: Its standard error, by the scatter of the steps.
    """

    measured: float | None = None
    estimated: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None


def judge(steps: DoneSteps, plan: VerifyPlan, workload: WorkloadRecord, device: Device, costs: Costs) -> Verification:
    """Judge all steps that were run."""
    ran = (*steps.worst, *steps.shuffled)
    passed = _until_failure(steps.shuffled)
    rest = steps.rest_growth()
    reserved = growth_of([trial.reserved_bytes for trial in passed])
    times = _times(steps.shuffled, plan, costs)
    reasons = list(_reasons(steps, times, plan, costs, device.limit_bytes))
    config = plan.config
    settings: dict[str, Any] = {
        "steps": plan.settings.steps,
        "epoch": plan.settings.steps is None,
        "seed": plan.settings.seed,
        "time_tolerance": plan.settings.time_tolerance,
        "multiple_of": config.evidence.multiple_of,
    }
    if plan.stream is not None:
        settings |= asdict(plan.stream.sharding)
    batching: dict[str, Any] = {"pool_size": plan.batching.pool_size, "batch_overhead": plan.batching.batch_overhead}
    if isinstance(config, StreamConfig):
        batching = {
            "algorithm": config.algorithm,
            "buffer_size": config.buffer_size,
            "max_padding_ratio": config.max_padding_ratio,
        }
    return Verification(
        meta=meta_of(Verification),
        lengths=plan.lengths.summary(),
        workload=workload,
        device=device,
        settings=settings,
        bucket_boundaries=config.bucket_boundaries,
        bucket_batch_sizes=config.bucket_batch_sizes,
        max_batch_length=config.max_batch_length,
        **batching,
        worst_steps=len(steps.worst),
        steps=sum(trial.outcome == "ok" for trial in steps.shuffled),
        planned_steps=steps.planned,
        epoch_batches=len(plan.first_epoch),
        failures=steps.failures,
        alloc_retries=steps.alloc_retries,
        peak_bytes=_largest(trial.peak_bytes for trial in ran),
        reserved_bytes=_largest(trial.reserved_bytes for trial in ran),
        rest_growth_bytes=None if rest is None else round(rest.total_bytes),
        reserved_growth_bytes=None if reserved is None else round(reserved.total_bytes),
        estimated_epoch_seconds=times.estimated,
        measured_epoch_seconds=times.measured,
        time_ratio=times.ratio,
        time_ratio_error=times.ratio_error,
        holds=not reasons,
        reasons=reasons,
        warnings=list(_warnings(steps, costs, device.limit_bytes)),
    )


def _largest(figures: Iterable[int | None]) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _reasons(steps: DoneSteps, times: _Times, plan: VerifyPlan, costs: Costs, limit_bytes: int) -> Iterator[str]:
    """Yield why the verification does not hold, the most important first."""
    leak = steps.leak(limit_bytes)
    if leak is not None:
        yield leak
    yield from _failure_reasons(steps.failures, plan, costs)
    unused = growth_of([_unused_bytes(trial) for trial in _until_failure(steps.shuffled)])
    if unused is not None and unused.fragments(limit_bytes):
        yield (
            f"The allocator's cache {unused} and was still growing: batches of different shapes fragment the memory. "
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True, or keep more memory free with --memory-fraction, and "
            "probe again"
        )
    tolerance = plan.settings.time_tolerance
    if steps.failures or times.ratio is None or abs(times.ratio - 1) <= tolerance:
        return
    assert times.measured is not None and times.estimated is not None
    lowest = f"{1 - tolerance:.2f} to " if tolerance < 1 else "up to "
    yield (
        f"An epoch takes {format_seconds(times.measured)} measured against {format_seconds(times.estimated)} estimated "
        f"({times.ratio:.2f} times, where {lowest}{1 + tolerance:.2f} is allowed): {_WHY[times.ratio > 1]}. "
        "Probe again with --force while the machine does nothing else, or allow more with --time-tolerance"
    )


def _unused_bytes(trial: Trial) -> int | None:
    """Return what the allocator holds beyond what is in use between steps."""
    if not trial.reserved_bytes:
        return trial.reserved_bytes
    return trial.reserved_bytes - (trial.rest_bytes or 0)


def _times(shuffled: Sequence[Trial], plan: VerifyPlan, costs: Costs) -> _Times:
    """Return an epoch's measured and estimated time.

    The same batches are compared: the ratio of the sums over the steps that were run, which weighs each step by its
    time, scales the epoch's estimate. Without an estimate the mean step is multiplied by the number of batches.
    """
    timed = [trial for trial in shuffled if trial.step_seconds]
    measured: FloatArray = np.array([trial.step_seconds for trial in timed], dtype=np.float64)
    if costs.step_seconds is None:
        return _Times(measured=float(measured.mean()) * len(plan.first_epoch) if timed else None)
    if plan.batching.pool_size is None:
        epoch = estimated_epoch_seconds(plan.padded, plan.table, costs.step_seconds, drop_last=plan.config.drop_last)
    else:
        epoch = float(plan.first_epoch.seconds(costs.step_seconds).sum())
    if not timed:
        return _Times(estimated=epoch)
    shapes = [[float(trial.batch_size) for trial in timed], [trial.length for trial in timed]]
    if plan.lengths.targets is not None:
        shapes.append([float(trial.target_length or 0.0) for trial in timed])
    estimated = np.maximum(costs.step_seconds(*np.array(shapes)), 1e-12)
    ratio = float(measured.sum() / estimated.sum())
    error = None
    if len(timed) >= _FEWEST_FOR_ERROR:
        deviation = float(np.std(measured - ratio * estimated, ddof=1))
        error = deviation * math.sqrt(len(timed)) / float(estimated.sum())
    return _Times(measured=ratio * epoch, estimated=epoch, ratio=ratio, ratio_error=error)


def _warnings(steps: DoneSteps, costs: Costs, limit_bytes: int) -> Iterator[str]:
    rest = steps.rest_growth()
    if steps.alloc_retries:
        yield (
            f"The allocator emptied its cache {counted(steps.alloc_retries, 'time')} to go on, which costs time and is "
            "the last step before running out of memory. Keep more free with --memory-fraction or --reserve, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, and probe again"
        )
    if rest is not None and rest.creeps(limit_bytes) and rest.pace < _SAME_PACE:
        slows_down = "no more at the end, as with a cache that is full"
        if rest.pace > 0:
            slows_down = "more slowly at the end, as with a cache that fills up"
        remedy = "Run more with --steps to see whether it has stopped"
        yield f"Memory in use between steps {rest}, but {slows_down}. {remedy}"
    yield from recompile_warnings([*steps.worst, *steps.shuffled])
    if steps.failures:
        return
    if rest is None and any(trial.rest_bytes is not None for trial in steps.shuffled):
        yield f"Whether memory creeps is unknown: that takes {FEWEST_STEPS} steps. Run more with --steps"
    elif rest is None:
        yield "Whether memory creeps is unknown: this system does not report how much is in use"
    if costs.step_seconds is None:
        yield (
            "The time of an epoch was not compared with an estimate, because no step times are known: "
            "`batchtune probe-oom` measures them"
        )


def _failure_reasons(failures: Sequence[VerifyFailure], plan: VerifyPlan, costs: Costs) -> Iterator[str]:
    """Yield a sentence for each bucket with a batch that failed: its first, and how many more."""
    by_bucket: dict[int, list[VerifyFailure]] = {}
    for failure in failures:
        by_bucket.setdefault(failure.bucket, []).append(failure)
    for of_bucket in by_bucket.values():
        first = of_bucket[0]
        sentence = _failure_reason(first, len(of_bucket) - 1, plan.config.bucket_boundaries, plan.lengths.unit)
        if first.outcome == "oom":
            sentence += _what_the_probe_knew(first, costs)
        yield sentence


def _failure_reason(failure: VerifyFailure, others: int, boundaries: Sequence[float], unit: str | None) -> str:
    shape = f"{failure.batch_size:,} × {format_length(failure.length, unit)}"
    if failure.target_length is not None:
        shape += f" with targets up to {failure.target_length:g}"
    boundary = format_length(boundaries[failure.bucket], unit)
    sentence = (
        f"A batch of {shape} {_WENT[failure.outcome]} (bucket {failure.bucket + 1} of {len(boundaries)}, up to "
        f"{boundary})"
    )
    if others:
        sentence += f", and {others} more of it"
    if failure.error and failure.outcome != "oom":
        sentence += f": {failure.error}"
    return sentence


def _what_the_probe_knew(failure: VerifyFailure, costs: Costs) -> str:
    """Return whether the probe proved the batch that ran out of memory; empty without a probe."""
    if costs.proven_by is None:
        return ""
    trial = costs.proven_by(failure.length, failure.batch_size)
    if trial is None:
        return "; the probe ran no batch as large with memory to spare, so this size was not proven"
    return f"; trial {trial} of the probe ran a batch as large with memory to spare: memory use has changed"
