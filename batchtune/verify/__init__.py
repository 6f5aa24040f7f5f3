"""Runs the recommended batches for real: from a plan to judged steps and `verify.json`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from batchtune.allocators import EXPANDABLE, NATIVE
from batchtune.errors import ResultError, WorkloadError
from batchtune.probe.confirmation import alternating, in_steps
from batchtune.probe.failures import message_verdict
from batchtune.probe.measurer import Measurer
from batchtune.probe.messages import failed_in
from batchtune.probe.nodes import Nodes
from batchtune.probe.requests import Ran, RecordedStep, Replay
from batchtune.probe.settings import refuse_other_allocator
from batchtune.probe.supervisor import measurer_for
from batchtune.results import (
    VERIFY_FILE,
    BatchShape,
    Device,
    Outcome,
    Trial,
    Verification,
    VerifyFailure,
    VerifyPhase,
    WorkloadRecord,
    write_result,
)
from batchtune.run_folder import alone_in
from batchtune.verify.plan import FEWEST_STEPS, Plan, PlannedBatch, Subject
from batchtune.verify.rules import DoneSteps, judge

# Shuffled batches run in this many more processes if starting one takes at most this share of the time of the steps
# so far; in a brief plan, if its time is enough for that. On a GPU one more always proves a table: what the allocator
# holds differs from process to process.
_MOST_RESTARTS = 2
_START_SHARE = 0.5
# Most processes that run out of memory do so in the first 32 steps.
_STEPS_AFTER_A_RESTART = 64
_FAULTS = ("crash", "timeout")
# On CUDA's native allocator a table of a checkpointed transformer-lm large in 80 GiB passed in two processes, and 2 of
# 5 others ran out of memory in their first steps. So recorded steps are replayed in other orders.
_FEWEST_RECORDED = 3
_MOST_RECORDED = 60
_FEWEST_REPLAY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """The progress of a verification, before each step.

    Attributes:
        done, total: Steps of this phase, of shuffled ones in this process.
        process: Number of the process, from 1.
    """

    phase: VerifyPhase
    shape: BatchShape
    done: int
    total: int
    device: Device
    process: int = 1


OnVerifyProgress = Callable[[VerifyProgress], None]


def run_verify(
    plan: Plan,
    subject: Subject,
    folder: Path,
    *,
    on_note: Callable[[str], None],
    on_progress: OnVerifyProgress,
    nodes: Nodes | None = None,
    deadline: float = math.inf,
) -> Verification:
    """Run the sampler's batches in worker processes and write `verify.json`, unless the plan is a brief one.

    Calls `on_note` with a sentence for the user, `on_progress` before each step. Raises ResultError if the probe was of
    another device or the file can't be written, WorkloadError if the workload failed for another reason than memory,
    ProbeError if the device can't be used, or if something else has taken its memory.
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
        verification = verify(
            measurer, plan, workload, on_progress=on_progress, deadline=deadline
        )
        if not plan.settings.brief:
            write_result(folder / VERIFY_FILE, verification)
    return verification


def verify(
    stepper: Measurer,
    plan: Plan,
    workload: WorkloadRecord,
    *,
    on_progress: OnVerifyProgress,
    deadline: float = math.inf,
) -> Verification:
    """Run the planned batches, one step after the other, until the deadline on the monotonic clock; and judge them.

    The worst shapes are run once, the largest first, then once more in alternation; a step that fails does not keep
    the others from being tried. If all pass, shuffled batches follow, up to the first that fails. Only these are
    timed: the worst shapes are their warm-up. What they asked of a GPU's allocator is then replayed in other orders.
    Where the allocator fragments, pairs of shapes follow, each on an emptied cache. If all passed, other shuffled
    batches run in further processes: training starts in a fresh one. A brief plan leaves out the worst shapes, and
    ends with the first failure; its shuffled batches end where they take longer than its settings say. Raises as
    `run_verify` does.
    """
    started = time.monotonic()
    device = stepper.start()
    start_seconds = time.monotonic() - started
    if plan.probe is not None and device.name != plan.probe.device.name:
        raise ResultError(
            f"the run was measured on {plan.probe.device.name}; this is {device.name}",
            "Verify on the device that was probed, or probe this one in another folder with --run.",
        )
    refuse_other_allocator("the table", plan.config.evidence.allocator, device)
    runner = _Runner(plan, stepper, workload.spec, device, on_progress, deadline)
    if plan.settings.brief:
        runner.enough_at = time.monotonic() + 2 * plan.settings.seconds
    runner.run(start_seconds)
    return judge(runner.done, plan, workload, device)


@dataclass(slots=True)
class _Runner:
    """Runs a verification's steps one after the other, and keeps their trials in `done`."""

    plan: Plan
    stepper: Measurer
    workload: str
    device: Device
    on_progress: OnVerifyProgress
    deadline: float
    enough_at: float = math.inf  # shuffled batches then end, once the fewest have run
    done: DoneSteps = field(default_factory=DoneSteps)
    release: bool = False
    last_step: list[PlannedBatch] = field(default_factory=list)
    recorded: list[tuple[list[PlannedBatch], RecordedStep | None]] = field(
        default_factory=list
    )

    def run(self, start_seconds: float) -> None:
        """Run all phases; a process takes so long to start."""
        done = self.done
        if not self.plan.settings.brief:
            self._run_worst()
        planned = self.plan.planned_steps
        if not done.failures:
            self._run(
                "shuffled",
                itertools.islice(self.plan.shuffled_batches(), planned),
                done.shuffled,
                planned,
            )
        if not done.failures:
            self._replay()
        if self.device.fragments and not self._is_refuted:
            self._run_pairs()
        for restart in range(1, _MOST_RESTARTS + 1):
            if done.failures or done.unfinished or not self._may_restart(start_seconds):
                break
            self.stepper.start()
            self.release = False
            steps = min(planned, _STEPS_AFTER_A_RESTART)
            done.processes += 1
            restarted: list[Trial] = []
            self._run(
                "shuffled",
                itertools.islice(self.plan.shuffled_batches(restart), steps),
                restarted,
                steps,
            )
            done.restarted += restarted
        if done.failures and self.device.kind == "cuda":
            self.stepper.start()  # or an error, if something else has taken the memory: then no shape is to blame

    @property
    def _is_refuted(self) -> bool:
        """Whether no further failure matters: a brief plan only asks whether all batches fit."""
        return self.plan.settings.brief and bool(self.done.failures)

    def _may_restart(self, start_seconds: float) -> bool:
        """Return whether another process is worth the time of its start."""
        if self.device.fragments and not self.done.restarted:
            return True
        if not self.plan.settings.brief:
            return start_seconds <= _START_SHARE * self.done.seconds
        ends = self.enough_at
        if self.device.kind == "cuda" and not self.done.restarted:
            ends = self.deadline
        return time.monotonic() + start_seconds < ends

    def _run_worst(self) -> None:
        """Run the worst shapes, then those that passed in alternation."""
        done = self.done
        worst = self.plan.worst_batches
        self._run("worst", worst, done.worst, 2 * len(worst))
        passed = [
            batch
            for batch, trial in zip(worst, done.worst, strict=False)
            if trial.outcome == "ok"
        ]
        self._run("worst", alternating(passed), done.worst, len(worst) + len(passed))

    def _replay(self) -> None:
        """Replay what the recorded steps asked of a GPU's allocator, in other orders, until one runs out of memory."""
        steps = [step for _, step in self.recorded if step is not None]
        # A step that could not be recorded leaves unknown what later ones free.
        if len(steps) < max(_FEWEST_RECORDED, len(self.recorded)):
            return
        progress = VerifyProgress(
            phase="replayed",
            shape=self.recorded[0][0][0].shape,
            done=0,
            total=len(self.recorded),
            device=self.device,
        )
        self.on_progress(progress)
        seconds = max(_FEWEST_REPLAY_SECONDS, self.plan.settings.seconds)
        request = Replay(
            limit_bytes=self.device.limit_bytes,
            steps=steps,
            seconds=min(seconds, self.deadline - time.monotonic()),
            seed=self.plan.seed,
        )
        replayed = self.stepper.replay(request)
        if replayed is None:
            return
        self.done.replayed = replayed.steps
        self.done.replayed_processes = replayed.processes
        if replayed.failed is not None:
            # Of several batches of a step, the largest needs the most.
            step, _ = self.recorded[replayed.failed]
            largest = max(step, key=lambda batch: batch.shape.padded_length)
            self._fail("replayed", replayed.steps, largest, "oom", replayed.error)

    def _run_pairs(self) -> None:
        """Run the sequences, but none with a shape that has failed in one."""
        done = self.done
        sequences = self.plan.sequences
        total = sum(map(len, sequences))
        done.planned_pairs = total - len(sequences)
        failed = {failure.shape for failure in done.failures}
        for sequence in sequences:
            if self._is_refuted:
                return
            if any(batch.shape in failed for batch in sequence):
                continue
            self.release = True
            before = len(done.pairs)
            self._run("pairs", sequence, done.pairs, total)
            ran = done.pairs[before:]
            failed |= {trial.shape for trial in ran if trial.outcome != "ok"}
            passed = sum(trial.outcome == "ok" for trial in ran)
            # A step of more batches than the sequence has repeats it.
            done.passed_pairs += max(0, min(passed, len(sequence)) - 1)

    def _run(
        self,
        phase: VerifyPhase,
        batches: Iterable[PlannedBatch],
        trials: list[Trial],
        total: int,
    ) -> None:
        """Run a phase; `trials` are those of its steps so far. A failure ends all but the worst ones."""
        batches_per_step = 1  # where each is timed, a step trains on equal ones
        if self.plan.settings.brief:
            batches_per_step = self.device.accumulation
        for step in in_steps(batches, batches_per_step):
            if time.monotonic() > self.deadline:
                self.done.unfinished = True
                return
            has_enough = phase == "shuffled" and len(trials) >= FEWEST_STEPS
            if has_enough and time.monotonic() > self.enough_at:
                return
            shapes = [planned.shape for planned in step]
            progress = VerifyProgress(
                phase=phase,
                shape=shapes[0],
                done=len(trials),
                total=total,
                device=self.device,
                process=self.done.processes,
            )
            self.on_progress(progress)
            recording = self._records(phase)
            ran = self._take_step(shapes, recording=recording)
            trial = ran.trial
            if recording:
                self.recorded.append((step, ran.recorded))
            self.release = trial.outcome != "ok"  # a failure may leave the cache full
            if trial.outcome == "ok":
                trials += trial.of_each(shapes)
                self.last_step = step
                continue
            trials.append(trial)
            shape = trial.shape
            possible = [*self.last_step, *step]  # a loop may have held one of them
            is_of = (batch for batch in possible if batch.shape == shape)
            bucket = next(is_of, step[0]).bucket
            self._fail(
                phase,
                len(trials) - 1,
                PlannedBatch(shape, bucket),
                trial.outcome,
                trial.error,
            )
            if phase != "worst":
                return

    def _fail(
        self,
        phase: VerifyPhase,
        step: int,
        batch: PlannedBatch,
        outcome: Outcome,
        error: str | None,
    ) -> None:
        shape = batch.shape
        failure = VerifyFailure(
            phase=phase,
            step=step,
            bucket=batch.bucket,
            batch_size=shape.batch_size,
            length=shape.length,
            target_length=shape.target_length,
            outcome=outcome,
            error=error,
        )
        self.done.failures.append(failure)

    def _records(self, phase: VerifyPhase) -> bool:
        """Return whether to record what a step asks of torch's allocator: each rank has one of its own."""
        device = self.device
        return (
            device.allocator in (NATIVE, EXPANDABLE)
            and device.world_size == 1
            and phase in ("worst", "shuffled")
            and self.done.processes == 1
            and len(self.recorded) < _MOST_RECORDED
        )

    def _take_step(self, shapes: Sequence[BatchShape], *, recording: bool) -> Ran:
        """Run one step of these batches; a crash or a hang counts only if it comes again, with one of them alone.

        What may be an OOM in disguise counts as one only if a smaller batch then passes.
        """
        ran = self.stepper.step(
            shapes[0], shapes[1:], release=self.release, recording=recording
        )
        if ran.trial.outcome in _FAULTS:
            for alone in shapes:
                ran = self.stepper.step(alone)
                if ran.trial.outcome != "ok":
                    break
        trial = ran.trial
        shape = trial.shape
        is_error = trial.outcome == "error"
        if trial.outcome == "oom" and message_verdict(trial.error or "") == "disguised":
            smaller = replace(shape, batch_size=max(1, shape.batch_size // 2))
            is_error = (
                smaller == shape
                or self.stepper.step(smaller, release=True).trial.outcome != "ok"
            )
        if not is_error:
            return ran
        raise WorkloadError(
            failed_in(self.workload, ran),
            f"It did not run out of memory: the verification stops, and no {VERIFY_FILE} is written. "
            "Fix it and run the same command again.",
            ran.traceback,
        )
