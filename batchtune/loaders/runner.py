"""Measures settings of a loader, each in a fresh process group. Never imports torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from batchtune.errors import LoaderError
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.memory import MemoryUse, MemoryWatch, shared_memory_free
from batchtune.loaders.protocol import Failed, Open, Opened, Reply, Split, Stages, Take, Taken
from batchtune.loaders.settings import LoaderSettings
from batchtune.processes.worker import Nursery, WorkerLost
from batchtune.results import Arguments, LoaderOutcome, LoaderStage
from batchtune.units import format_seconds, format_size
from batchtune.workloads.loading import last_frame

# A part of an epoch that warms up: so many times what may be waiting, and at most so long.
_WARM_UP_TIMES = 2
_WARM_UP_BATCHES = 8
# An epoch that ends at once is begun again only so many times in a trial.
_MOST_EPOCHS = 50
_LAST_LINES = 5
# A trial whose epochs take so many times as long as it should has seen enough of them.
_LATE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a setting is measured.

    Attributes:
        seconds: Of each trial.
        trials: How many, after the warm-up.
        epochs: How many epochs to begin in a trial at least; to see how long one takes to start.
        batches: Of each epoch at most; None: all, as far as the time goes.
        steps: How long the consumer is busy with each batch in turn; None: not at all.
        digests: Whether to hash each batch, of one epoch.
    """

    seconds: float
    trials: int = 1
    epochs: int = 1
    batches: int | None = None
    steps: Sequence[float] | None = None
    digests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one setting delivered.

    Attributes:
        trials: Of each, its epochs or parts of one; complete trials only, unless the first failed.
        memory: None where the loader was not built.
        spans: When each epoch of the trials began and ended, on `time.monotonic`'s clock.
        busy_processors: How many all programs of the machine kept busy during the trials; None if it failed.
    """

    arguments: Arguments
    outcome: LoaderOutcome
    error: str | None = None
    trials: list[list[Taken]] = field(default_factory=list)
    memory: MemoryUse | None = None
    spans: list[tuple[float, float]] = field(default_factory=list)
    busy_processors: float | None = None

    @property
    def epochs(self) -> list[Taken]:
        """All epochs of all trials."""
        return [taken for trial in self.trials for taken in trial]


class LoaderRunner:
    """Measures settings of a loader. Use as a context manager: no process outlives it."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._nursery = Nursery("batchtune.loaders.worker", Reply, {})
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> LoaderRunner:
        return self

    def __exit__(self, *raised: object) -> None:
        self._nursery.close()

    def inspect(self) -> Opened:
        """Build the loader once, with the first of the values that the user named. Raises LoaderError if that fails."""
        self._nursery.start_worker()
        try:
            return self._inspect()
        except _Failure as failure:
            raise LoaderError(failure.message, failure.hint, failure.traceback) from None
        finally:
            self._nursery.end_worker()

    def measure(self, arguments: Arguments, plan: Plan, kind: LoaderKind) -> Measurement:
        """Measure one setting in a fresh process. Raises LoaderError if every other setting would fail alike."""
        self._nursery.start_worker()
        memory, trials = None, list[list[Taken]]()
        self._spans.clear()
        try:
            opened = self._open(arguments)
            with MemoryWatch(opened.pid) as memory:
                self._warm_up(kind.batches_in_flight(arguments), plan)
                self._spans.clear()
                started, busy_before = time.monotonic(), _busy_seconds()
                for _ in range(plan.trials):
                    trials.append(self._trial(plan))
                busy = (_busy_seconds() - busy_before) / (time.monotonic() - started)
            if not any(taken.waits for trial in trials for taken in trial):
                raise _Failure("empty", "the loader delivers no batch")
        except _Failure as failure:
            if failure.fatal:
                raise LoaderError(failure.message, failure.hint, failure.traceback) from None
            return Measurement(
                arguments=arguments,
                outcome=failure.outcome,
                error=failure.text,
                trials=trials,
                memory=memory,
                spans=list(self._spans),
            )
        finally:
            self._nursery.end_worker()
        return Measurement(
            arguments=arguments,
            outcome="ok",
            trials=trials,
            memory=memory,
            spans=list(self._spans),
            busy_processors=busy,
        )

    def stages(self, seconds: float) -> list[LoaderStage]:
        """Measure the stages of making a batch in a fresh process. Raises LoaderError if a stage fails."""
        self._nursery.start_worker()
        try:
            self._inspect()
            found = self._ask(Split(seconds=seconds), Stages, seconds * 2 + self._settings.timeout_seconds)
            assert isinstance(found, Stages)
            return found.stages
        except _Failure as failure:
            raise LoaderError(failure.message, failure.hint, failure.traceback) from None
        finally:
            self._nursery.end_worker()

    def _inspect(self) -> Opened:
        return self._open({name: values[0] for name, values in self._settings.sweep.items()}, inspect=True)

    def _open(self, arguments: Arguments, *, inspect: bool = False) -> Opened:
        settings = self._settings
        request = Open(
            spec=settings.target,
            options=dict(settings.options),
            kind=settings.kind,
            arguments=arguments,
            processors=settings.processors,
            device=settings.device,
            seed=settings.seed,
            inspect=inspect,
            config=settings.config,
        )
        opened = self._ask(request, Opened, settings.setup_timeout_seconds)
        assert isinstance(opened, Opened)
        return opened

    def _warm_up(self, in_flight: int, plan: Plan) -> None:
        if not plan.digests:
            self._take(Take(batches=max(_WARM_UP_BATCHES, 1 + _WARM_UP_TIMES * in_flight), seconds=plan.seconds))

    def _trial(self, plan: Plan) -> list[Taken]:
        """Take epochs until the time is over and as many as asked for have begun."""
        taken: list[Taken] = []
        left = plan.seconds
        again = plan.batches is None and not plan.digests
        while len(taken) < plan.epochs or (again and left > 0 and len(taken) < _MOST_EPOCHS):
            steps = None if plan.steps is None else list(plan.steps)
            seconds = max(left, plan.seconds / 4)
            taken.append(self._take(Take(batches=plan.batches, seconds=seconds, steps=steps, digests=plan.digests)))
            left -= taken[-1].seconds
            if not taken[-1].waits or (len(taken) > 1 and left < -_LATE * plan.seconds):
                break
        return taken

    def _take(self, request: Take) -> Taken:
        longest_step = max(request.steps or [0.0])
        limit = request.seconds + longest_step + self._settings.timeout_seconds
        began = time.monotonic()
        taken = self._ask(request, Taken, limit)
        assert isinstance(taken, Taken)
        self._spans.append((began, began + taken.seconds))
        return taken

    def _ask(self, request: Open | Take | Split, kind: type[Opened | Taken | Stages], timeout: float) -> Reply:
        try:
            reply = self._nursery.ask(request, (kind, Failed), timeout)
        except WorkerLost as lost:
            what = "building the loader" if isinstance(request, Open) else "delivering batches"
            if lost.outcome == "timeout":
                where = f", at {last_frame(lost.output)}" if lost.output else ""
                limit = "--setup-timeout" if isinstance(request, Open) else "--timeout"
                raise _Failure(
                    "timeout",
                    f"{what} hangs{where}: it took longer than {format_seconds(timeout)}",
                    f"If it just takes long, allow more with {limit}.",
                    fatal=isinstance(request, Open),
                ) from None
            printed = "\n".join(lost.output.strip().splitlines()[-_LAST_LINES:])
            raise _Failure(
                lost.outcome, f"the process that takes the batches {lost}", traceback=printed or None
            ) from None
        if isinstance(reply, Failed):
            raise _Failure(reply.outcome, reply.message, reply.hint, reply.traceback, fatal=reply.fatal)
        return reply


def _busy_seconds() -> float:
    """Return for how long all processors together have been busy since the machine was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest)


class _Failure(Exception):
    """A setting failed."""

    def __init__(
        self,
        outcome: LoaderOutcome,
        message: str,
        hint: str | None = None,
        traceback: str | None = None,
        *,
        fatal: bool = False,
    ) -> None:
        super().__init__(message)
        self.outcome, self.message, self.hint, self.traceback, self.fatal = outcome, message, hint, traceback, fatal

    @property
    def text(self) -> str:
        """The message, the hint and the traceback, each on lines of its own."""
        return "\n".join(part for part in (self.message, self.hint, self.traceback) if part)


def too_small(kind: LoaderKind, arguments: Arguments, batch_bytes: int) -> str | None:
    """Return why /dev/shm can't hold the batches that would wait with these arguments; None if it can."""
    waiting, free = kind.batches_in_flight(arguments), shared_memory_free()
    if free is None or waiting * batch_bytes <= free:
        return None
    return (
        f"/dev/shm has {format_size(free)} free, and {waiting} batches of up to {format_size(batch_bytes)} may wait in "
        "it: a worker would be killed by a bus error\nMake it larger (docker run --shm-size, or mount -o "
        "remount,size=... /dev/shm), or take fewer workers or a smaller prefetch_factor."
    )
