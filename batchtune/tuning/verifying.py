"""The verification from end to end: the recommended batches run for real, judged, and `verify.json` written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from msgspec import structs

from batchtune.batching.epochs import EpochShapes
from batchtune.cost import predict
from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.probe.confirmation import Stepper, alternating
from batchtune.probe.oom import message_verdict
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    VERIFY_FILE,
    Device,
    Probe,
    Trial,
    Verification,
    VerifyPhase,
    WorkloadRecord,
    write_result,
)
from batchtune.shapes import BatchShape
from batchtune.tuning.costs import Costs, costs_of
from batchtune.tuning.memory_growth import FEWEST_STEPS, Growth
from batchtune.tuning.run_folder import alone_in
from batchtune.tuning.verify_plan import (
    Candidate,
    PlannedBatch,
    Subject,
    VerifyPlan,
    VerifySettings,
    batch_of,
    check_table,
    shuffled_epochs,
    worst_batches,
)
from batchtune.tuning.verify_rules import DoneStep, DoneSteps, judge, leak_reason, propose

# Shuffled steps with smaller sizes if the larger ones never got to any: enough to see a leak.
_PROPOSAL_STEPS = 2 * FEWEST_STEPS
_SINGLE_FAILS = (
    "A single example fails too, so no smaller batch size helps: leave out the longest with --max-length, or allow "
    "more memory, and probe again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """The progress of a verification, before each step.

    Attributes:
        doing: `worst`, `shuffled`, or `proposal` while smaller sizes are tried.
        shape: The batch that is run next.
        done: Number of steps of this kind that are done.
        total: Number of steps of this kind; None if time decides.
        seconds_left: An estimate; None at the beginning.
        device: The device that runs them.
    """

    doing: Literal["worst", "shuffled", "proposal"]
    shape: BatchShape
    done: int
    total: int | None
    seconds_left: float | None
    device: Device


OnProgress = Callable[[VerifyProgress], None]
Clock = Callable[[], float]


@dataclass(slots=True)
class _Runner:
    """Runs a verification's steps one after the other, and keeps what they showed."""

    stepper: Stepper
    workload: str
    device: Device
    on_progress: OnProgress | None
    clock: Clock
    for_proposal: bool = False
    done: DoneSteps = field(default_factory=DoneSteps)
    planned_steps: int | None = None
    failed: bool = False
    release: bool = False

    def run_worst(self, batches: list[PlannedBatch]) -> None:
        """Run all worst shapes, once the largest first, then those that passed in alternation."""
        self.done.first_round = len(batches)
        started, total = self.clock(), 2 * len(batches)
        for planned in batches:
            self._run("worst", planned, total, started)
        again = [done.planned for done in self.done.worst if done.stepped.outcome == "ok"]
        for planned in alternating(again):
            self._run("worst", planned, len(batches) + len(again), started)

    def run_shuffled(self, epochs: Iterator[EpochShapes], settings: VerifySettings) -> None:
        """Run shuffled batches until enough are done or one fails; none if a worst shape has failed."""
        epoch = next(epochs)
        self.planned_steps = len(epoch) if settings.epoch else settings.steps
        started, index = self.clock(), 0
        while not self.failed and not self._enough(settings, started):
            if index == len(epoch):
                epoch, index = next(epochs), 0
            self._run("shuffled", batch_of(epoch, index), self.planned_steps, started, settings.minutes)
            index += 1

    def _enough(self, settings: VerifySettings, started: float) -> bool:
        if settings.minutes is not None:
            return len(self.done.shuffled) > 0 and self.clock() - started >= 60 * settings.minutes
        assert self.planned_steps is not None
        return len(self.done.shuffled) >= self.planned_steps

    def _run(
        self,
        phase: VerifyPhase,
        planned: PlannedBatch,
        total: int | None,
        started: float,
        minutes: float | None = None,
    ) -> None:
        done = self.done.worst if phase == "worst" else self.done.shuffled
        if self.on_progress is not None:
            spent, left = self.clock() - started, None
            if minutes is not None:
                left = max(0.0, 60 * minutes - spent)
            elif done and total is not None:
                left = spent / len(done) * (total - len(done))
            self.on_progress(
                VerifyProgress(
                    doing="proposal" if self.for_proposal else phase,
                    shape=planned.shape,
                    done=len(done),
                    total=total,
                    seconds_left=left,
                    device=self.device,
                )
            )
        stepped = self._take_step(planned.shape)
        self.release = stepped.outcome != "ok"  # a failure may leave the cache full
        self.failed |= self.release
        done.append(DoneStep(phase, len(done), planned, stepped))

    def _take_step(self, shape: BatchShape) -> Trial:
        """Run one step; what may be an OOM in disguise counts as one only if a smaller batch then passes.

        Raises:
            WorkloadError: The workload failed with something else.
        """
        ran = self.stepper.step(shape, release=self.release)
        stepped = ran.trial
        if stepped.outcome == "oom" and message_verdict(stepped.error or "") == "disguised":
            smaller = replace(shape, batch_size=max(1, shape.batch_size // 2))
            if smaller != shape and self.stepper.step(smaller, release=True).trial.outcome == "ok":
                return stepped
        elif stepped.outcome != "error":
            return stepped
        raise WorkloadError(
            f"{self.workload} failed in its {ran.stage or 'step'}, with a batch of {shape}: {stepped.error}",
            f"It did not run out of memory: the verification stops, and no {VERIFY_FILE} is written. "
            "Fix it and run the same command again.",
            ran.traceback,
        )


def run_verify(
    plan: VerifyPlan,
    subject: Subject,
    folder: Path,
    *,
    on_note: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Verification:
    """Run the sampler's batches in a worker process and write `verify.json`, whole or not at all.

    The run folder is held for this process alone while it runs. `on_note` is called with a sentence for the user,
    `on_progress` before each step.

    Raises:
        ResultError: The table does not take all lengths, the probe was of another device, or the file can't be written.
        WorkloadError: The workload failed, not for lack of memory.
        ProbeError: The device can't be used.
    """
    check_table(plan.lengths, plan.candidate.table)
    workload = subject.settings
    with (
        alone_in(folder),
        Supervisor(
            structs.replace(workload, trial_timeout_seconds=plan.settings.step_timeout_seconds),
            subject.limit_bytes,
            on_note=on_note,
        ) as supervisor,
    ):
        record = WorkloadRecord(spec=workload.workload, options=workload.options)
        found = verify(supervisor, plan, record, on_progress=on_progress)
        write_result(folder / VERIFY_FILE, found)
    return found


def verify(
    stepper: Stepper,
    plan: VerifyPlan,
    workload: WorkloadRecord,
    *,
    on_progress: OnProgress | None = None,
    clock: Clock = time.monotonic,
) -> Verification:
    """Run the worst shapes, then shuffled batches, one step after the other in one worker, and judge them.

    The worst shapes are run once, the largest first, then once more in alternation; a step that fails does not keep
    the others from being tried. If all pass, the shuffled batches follow, up to the first that fails. Only these are
    timed: the worst shapes are their warm-up.

    Raises:
        ResultError: The probe was of another device, or the sampler makes no batch.
        WorkloadError, ProbeError: As for `run_verify`.
    """
    candidate, settings, probe = plan.candidate, plan.settings, plan.probe
    device = stepper.start()
    if probe is not None and device.name != probe.device.name:
        raise ResultError(
            f"the run was measured on {probe.device.name}; this is {device.name}",
            "Verify on the device that was probed, or probe this one in another folder with --run.",
        )
    lengths = candidate.padded(plan.lengths)
    costs = costs_of(probe) if probe else Costs()
    if candidate.multiple_of is not None:
        costs = replace(costs, frontier=costs.continued_frontier)

    def run(tried: Candidate, how: VerifySettings, *, for_proposal: bool) -> _Runner:
        runner = _Runner(stepper, workload.spec, device, on_progress, clock, for_proposal)
        runner.run_worst(worst_batches(lengths, tried.table, _memory_model(probe)))
        runner.run_shuffled(shuffled_epochs(lengths, tried, how.seed), how)
        return runner

    first = run(candidate, settings, for_proposal=False)
    found = judge(first.done, plan, workload, device, costs, first.planned_steps)
    rest = first.done.rest_growth()
    if not found.failures or (rest is not None and rest.leaks(device.limit_bytes)):  # a leak would stop any size
        return found
    steps = max(len(first.done.shuffled), min(_PROPOSAL_STEPS, first.planned_steps or _PROPOSAL_STEPS))

    def run_smaller(smaller: Candidate) -> DoneSteps:
        """Run smaller sizes as the ones that failed were: in a fresh worker, and for at least as many steps."""
        stepper.start()
        tried = run(smaller, replace(settings, steps=steps, minutes=None, epoch=False), for_proposal=True).done
        rest = tried.rest_growth()
        if rest is not None and rest.leaks(device.limit_bytes):
            raise _Leaks(rest)
        return tried

    try:
        failing = {failure.bucket for failure in found.failures}
        proposal = propose(lengths, candidate, failing, run_smaller, costs.frontier)
    except _Leaks as leaks:
        return structs.replace(found, reasons=[leak_reason(leaks.rest), *found.reasons])
    except (ProbeError, WorkloadError) as error:  # the result so far must not be lost
        untried = f"Smaller sizes could not be tried: {error.message}"
        return structs.replace(found, warnings=[*found.warnings, untried])
    return structs.replace(
        found, proposal=proposal, reasons=[*found.reasons, *([_SINGLE_FAILS] if proposal is None else [])]
    )


class _Leaks(Exception):
    """Memory in use between steps creeps, so nothing can be said of any size."""

    def __init__(self, rest: Growth) -> None:
        super().__init__()
        self.rest = rest


def _memory_model(probe: Probe | None) -> Callable[[BatchShape], float] | None:
    """Return the memory that a shape needs, in bytes, by the probe's fit; None without one."""
    model = probe.models.peak_bytes if probe else None
    if model is None:
        return None
    return lambda shape: float(predict(model, shape.batch_size, shape.length, shape.target_length))
