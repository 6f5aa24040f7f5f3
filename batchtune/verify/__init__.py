"""Runs the recommended batches for real: from a plan to judged steps and `verify.json`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from batchtune.errors import ResultError, WorkloadError
from batchtune.probe.confirmation import alternating
from batchtune.probe.failures import message_verdict
from batchtune.probe.measurer import Measurer
from batchtune.probe.nodes import Nodes
from batchtune.probe.settings import refuse_other_allocator
from batchtune.probe.supervisor import measurer_for
from batchtune.results import (
    VERIFY_FILE,
    BatchShape,
    Device,
    Trial,
    Verification,
    VerifyFailure,
    VerifyPhase,
    WorkloadRecord,
    write_result,
)
from batchtune.run_folder import alone_in
from batchtune.verify.plan import PlannedBatch, Subject, VerifyPlan
from batchtune.verify.rules import DoneSteps, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """The progress of a verification, before each step.

    Attributes:
        done, total: Steps of this phase.
    """

    phase: VerifyPhase
    shape: BatchShape
    done: int
    total: int
    device: Device


OnProgress = Callable[[VerifyProgress], None]


def run_verify(
    plan: VerifyPlan,
    subject: Subject,
    folder: Path,
    *,
    on_note: Callable[[str], None],
    on_progress: OnProgress,
    nodes: Nodes | None = None,
) -> Verification:
    """Run the sampler's batches in a worker process and write `verify.json`, whole or not at all.

    Calls `on_note` with a sentence for the user, `on_progress` before each step. Raises ResultError if the probe was of
    another device or the file can't be written, WorkloadError if the workload failed for another reason than memory,
    ProbeError if the device can't be used.
    """
    settings = structs.replace(
        subject.settings, trial_timeout_seconds=plan.settings.step_timeout_seconds
    )
    workload = settings.subject
    measurer = measurer_for(
        settings,
        subject.limit_bytes,
        lengths=plan.lengths,
        on_note=on_note,
        nodes=nodes,
    )
    with alone_in(folder), measurer:
        verification = verify(measurer, plan, workload, on_progress=on_progress)
        write_result(folder / VERIFY_FILE, verification)
    return verification


def verify(
    stepper: Measurer,
    plan: VerifyPlan,
    workload: WorkloadRecord,
    *,
    on_progress: OnProgress,
) -> Verification:
    """Run the worst shapes, then shuffled batches, one step after the other in one worker, and judge them.

    The worst shapes are run once, the largest first, then once more in alternation; a step that fails does not keep
    the others from being tried. If all pass, the shuffled batches follow, up to the first that fails. Only these are
    timed: the worst shapes are their warm-up. Raises as `run_verify` does.
    """
    device = stepper.start()
    if plan.probe is not None and device.name != plan.probe.device.name:
        raise ResultError(
            f"the run was measured on {plan.probe.device.name}; this is {device.name}",
            "Verify on the device that was probed, or probe this one in another folder with --run.",
        )
    refuse_other_allocator("the table", plan.config.evidence.allocator, device)
    runner = _Runner(plan, stepper, workload.spec, device, on_progress)
    runner.run()
    return judge(runner.done, plan, workload, device)


@dataclass(slots=True)
class _Runner:
    """Runs a verification's steps one after the other, and keeps their trials in `done`."""

    plan: VerifyPlan
    stepper: Measurer
    workload: str
    device: Device
    on_progress: OnProgress
    done: DoneSteps = field(default_factory=DoneSteps)
    release: bool = False

    def run(self) -> None:
        """Run the worst shapes, those that passed in alternation, then shuffled batches until enough or one fails."""
        done = self.done
        worst = self.plan.worst_batches
        self._run("worst", worst, done.worst, 2 * len(worst))
        passed = [
            batch
            for batch, trial in zip(worst, done.worst, strict=True)
            if trial.outcome == "ok"
        ]
        self._run("worst", alternating(passed), done.worst, len(worst) + len(passed))
        planned = self.plan.planned_steps
        if not done.failures:
            shuffled = itertools.islice(self.plan.shuffled_batches(), planned)
            self._run("shuffled", shuffled, done.shuffled, planned)

    def _run(
        self,
        phase: VerifyPhase,
        batches: Iterable[PlannedBatch],
        trials: list[Trial],
        total: int,
    ) -> None:
        """Run a phase; `trials` are those of its steps so far. A failure ends the shuffled ones."""
        for planned in batches:
            shape = planned.shape
            progress = VerifyProgress(
                phase=phase,
                shape=shape,
                done=len(trials),
                total=total,
                device=self.device,
            )
            self.on_progress(progress)
            trial = self._take_step(shape)
            self.release = trial.outcome != "ok"  # a failure may leave the cache full
            trials.append(trial)
            if trial.outcome == "ok":
                continue
            self.done.failures.append(
                VerifyFailure(
                    phase=phase,
                    step=len(trials) - 1,
                    bucket=planned.bucket,
                    batch_size=shape.batch_size,
                    length=shape.length,
                    target_length=shape.target_length,
                    outcome=trial.outcome,
                    error=trial.error,
                )
            )
            if phase == "shuffled":
                return

    def _take_step(self, shape: BatchShape) -> Trial:
        """Run one step; what may be an OOM in disguise counts as one only if a smaller batch then passes."""
        ran = self.stepper.step(shape, release=self.release)
        trial = ran.trial
        is_error = trial.outcome == "error"
        if trial.outcome == "oom" and message_verdict(trial.error or "") == "disguised":
            smaller = replace(shape, batch_size=max(1, shape.batch_size // 2))
            is_error = (
                smaller == shape
                or self.stepper.step(smaller, release=True).trial.outcome != "ok"
            )
        if not is_error:
            return trial
        raise WorkloadError(
            f"{self.workload} failed in its {ran.stage or 'step'}, with a batch of {shape}: {trial.error}",
            f"It did not run out of memory: the verification stops, and no {VERIFY_FILE} is written. "
            "Fix it and run the same command again.",
            ran.traceback,
        )
