"""Measures settings of a loader, each in a fresh process group. Never imports torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from batchtune.errors import LoaderError, OptionError
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.memory import MemoryUse, shared_memory, watched_memory
from batchtune.loaders.protocol import Open, Opened, Reply, Split, Stages, Take, Taken
from batchtune.loaders.settings import LoaderSettings
from batchtune.processes.worker import Failed, Message, Nursery, WorkerLost
from batchtune.results import Arguments, LoaderOutcome, LoaderStage
from batchtune.units import format_seconds, format_size
from batchtune.workloads.loading import last_frame

Answer = TypeVar("Answer", Opened, Taken, Stages)

# The warm-up, in batches: this many times what may be waiting, but no less than the second number.
_WARM_UP_TIMES = 2
_WARM_UP_BATCHES = 8
# The most epochs of a measurement, if they end at once.
_MOST_EPOCHS = 50
_LAST_LINES = 5
# A measurement that takes longer than planned by this factor begins no more epochs.
_LATE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a setting is measured.

    Attributes:
        seconds: After the warm-up.
        epochs: The fewest epochs to begin; to see how long one takes to start.
        batches: The most of each epoch; None: all, as far as the time goes.
        steps: How long the consumer is busy with each batch in turn; None: not at all.
        digests: Whether to hash each batch, of one epoch.
    """

    seconds: float
    epochs: int = 1
    batches: int | None = None
    steps: Sequence[float] | None = None
    digests: bool = False


@dataclass(slots=True, kw_only=True)
class Measurement:
    """The measurement of one setting.

    Attributes:
        error: The message, the hint and the traceback, each on lines of its own.
        trials: The epochs, or parts of one, of each process that was measured.
        memory: None if the loader was not built.
        spans: The beginning and the end of each epoch, on `time.monotonic`'s clock.
        busy_processors: How many all programs of the machine kept busy meanwhile; None if it failed.
    """

    arguments: Arguments
    outcome: LoaderOutcome = "ok"
    error: str | None = None
    trials: list[list[Taken]] = field(default_factory=list)
    memory: MemoryUse | None = None
    spans: list[tuple[float, float]] = field(default_factory=list)
    busy_processors: float | None = None

    @property
    def epochs(self) -> list[Taken]:
        """All epochs of all trials."""
        return list(itertools.chain.from_iterable(self.trials))


class _Failure(Exception):
    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class LoaderRunner:
    """Measures settings of a loader. Use as a context manager: no process outlives it."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._nursery = Nursery("batchtune.loaders.worker", Reply, {})

    def __enter__(self) -> LoaderRunner:
        return self

    def __exit__(self, *raised: object) -> None:
        self._nursery.close()

    def inspect(self) -> Opened:
        """Build the loader once, with the first of the values that the user named. Raises LoaderError if that fails."""
        with self._worker():
            return self._inspect()

    def stages(self, seconds: float) -> list[LoaderStage]:
        """Measure the stages of making a batch in a fresh process. Raises LoaderError if a stage fails."""
        with self._worker():
            self._inspect()
            return self._ask(Split(seconds=seconds), Stages, seconds * 2 + self._settings.timeout_seconds).stages

    def measure(self, arguments: Arguments, plan: Plan, kind: LoaderKind) -> Measurement:
        """Measure one setting in a fresh process. Raises LoaderError if every other setting would fail alike."""
        measurement = Measurement(arguments=arguments)
        with self._worker():
            try:
                self._measure(measurement, plan, kind)
            except _Failure as failure:
                if failure.failed.fatal:
                    raise
                measurement.outcome = failure.failed.outcome
                measurement.error = failure.failed.text
        return measurement

    @contextmanager
    def _worker(self) -> Iterator[None]:
        """Start a worker, and end it; a failure becomes a LoaderError, or an OptionError if `--set` is wrong."""
        self._nursery.start_worker()
        try:
            yield
        except _Failure as failure:
            failed = failure.failed
            error_class = OptionError if failed.stage == "options" else LoaderError
            raise error_class(failed.message, failed.hint, failed.traceback) from None
        finally:
            self._nursery.end_worker()

    def _measure(self, measurement: Measurement, plan: Plan, kind: LoaderKind) -> None:
        opened = self._open(measurement.arguments)
        with watched_memory(opened.pid) as measurement.memory:
            if not plan.digests:
                batches = max(_WARM_UP_BATCHES, 1 + _WARM_UP_TIMES * kind.batches_in_flight(measurement.arguments))
                self._take(Take(batches=batches, seconds=plan.seconds))
            started = time.monotonic()
            busy_before = _busy_seconds()
            measurement.trials.append(self._epochs(plan, measurement.spans))
            busy = (_busy_seconds() - busy_before) / (time.monotonic() - started)
        if not any(taken.waits for taken in measurement.epochs):
            raise _Failure(Failed(outcome="empty", message="the loader delivers no batch"))
        measurement.busy_processors = busy

    def _epochs(self, plan: Plan, spans: list[tuple[float, float]]) -> list[Taken]:
        """Take epochs until the time is over and as many as requested have begun; note in `spans` when each ran."""
        taken: list[Taken] = []
        left = plan.seconds
        again = plan.batches is None and not plan.digests
        while len(taken) < plan.epochs or (again and left > 0 and len(taken) < _MOST_EPOCHS):
            steps = None if plan.steps is None else list(plan.steps)
            seconds = max(left, plan.seconds / 4)
            began = time.monotonic()
            taken.append(self._take(Take(batches=plan.batches, seconds=seconds, steps=steps, digests=plan.digests)))
            spans.append((began, began + taken[-1].seconds))
            left -= taken[-1].seconds
            if not taken[-1].waits or (len(taken) > 1 and left < -_LATE * plan.seconds):
                break
        return taken

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
        return self._ask(request, Opened, settings.setup_timeout_seconds)

    def _take(self, request: Take) -> Taken:
        limit = request.seconds + max(request.steps or [0.0]) + self._settings.timeout_seconds
        return self._ask(request, Taken, limit)

    def _ask(self, request: Message, kind: type[Answer], timeout: float) -> Answer:
        opening = isinstance(request, Open)
        try:
            reply = self._nursery.ask(request, (kind, Failed), timeout)
        except WorkerLost as lost:
            if lost.outcome == "timeout":
                what = "building the loader" if opening else "delivering batches"
                where = f", at {last_frame(lost.output)}" if lost.output else ""
                reply = Failed(
                    outcome="timeout",
                    message=f"{what} hangs{where}: it took longer than {format_seconds(timeout)}",
                    hint=f"If it just takes long, allow more with {'--setup-timeout' if opening else '--timeout'}.",
                    fatal=opening,
                )
            else:
                printed = "\n".join(lost.output.strip().splitlines()[-_LAST_LINES:])
                message = f"the process that takes the batches {lost}"
                reply = Failed(outcome=lost.outcome, message=message, traceback=printed or None)
        if isinstance(reply, Failed):
            raise _Failure(reply)
        assert isinstance(reply, kind)
        return reply


def _busy_seconds() -> float:
    """Return for how long all processors together have been busy since the machine was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest)


def too_small(kind: LoaderKind, arguments: Arguments, batch_bytes: int) -> str | None:
    """Return why /dev/shm can't hold the batches that would wait with these arguments; None if it can."""
    waiting = kind.batches_in_flight(arguments)
    memory = shared_memory()
    if memory is None or waiting * batch_bytes <= memory.free or not kind.IN_SHARED_MEMORY:
        return None
    return (
        f"/dev/shm has {format_size(memory.free)} free, and {waiting} batches of up to {format_size(batch_bytes)} may "
        "wait in it: a worker would be killed by a bus error\nMake it larger (docker run --shm-size, or mount -o "
        "remount,size=... /dev/shm), or take fewer workers or a smaller prefetch_factor."
    )
