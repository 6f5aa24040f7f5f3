"""Runs a verification's steps one after the other, and keeps what they showed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from batchtune.errors import UsageError, WorkloadError
from batchtune.probe.confirmation import Stepper, alternating
from batchtune.probe.oom import message_verdict
from batchtune.probe.protocol import Ran
from batchtune.results import VERIFY_FILE, Device, Trial, VerifyFailure, VerifyPhase
from batchtune.shapes import BatchShape
from batchtune.tuning import verify_rules as rules
from batchtune.tuning.verify_plan import Batches, PlannedBatch

DEFAULT_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How much to run, and how closely to look; exactly one of the first three.

    Attributes:
        steps: Shuffled steps to run; they may be more than an epoch has.
        minutes: Run shuffled steps for so long.
        epoch: Run one epoch.
        seed: Of the shuffles.
        time_tolerance: How far the measured time may lie from the estimate, as a share of it.
        step_timeout_seconds: Longest that one step may take.

    Raises:
        UsageError: A value is out of range, or not exactly one length is set.
    """

    steps: int | None = None
    minutes: float | None = None
    epoch: bool = False
    seed: int = 0
    time_tolerance: float = 0.10
    step_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if (self.steps is not None) + (self.minutes is not None) + self.epoch != 1:
            raise UsageError("how long to verify is not clear", "Give one of --steps, --minutes and --epoch.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"the number of steps must be at least 1, got {self.steps}")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UsageError(f"the number of minutes must be positive and finite, got {self.minutes}")
        if self.seed < 0:
            raise UsageError(f"the seed of the shuffles must be at least 0, got {self.seed}")
        if not 0 < self.time_tolerance < float("inf"):
            raise UsageError(f"the time tolerance must be positive and finite, got {self.time_tolerance}")
        if not self.step_timeout_seconds > 0:
            raise UsageError(f"the time limit of a step must be positive, got {self.step_timeout_seconds}")

    def recorded(self) -> dict[str, Any]:
        """As `verify.json` carries them."""
        return {
            "steps": self.steps,
            "minutes": self.minutes,
            "epoch": self.epoch,
            "seed": self.seed,
            "time_tolerance": self.time_tolerance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """What the verification is doing; one before each step.

    Attributes:
        doing: `worst`, `shuffled`, or `proposal` while smaller sizes are tried.
        shape: The batch that is run next.
        done: Steps that are done of this kind.
        total: Steps in all of this kind; None where time decides.
        seconds_left: A guess; None at the beginning.
        device: What it runs on.
    """

    doing: Literal["worst", "shuffled", "proposal"]
    shape: BatchShape
    done: int
    total: int | None
    seconds_left: float | None
    device: Device


OnProgress = Callable[[VerifyProgress], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was run."""

    planned: PlannedBatch
    stepped: Trial


@dataclass(slots=True)
class Runner:
    """Runs the steps, and keeps what they showed."""

    stepper: Stepper
    workload: str
    device: Device
    on_progress: OnProgress | None
    clock: Clock
    worst: list[Done] = field(default_factory=list)
    shuffled: list[Done] = field(default_factory=list)
    failures: list[VerifyFailure] = field(default_factory=list)
    planned_steps: int | None = None
    shapes: int = 0
    release: bool = False
    for_proposal: bool = False

    def run_worst(self, batches: list[PlannedBatch]) -> None:
        """All worst shapes, once the largest first, then in alternation those that passed."""
        self.shapes = len(batches)
        started, total = self.clock(), 2 * len(batches)
        for step, planned in enumerate(batches):
            self._run("worst", step, planned, total, started)
        failed = {(failure.bucket, failure.batch_size, failure.length) for failure in self.failures}
        again = [one for one in batches if (one.bucket, one.shape.batch_size, one.shape.length) not in failed]
        for step, planned in enumerate(alternating(again), start=len(batches)):
            self._run("worst", step, planned, len(batches) + len(again), started)

    def run_shuffled(self, epochs: Iterator[Batches], settings: VerifySettings) -> None:
        """Shuffled batches, until enough are done or one fails; none where a worst shape has failed."""
        epoch = next(epochs)
        self.planned_steps = len(epoch) if settings.epoch else settings.steps
        if self.failures:
            return
        started, step, index = self.clock(), 0, 0
        while not self.failures and not self._enough(settings, step, started):
            if index == len(epoch):
                epoch, index = next(epochs), 0
            self._run("shuffled", step, epoch[index], self.planned_steps, started, settings.minutes)
            step, index = step + 1, index + 1

    def most(self, name: str) -> int | None:
        """The largest of a figure over all steps."""
        figures = [getattr(done.stepped, name) for done in (*self.worst, *self.shuffled)]
        return max((figure for figure in figures if figure is not None), default=None)

    def rest_growth(self) -> rules.Growth | None:
        """How memory in use between steps grew over the shuffled ones; over the worst where it came to no others."""
        steady = until_failure(self.shuffled or self.worst)
        return rules.growth_of([done.stepped.rest_bytes for done in steady])

    @property
    def alloc_retries(self) -> int | None:
        """How often the allocator emptied its cache in steps that passed, after each shape had been run once."""
        passed = [done.stepped for done in (*self.worst[self.shapes :], *self.shuffled) if done.stepped.outcome == "ok"]
        known = [stepped.alloc_retries for stepped in passed if stepped.alloc_retries is not None]
        return sum(known) if known else None

    def _enough(self, settings: VerifySettings, step: int, started: float) -> bool:
        if settings.minutes is not None:
            return step > 0 and self.clock() - started >= 60 * settings.minutes
        assert self.planned_steps is not None
        return step >= self.planned_steps

    def _run(
        self,
        phase: VerifyPhase,
        step: int,
        planned: PlannedBatch,
        total: int | None,
        started: float,
        minutes: float | None = None,
    ) -> None:
        self._tell(phase, step, planned.shape, total, started, minutes)
        stepped = take_step(self.stepper, planned.shape, self.workload, release=self.release)
        self.release = stepped.outcome != "ok"
        (self.worst if phase == "worst" else self.shuffled).append(Done(planned, stepped))
        if stepped.outcome != "ok":
            self.failures.append(
                VerifyFailure(
                    phase=phase,
                    step=step,
                    bucket=planned.bucket,
                    batch_size=planned.shape.batch_size,
                    length=planned.shape.length,
                    target_length=planned.shape.target_length,
                    outcome=stepped.outcome,
                    error=stepped.error,
                )
            )

    def _tell(
        self, doing: VerifyPhase, done: int, shape: BatchShape, total: int | None, started: float, minutes: float | None
    ) -> None:
        if self.on_progress is None:
            return
        spent, left = self.clock() - started, None
        if minutes is not None:
            left = max(0.0, 60 * minutes - spent)
        elif done and total is not None:
            left = spent / done * (total - done)
        self.on_progress(
            VerifyProgress(
                doing="proposal" if self.for_proposal else doing,
                shape=shape,
                done=done,
                total=total,
                seconds_left=left,
                device=self.device,
            )
        )


def take_step(stepper: Stepper, shape: BatchShape, workload: str, *, release: bool) -> Trial:
    """One step; what may be a lack of memory in disguise counts as one only if a smaller batch then passes.

    Raises:
        WorkloadError: The workload failed with something else.
    """
    ran = stepper.step(shape, release=release)
    stepped = ran.trial
    if stepped.outcome == "oom" and message_verdict(stepped.error or "") == "disguised":
        if shape.batch_size > 1:
            smaller = replace(shape, batch_size=shape.batch_size // 2)
            if stepper.step(smaller, release=True).trial.outcome == "ok":
                return stepped
        raise _workload_error(workload, shape, ran)
    if stepped.outcome == "error":
        raise _workload_error(workload, shape, ran)
    return stepped


def _workload_error(workload: str, shape: BatchShape, ran: Ran) -> WorkloadError:
    return WorkloadError(
        f"{workload} failed in its {ran.stage or 'step'}, with a batch of {shape}: {ran.trial.error}",
        f"This is no lack of memory: the verification stops, and no {VERIFY_FILE} is written. "
        "Mend it and run the same command again.",
        ran.traceback,
    )


def until_failure(steps: list[Done]) -> list[Done]:
    """The steps before the first that failed; a failure changes what is in use."""
    failed = next((index for index, done in enumerate(steps) if done.stepped.outcome != "ok"), len(steps))
    return steps[:failed]
