"""Judges the steps of a verification: failures, memory that creeps, times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchtune.allocators import NATIVE
from batchtune.lengths import FloatArray
from batchtune.results import (
    Device,
    Trial,
    Verification,
    VerifyFailure,
    WorkloadRecord,
    meta_of,
)
from batchtune.trust import recompile_warnings
from batchtune.units import counted, format_length, format_seconds, format_size
from batchtune.verify.plan import FEWEST_STEPS, Plan, VerifyPlan

# As for the trials of the probe: what would take less than 5% of the limit in 10,000 more steps does no harm.
_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05
# Growth counts if it is this many times as large as its standard error, and more than a few pages: so much the
# interpreter itself takes now and then.
_ABOVE_NOISE = 4.0
_FEW_PAGES_BYTES = 64 << 10
_MOST_CORRELATED = 0.9
# At the end (the last tenth of the steps, but at least so many) a cache that fills up grows by less than this fraction
# of the pace before.
_FEWEST_AT_THE_END = 8
_SAME_PACE = 2 / 3
_FEWEST_FOR_ERROR = 4
_TIMES = (
    "estimated_epoch_seconds",
    "measured_epoch_seconds",
    "time_ratio",
    "time_ratio_error",
)
TIME_ENDED = "The time ended before all planned batches had run"
WENT = {
    "oom": "ran out of memory",
    "crash": "ended its process",
    "timeout": "took too long",
}
WHERE = {
    "worst": "alone",
    "shuffled": "among shuffled batches",
    "replayed": "as shuffled batches were replayed",
    "pairs": "after another shape",
}


def growth_of(figures: Sequence[int | None]) -> int | None:
    """Return by how much figures, one per step, grew from the second to the last quarter, by their medians.

    None if any is unknown, or for fewer than 12.
    """
    if None in figures or len(figures) < FEWEST_STEPS:
        return None
    _, second, _, last = np.array_split(np.array(figures, dtype=np.float64), 4)
    return round(np.median(last) - np.median(second))


def leaks(in_use: Sequence[int | None], limit_bytes: int) -> bool:
    """Return whether memory in use between 12 or more steps grew by more than is harmless, at one pace to the end.

    The first quarter, in which it may still settle, does not count; a cache that fills up grows more slowly at the end.
    """
    known = np.array(in_use, dtype=np.float64)
    _, *medians = [float(np.median(part)) for part in np.array_split(known, 4)]
    if (
        not medians[0] < medians[1] < medians[2]
        or medians[2] - medians[0] < _FEW_PAGES_BYTES
    ):
        return False
    quarter = known.size // 4
    before = known[quarter:-quarter] - known[quarter:-quarter].mean()
    steps = np.arange(before.size) - (before.size - 1) / 2
    slope = float(steps @ before) / float(steps @ steps)
    residuals = before - slope * steps
    variance = float(residuals @ residuals) / (before.size - 2)
    error = math.sqrt(variance / float(steps @ steps))
    smallest_slope = max(
        _HARMLESS_SHARE * limit_bytes / _FORESEEN_STEPS,
        _ABOVE_NOISE * error * _wandering(residuals),
        _FEW_PAGES_BYTES / (known.size / 2),
    )
    end = known[-max(_FEWEST_AT_THE_END, known.size // 10) :]
    first, second = np.array_split(end, 2)
    pace = (np.median(second) - np.median(first)) / (end.size / 2)
    return bool(slope > smallest_slope and pace >= _SAME_PACE * slope)


def _wandering(residuals: FloatArray) -> float:
    """Return by how much a slope's standard error is larger than if its residuals were independent; 1 if they are.

    A heap wanders: what one step left, the next finds. With a correlation r of neighbours, n steps tell as much as
    n (1 - r) / (1 + r) independent ones (Bartlett 1935).
    """
    square = float(residuals @ residuals)
    if square == 0:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / square
    correlation = min(max(correlation, 0.0), _MOST_CORRELATED)
    return float(np.sqrt((1 + correlation) / (1 - correlation)))


@dataclass(slots=True)
class DoneSteps:
    """All steps of a verification, in their order; `restarted` are shuffled ones, in further processes."""

    worst: list[Trial] = field(default_factory=list)
    shuffled: list[Trial] = field(default_factory=list)
    pairs: list[Trial] = field(default_factory=list)
    restarted: list[Trial] = field(default_factory=list)
    failures: list[VerifyFailure] = field(default_factory=list)
    processes: int = 1
    passed_pairs: int = 0
    planned_pairs: int = 0
    replayed: int = 0
    replayed_processes: int = 0
    unfinished: bool = False

    @property
    def ran(self) -> list[Trial]:
        """All of them."""
        return [*self.worst, *self.shuffled, *self.pairs, *self.restarted]

    @property
    def seconds(self) -> float:
        """How long they took."""
        return sum(
            trial.elapsed_seconds or trial.step_seconds or 0.0 for trial in self.ran
        )

    @property
    def passed(self) -> list[Trial]:
        """The shuffled steps, or the worst without any, before the first that failed: that changes what is in use."""
        return list(
            itertools.takewhile(
                lambda trial: trial.outcome == "ok", self.shuffled or self.worst
            )
        )


def judge(
    steps: DoneSteps, plan: Plan, workload: WorkloadRecord, device: Device
) -> Verification:
    """Judge all steps that were run."""
    in_use = [trial.rest_bytes for trial in steps.passed]
    growth = growth_of(in_use)
    times: dict[str, Any] = dict.fromkeys(_TIMES)
    if isinstance(plan, VerifyPlan):
        times |= _times(steps.shuffled, plan, device)
    retries = [
        trial.alloc_retries
        # Each worst shape had run once.
        for trial in (*steps.worst[len(plan.worst_batches) :], *steps.shuffled)
        if trial.alloc_retries is not None
    ]
    reserved = [trial.reserved_bytes for trial in steps.passed]
    reserved_growth = growth_of(reserved)
    reasons = list(_failures(steps, plan))
    if growth is not None and leaks(in_use, device.limit_bytes):
        leak = (
            f"Memory in use between steps grew by {format_size(growth)} in {len(in_use) // 2} steps, at the end as "
            "fast as before: the workload leaks, or fills a cache for which these steps are too few (run more with "
            "--steps). Look for code that keeps tensors, such as a loss that is accumulated without .item()"
        )
        reasons.insert(0, leak)
    unused = [
        (size or 0) - (used or 0) for size, used in zip(reserved, in_use, strict=True)
    ]
    if reserved_growth is not None and leaks(unused, device.limit_bytes):
        remedy = "Keep more memory free with --memory-fraction, and probe again"
        if device.allocator == NATIVE:
            remedy += ", or probe again with --allocator expandable"
        reasons.append(
            f"The allocator's cache grew by {format_size(reserved_growth)} and was still growing: batches of different "
            f"shapes fragment the memory. {remedy}"
        )
    if steps.unfinished and not steps.failures:
        reasons.append(TIME_ENDED)
    if not steps.failures:
        reasons += _time_reasons(times, plan.settings.time_tolerance)
    return Verification(
        meta=meta_of(Verification),
        lengths=plan.lengths.summary(),
        workload=workload,
        device=device,
        worst_steps=len(steps.worst),
        steps=sum(trial.outcome == "ok" for trial in steps.shuffled),
        planned_steps=plan.planned_steps,
        epoch_batches=plan.epoch_batches,
        failures=steps.failures,
        alloc_retries=sum(retries) if retries else None,
        peak_bytes=_largest(trial.peak_bytes for trial in steps.ran),
        reserved_bytes=_largest(trial.reserved_bytes for trial in steps.ran),
        rest_growth_bytes=growth,
        reserved_growth_bytes=reserved_growth,
        processes=steps.processes,
        restarted_steps=sum(trial.outcome == "ok" for trial in steps.restarted),
        pairs=steps.passed_pairs,
        planned_pairs=steps.planned_pairs,
        replayed_steps=steps.replayed,
        replayed_processes=steps.replayed_processes,
        unfinished=steps.unfinished,
        holds=not reasons,
        reasons=reasons,
        warnings=list(_warnings(steps, sum(retries), growth, plan, device)),
        **plan.recorded,
        **times,
    )


def _largest(figures: Iterable[int | None]) -> int | None:
    return max(filter(None, figures), default=None)


def _failures(steps: DoneSteps, plan: Plan) -> Iterator[str]:
    """Yield the first failure of each bucket."""
    buckets = len(plan.recorded["bucket_boundaries"])
    for failure in {
        failure.bucket: failure for failure in reversed(steps.failures)
    }.values():
        shape = f"{failure.batch_size:,} × {format_length(failure.length, plan.lengths.unit)}"
        yield (
            f"A batch of {shape} {WENT[failure.outcome]} {WHERE[failure.phase]} (bucket {failure.bucket + 1} of "
            f"{buckets}): "
            f"{failure.error}"
        )


def _time_reasons(times: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """Yield that steps take another time than estimated."""
    ratio = times["time_ratio"]
    if ratio is not None and abs(ratio - 1) > tolerance:
        yield (
            f"An epoch takes {format_seconds(times['measured_epoch_seconds'])} measured against "
            f"{format_seconds(times['estimated_epoch_seconds'])} estimated: {ratio:.2f} times, where "
            f"{max(0.0, 1 - tolerance):.2f} to {1 + tolerance:.2f} is allowed. Probe again with --force while the "
            "machine does nothing else, or allow more with --time-tolerance"
        )


def _times(
    shuffled: Sequence[Trial], plan: VerifyPlan, device: Device
) -> dict[str, Any]:
    """Return the fields of the record on an epoch's measured and estimated time; None where unknown.

    The same batches are compared: the ratio of the sums over the steps that were run, which weighs each step by its
    time, scales the epoch's estimate. Without an estimate the mean batch is multiplied by their number. A step of a
    script trains on all batches of an optimizer step, which are equal.
    """
    times: dict[str, Any] = {}
    timed = [trial for trial in shuffled if trial.step_seconds]
    steps = np.array([trial.step_seconds for trial in timed], dtype=np.float64)
    seconds = steps / device.accumulation
    if timed:
        times["measured_epoch_seconds"] = float(seconds.mean()) * len(plan.first_epoch)
    step_seconds = plan.costs.step_seconds
    if step_seconds is None:
        return times
    epoch = float(plan.first_epoch.seconds(step_seconds).sum())
    times["estimated_epoch_seconds"] = epoch
    if timed:
        estimated = plan.seconds_of([trial.shape for trial in timed])
        ratio = float(seconds.sum() / estimated.sum())
        times["time_ratio"] = ratio
        times["measured_epoch_seconds"] = ratio * epoch
        if len(timed) >= _FEWEST_FOR_ERROR:
            deviation = np.std(seconds - ratio * estimated, ddof=1)
            times["time_ratio_error"] = float(
                deviation * math.sqrt(len(timed)) / estimated.sum()
            )
    return times


def _warnings(
    steps: DoneSteps,
    retries: int,
    growth: int | None,
    plan: Plan,
    device: Device,
) -> Iterator[str]:
    """Yield why figures may be wrong, and what is not known."""
    if device.simulated:
        yield (
            f"Verified on one rank's shard of {counted(device.world_size, 'rank')} (simulated): without communication, "
            "neither its time nor its memory. Verify on real ranks with --nproc-per-node"
        )
    if retries:
        yield (
            f"The allocator emptied its cache {counted(retries, 'time')} to go on, which costs time and is "
            "the last step before running out of memory. Keep more free with --memory-fraction or --reserve, and probe "
            "again"
        )
    yield from recompile_warnings([*steps.worst, *steps.shuffled])
    if steps.failures:
        return
    if growth is None:
        yield f"It is unknown whether memory creeps: that takes {FEWEST_STEPS} steps that report the memory in use"
    if plan.costs.step_seconds is None:
        yield (
            "The time of an epoch was not compared with an estimate, because no step times are known: "
            "`batchtune probe-oom` measures them"
        )
