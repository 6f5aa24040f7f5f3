"""Judges the steps of a verification: failures, memory that creeps, times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.results import Device, Trial, Verification, VerifyFailure, WorkloadRecord, meta_of
from batchtune.trust import recompile_warnings
from batchtune.tuning.costs import Costs
from batchtune.tuning.epoch_cost import estimated_epoch_seconds
from batchtune.tuning.simulation import shapes_of
from batchtune.tuning.verify_plan import VerifyPlan
from batchtune.units import counted, format_length, format_seconds, format_size

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
_FEWEST_FOR_SPREAD = 4
_RECORDED = ("steps", "minutes", "epoch", "seed", "time_tolerance")
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
    second, third, last = quarters = np.array_split(np.array(known, dtype=np.float64), 4)[1:]
    medians = [float(np.median(quarter)) for quarter in quarters]
    total, steps = medians[2] - medians[0], len(known) / 2
    steady = medians[0] < medians[1] < medians[2]
    return Growth(total, steps, steady, _noise(quarters, total / steps), _pace(second, third, last))


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

    The `first_round` of `worst` ran each worst shape for the first time; `planned` steps were to be shuffled, None if
    time decides.
    """

    worst: list[Trial] = field(default_factory=list)
    shuffled: list[Trial] = field(default_factory=list)
    failures: list[VerifyFailure] = field(default_factory=list)
    first_round: int = 0
    planned: int | None = None

    @property
    def alloc_retries(self) -> int | None:
        """How often the allocator emptied its cache in steps that passed, after each worst shape had been run once."""
        later = (*self.worst[self.first_round :], *self.shuffled)
        known = [trial.alloc_retries for trial in later if trial.outcome == "ok" and trial.alloc_retries is not None]
        return sum(known) if known else None

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


def judge(steps: DoneSteps, plan: VerifyPlan, workload: WorkloadRecord, device: Device, costs: Costs) -> Verification:
    """Judge all steps that were run."""
    limit_bytes, tolerance = device.limit_bytes, plan.settings.time_tolerance
    passed, rest, failures = _until_failure(steps.shuffled), steps.rest_growth(), steps.failures
    ran = (*steps.worst, *steps.shuffled)
    reserved = growth_of([one.reserved_bytes for one in passed])
    unused = growth_of([one.reserved_bytes and one.reserved_bytes - (one.rest_bytes or 0) for one in passed])
    estimated, measured, ratio, spread = _times(steps.shuffled, plan, costs)
    leak = steps.leak(limit_bytes)
    reasons = [*([] if leak is None else [leak]), *_failure_reasons(failures, plan, costs)]
    if unused is not None and unused.fragments(limit_bytes):
        reasons.append(
            f"The allocator's cache {unused} and was still growing: batches of different shapes fragment the memory. "
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True, or keep more memory free with --memory-fraction, and "
            "probe again"
        )
    if not failures and ratio is not None and abs(ratio - 1) > tolerance:
        assert measured is not None and estimated is not None
        least = f"{1 - tolerance:.2f} to " if tolerance < 1 else "up to "
        reasons.append(
            f"An epoch takes {format_seconds(measured)} measured against {format_seconds(estimated)} estimated "
            f"({ratio:.2f} times, where {least}{1 + tolerance:.2f} is allowed): {_WHY[ratio > 1]}. "
            "Probe again with --force while the machine does nothing else, or allow more with --time-tolerance"
        )
    stream = plan.stream
    how: dict[str, Any] = {"pool_size": plan.batching.pool_size, "batch_overhead": plan.batching.batch_overhead}
    if stream is not None:
        how = {name: getattr(plan.config, name) for name in ("algorithm", "buffer_size", "max_padding_ratio")}
    return Verification(
        meta=meta_of(Verification),
        lengths=plan.lengths.summary(),
        workload=workload,
        device=device,
        settings={
            **{name: getattr(plan.settings, name) for name in _RECORDED},
            "multiple_of": plan.config.evidence.multiple_of,
            **({} if stream is None else asdict(stream.sharding)),
        },
        bucket_boundaries=plan.config.bucket_boundaries,
        bucket_batch_sizes=plan.config.bucket_batch_sizes,
        max_batch_length=plan.config.max_batch_length,
        **how,
        worst_steps=len(steps.worst),
        steps=sum(trial.outcome == "ok" for trial in steps.shuffled),
        planned_steps=steps.planned,
        epoch_batches=len(plan.first_epoch),
        failures=failures,
        alloc_retries=steps.alloc_retries,
        peak_bytes=max((peak for trial in ran if (peak := trial.peak_bytes) is not None), default=None),
        reserved_bytes=max((held for trial in ran if (held := trial.reserved_bytes) is not None), default=None),
        rest_growth_bytes=None if rest is None else round(rest.total_bytes),
        reserved_growth_bytes=None if reserved is None else round(reserved.total_bytes),
        estimated_epoch_seconds=estimated,
        measured_epoch_seconds=measured,
        time_ratio=ratio,
        time_ratio_spread=spread,
        holds=not reasons,
        reasons=reasons,
        warnings=list(_warnings(steps, costs, limit_bytes)),
        proposal=None,
    )


def _times(
    shuffled: Sequence[Trial], plan: VerifyPlan, costs: Costs
) -> tuple[float | None, float | None, float | None, float | None]:
    """Return an epoch's estimated and measured seconds, and the ratio of the steps' times with its spread.

    The same batches are compared: the ratio of the sums over the steps that were run, which weighs each step by its
    time, scales the epoch's estimate. Without an estimate the mean step is multiplied by the number of batches.
    """
    timed = [trial for trial in shuffled if trial.step_seconds]
    measured: FloatArray = np.array([trial.step_seconds for trial in timed], dtype=np.float64)
    if costs.step_seconds is None:
        return None, float(measured.mean()) * len(plan.first_epoch) if timed else None, None, None
    if plan.batching.pool_size is None:
        epoch = estimated_epoch_seconds(plan.padded, plan.table, costs.step_seconds, drop_last=plan.config.drop_last)
    else:
        epoch = float(np.sum(costs.step_seconds(*shapes_of([plan.first_epoch]))))
    if not timed:
        return epoch, None, None, None
    shapes = [
        [float(trial.batch_size) for trial in timed],
        [trial.length for trial in timed],
        *([[trial.target_length for trial in timed]] if plan.lengths.targets is not None else []),
    ]
    estimated = np.maximum(costs.step_seconds(*np.array(shapes)), 1e-12)
    ratio = float(measured.sum() / estimated.sum())
    spread = _interquartile_range(measured / estimated) if measured.size >= _FEWEST_FOR_SPREAD else None
    return epoch, ratio * epoch, ratio, spread


def _warnings(steps: DoneSteps, costs: Costs, limit_bytes: int) -> Iterator[str]:
    rest = steps.rest_growth()
    if steps.alloc_retries:
        yield (
            f"The allocator emptied its cache {counted(steps.alloc_retries, 'time')} to go on, which costs time and is "
            "the last step before running out of memory. Keep more free with --memory-fraction or --reserve, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, and probe again"
        )
    if rest is not None and rest.creeps(limit_bytes) and rest.pace < _SAME_PACE:
        how, cache = ("more slowly", "fills up") if rest.pace > 0 else ("no more", "is full")
        yield (
            f"Memory in use between steps {rest}, but {how} at the end, as with a cache that {cache}. Run more with "
            "--steps to see whether it has stopped"
        )
    yield from recompile_warnings([*steps.worst, *steps.shuffled])
    if steps.failures:
        return
    if rest is None:
        known = any(trial.rest_bytes is not None for trial in steps.shuffled)
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


def _failure_reasons(failures: Sequence[VerifyFailure], plan: VerifyPlan, costs: Costs) -> Iterator[str]:
    """Yield a sentence for each bucket with a batch that failed: its first, and how many more."""
    boundaries, unit = plan.config.bucket_boundaries, plan.lengths.unit
    for bucket in dict.fromkeys(failure.bucket for failure in failures):
        first, *others = (failure for failure in failures if failure.bucket == bucket)
        target = "" if first.target_length is None else f" with targets up to {first.target_length:g}"
        more = f", and {len(others)} more of it" if others else ""
        error = f": {first.error}" if first.error and first.outcome != "oom" else ""
        proof = ""
        if costs.proven_by is not None and first.outcome == "oom":
            trial = costs.proven_by(first.length, first.batch_size)
            proof = (
                "; the probe ran no batch as large with memory to spare, so this size was not proven"
                if trial is None
                else f"; trial {trial} of the probe ran a batch as large with memory to spare: memory use has changed"
            )
        yield (
            f"A batch of {first.batch_size:,} × {format_length(first.length, unit)}{target} {_WENT[first.outcome]} "
            f"(bucket {bucket + 1} of {len(boundaries)}, up to {format_length(boundaries[bucket], unit)})"
            f"{more}{error}{proof}"
        )
