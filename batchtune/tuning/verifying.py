"""Verifies from end to end: runs the recommended batches, judges them, and writes `verify.json`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.lengths import IntArray
from batchtune.probe.confirmation import alternating
from batchtune.probe.oom import message_verdict
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    VERIFY_FILE,
    Device,
    Proposal,
    Trial,
    Verification,
    VerifyFailure,
    VerifyPhase,
    WorkloadRecord,
    write_result,
)
from batchtune.shapes import BatchShape
from batchtune.tuning.costs import Costs, costs_of
from batchtune.tuning.run_folder import alone_in
from batchtune.tuning.verify_plan import PlannedBatch, Subject, VerifyPlan
from batchtune.tuning.verify_rules import FEWEST_STEPS, DoneSteps, judge
from batchtune.units import rounded_down

# Shuffled steps with smaller sizes if the larger ones never got to any: enough to see a leak.
_PROPOSAL_STEPS = 2 * FEWEST_STEPS
# By how much a batch size is lowered, try by try, if the probe knows no better.
_CUTS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
_SINGLE_FAILS = (
    "A single example fails too, so no smaller batch size helps: leave out the longest with --max-length, or allow "
    "more memory, and probe again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """The progress of a verification, before each step; `doing` is `proposal` while smaller sizes are tried.

    Attributes:
        done, total: Steps of this kind; the total is None if time decides.
        seconds_left: An estimate; None at the beginning.
    """

    doing: Literal["worst", "shuffled", "proposal"]
    shape: BatchShape
    done: int
    total: int | None
    seconds_left: float | None
    device: Device


OnProgress = Callable[[VerifyProgress], None]


def run_verify(
    plan: VerifyPlan,
    subject: Subject,
    folder: Path,
    *,
    on_note: Callable[[str], None] | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Verification:
    """Run the sampler's batches in a worker process and write `verify.json`, whole or not at all.

    Calls `on_note` with a sentence for the user, `on_progress` before each step. Raises ResultError if the probe was of
    another device or the file can't be written, WorkloadError if the workload failed for another reason than memory,
    ProbeError if the device can't be used.
    """
    settings = structs.replace(subject.settings, trial_timeout_seconds=plan.settings.step_timeout_seconds)
    workload = WorkloadRecord(spec=settings.workload, options=settings.options)
    examples = plan.lengths.count
    with (
        alone_in(folder),
        Supervisor(settings, subject.limit_bytes, examples=examples, on_note=on_note) as supervisor,
    ):
        found = verify(supervisor, plan, workload, on_progress=on_progress)
        write_result(folder / VERIFY_FILE, found)
    return found


def verify(
    stepper: Supervisor,
    plan: VerifyPlan,
    workload: WorkloadRecord,
    *,
    on_progress: OnProgress = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Verification:
    """Run the worst shapes, then shuffled batches, one step after the other in one worker, and judge them.

    The worst shapes are run once, the largest first, then once more in alternation; a step that fails does not keep
    the others from being tried. If all pass, the shuffled batches follow, up to the first that fails. Only these are
    timed: the worst shapes are their warm-up. Raises as `run_verify` does.
    """
    probe, device = plan.probe, stepper.start()
    if probe is not None and device.name != probe.device.name:
        raise ResultError(
            f"the run was measured on {probe.device.name}; this is {device.name}",
            "Verify on the device that was probed, or probe this one in another folder with --run.",
        )
    costs = costs_of(probe) if probe else Costs()
    if plan.config.evidence.multiple_of is not None:
        costs = replace(costs, frontier=costs.continued_frontier)

    def run(tried: VerifyPlan) -> DoneSteps:
        runner = _Runner(tried, stepper, workload.spec, device, on_progress, clock, for_proposal=tried is not plan)
        runner.run()
        return runner.done

    done = run(plan)
    found = judge(done, plan, workload, device, costs)
    if not found.failures or done.leak(device.limit_bytes) is not None:  # a leak would stop any size
        return found
    steps = max(len(done.shuffled), min(_PROPOSAL_STEPS, done.planned or _PROPOSAL_STEPS))

    def run_smaller(batch_sizes: IntArray) -> DoneSteps:
        stepper.start()  # a fresh worker, as for the sizes that failed; and no fewer steps
        return run(plan.with_sizes(batch_sizes, steps))

    try:
        return _with_proposal(found, plan, costs, run_smaller)
    except (ProbeError, WorkloadError) as error:  # the result so far must not be lost
        untried = f"Smaller sizes could not be tried: {error.message}"
        return structs.replace(found, warnings=[*found.warnings, untried])


@dataclass(slots=True)
class _Runner:
    """Runs a verification's steps one after the other, and keeps their trials in `done`."""

    plan: VerifyPlan
    stepper: Supervisor
    workload: str
    device: Device
    on_progress: OnProgress
    clock: Callable[[], float]
    for_proposal: bool
    done: DoneSteps = field(default_factory=DoneSteps)
    release: bool = False

    def run(self) -> None:
        """Run the worst shapes, those that passed in alternation, then shuffled batches until enough or one fails."""
        done, settings, probe = self.done, self.plan.settings, self.plan.probe
        worst = self.plan.worst_batches(probe.models.peak_bytes if probe else None)
        done.first_round, started = len(worst), self.clock()
        for planned in worst:
            self._run(planned, "worst", 2 * len(worst), started)
        again = [batch for batch, trial in zip(worst, done.worst, strict=True) if trial.outcome == "ok"]
        for planned in alternating(again):
            self._run(planned, "worst", len(worst) + len(again), started)
        done.planned = len(self.plan.first_epoch) if settings.epoch else settings.steps
        started = self.clock()
        for ran, planned in enumerate(self.plan.shuffled_batches()):
            late = ran > 0 and self.clock() - started >= 60 * (settings.minutes or 0.0)
            if done.failures or (late if done.planned is None else ran >= done.planned):
                break
            self._run(planned, "shuffled", done.planned, started)

    def _run(self, planned: PlannedBatch, phase: VerifyPhase, total: int | None, started: float) -> None:
        done, shape = self.done.worst if phase == "worst" else self.done.shuffled, planned.shape
        spent, left = self.clock() - started, None
        if total is None:
            left = max(0.0, 60 * (self.plan.settings.minutes or 0.0) - spent)
        elif done:
            left = spent / len(done) * (total - len(done))
        self.on_progress(
            VerifyProgress(
                doing="proposal" if self.for_proposal else phase,
                shape=shape,
                done=len(done),
                total=total,
                seconds_left=left,
                device=self.device,
            )
        )
        trial = self._take_step(shape)
        self.release = trial.outcome != "ok"  # a failure may leave the cache full
        if trial.outcome != "ok":
            self.done.failures.append(
                VerifyFailure(
                    phase=phase,
                    step=len(done),
                    bucket=planned.bucket,
                    batch_size=shape.batch_size,
                    length=shape.length,
                    target_length=shape.target_length,
                    outcome=trial.outcome,
                    error=trial.error,
                )
            )
        done.append(trial)

    def _take_step(self, shape: BatchShape) -> Trial:
        """Run one step; what may be an OOM in disguise counts as one only if a smaller batch then passes."""
        ran = self.stepper.step(shape, release=self.release)
        if ran.trial.outcome == "oom" and message_verdict(ran.trial.error or "") == "disguised":
            smaller = replace(shape, batch_size=max(1, shape.batch_size // 2))
            if smaller != shape and self.stepper.step(smaller, release=True).trial.outcome == "ok":
                return ran.trial
        elif ran.trial.outcome != "error":
            return ran.trial
        raise WorkloadError(
            f"{self.workload} failed in its {ran.stage or 'step'}, with a batch of {shape}: {ran.trial.error}",
            f"It did not run out of memory: the verification stops, and no {VERIFY_FILE} is written. "
            "Fix it and run the same command again.",
            ran.traceback,
        )


def _with_proposal(
    found: Verification, plan: VerifyPlan, costs: Costs, run: Callable[[IntArray], DoneSteps]
) -> Verification:
    """Return the result with the next smaller sizes that pass when they are run like the ones that failed.

    A bucket that failed gets what the probe's frontier allows if that is less, then 5%, 10%, 20%, 40% and so on less,
    at least one less each time. Sizes of other buckets stay: they passed. So a bucket may get fewer examples than one
    of longer examples. If none passes, the last sizes that were tried are proposed, not verified.
    """
    table, fillable = plan.table, plan.fillable
    sizes, steps = np.minimum(table.batch_sizes, np.maximum(fillable, 1)), 0
    failing = {failure.bucket for failure in found.failures}
    lowered = np.zeros(table.num_buckets, dtype=np.bool_)
    for attempt, cut in enumerate(_CUTS):
        if any(sizes[bucket] <= 1 for bucket in failing):
            return structs.replace(found, reasons=[*found.reasons, _SINGLE_FAILS])
        for bucket in failing:
            most = min(int(sizes[bucket]) - 1, int(sizes[bucket] * (1 - cut)))
            if attempt == 0 and costs.frontier is not None:
                known = plan.padded.histogram
                fits = int(costs.frontier(known.lengths[[table.edges(known)[bucket + 1] - 1]])[0])
                most = fits if fits < sizes[bucket] else most
            sizes[bucket], lowered[bucket] = max(1, most), True
        # A size beyond what the data can fill stays as it is.
        proposed = np.where(lowered, sizes, table.batch_sizes)
        tried = run(proposed)
        if (leak := tried.leak(found.device.limit_bytes)) is not None:  # then nothing can be said of any size
            return structs.replace(found, reasons=[leak, *found.reasons])
        steps += len(tried.worst) + len(tried.shuffled)
        failing = {failure.bucket for failure in tried.failures}
        if not failing:
            break
    # For samplers that divide by the boundary: int(M / boundary) is at most the size as long as M is below
    # (size + 1) · boundary. A bucket that was not lowered and has all its examples in one batch sets no limit.
    limiting = lowered | (proposed < fillable)
    below = math.nextafter(float(((proposed + 1) * table.boundaries)[limiting].min()), 0)
    if below < plan.config.max_batch_length:
        below = rounded_down(below, 6)
    proposal = Proposal(
        bucket_batch_sizes=proposed.tolist(),
        max_batch_length=min(below, plan.config.max_batch_length),
        verified=not failing,
        steps=steps,
    )
    return structs.replace(found, proposal=proposal)
