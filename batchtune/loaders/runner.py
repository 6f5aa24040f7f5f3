"""The settings of a loader's tuning, and their measurements, each in a fresh process group. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import psutil
from msgspec.structs import replace

from batchtune.errors import (
    LoaderError,
    OptionError,
    UsageError,
    did_you_mean,
    invalid_field,
)
from batchtune.loaders import KINDS, LoaderKind, SweptArguments
from batchtune.loaders.worker import LoaderReply, Open, Opened, Take, Taken
from batchtune.processes.worker import Failed, Message, Nursery, WorkerLost, tail
from batchtune.results import (
    Argument,
    Arguments,
    LoaderOutcome,
    Reproduced,
    Seed,
    WorkloadRecord,
    argument_text,
)
from batchtune.units import format_seconds
from batchtune.workloads import parse_options

LoaderAnswer = TypeVar("LoaderAnswer", Opened, Taken)

_WARM_UP_BATCHES = 8
# The most epochs of a measurement, if they end at once.
_MOST_EPOCHS = 50
# How many batches of each worker are compared, for how long they are taken, and how many might be equal by chance.
_REPEATS_ROUNDS = 8
_REPEATS_SECONDS = 10.0
_FEWEST_ROUNDS = 4
COMPARED_SECONDS = 60.0
"""Of an epoch that is compared with another; only the beginning of a longer one is."""
# Reading the memory of a process holds its lock for a moment: it may take this share of the time at most.
_LOOKING_SHARE = 0.05
_LOOKING_SECONDS = 0.25


_MAX_VALUES = 64
_Timeout = Annotated[float, msgspec.Meta(ge=0.1, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The loader to measure, and how; `results.checked` checks the types and ranges.

    Attributes:
        target: `FILE.py:NAME`, the user's code that makes the loader; options: of `--set`.
        kind: Of the loader; None: recognised.
        sweep: Argument → values, instead of the kind's own.
        device: Where batches go: `auto`, `cpu` or `cuda:N`.
        ranks_per_node: Ranks that share the machine's processors.
        seconds: How long to measure each setting.
        trials: Measurements of the best settings; the median counts.
        timeout_seconds: For one batch.
        setup_timeout_seconds: For importing the code and building the loader.
        step_ms: Time of a training step; None: by the run's probe, if it has one.
        config: The run's `sampler.yaml`; None without one.

    Raises:
        UsageError: There is no such kind, or too few processors.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    sweep: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    device: str = "auto"
    ranks_per_node: int = 1
    seconds: Annotated[float, msgspec.Meta(ge=0.05, le=3600)] = 2.0
    trials: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    timeout_seconds: _Timeout = 60.0
    setup_timeout_seconds: _Timeout = 600.0
    step_ms: Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)] | None = None
    check_reproducible: bool = False
    seed: Seed = 0
    config: str | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise UsageError(
                f"--kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        processors = len(all_processors())
        if not 1 <= self.ranks_per_node <= processors:
            raise UsageError(
                f"--ranks-per-node {self.ranks_per_node}: this machine has {processors} processors, and each rank "
                "needs one",
                "Run on a machine like those you train on.",
            )

    @property
    def target_record(self) -> WorkloadRecord:
        """The user's code, as `loader.json` holds it."""
        return WorkloadRecord(spec=self.target, options=dict(self.options))

    @property
    def processors(self) -> list[int]:
        """The processors of one rank: those that this process may use / ranks per node."""
        every = all_processors()
        return every[: len(every) // self.ranks_per_node]

    def record(self) -> dict[str, Any]:
        """Return them as `loader.json` holds them."""
        names = (
            "seconds",
            "trials",
            "timeout_seconds",
            "ranks_per_node",
            "seed",
        )
        return {
            "sweep": {name: list(values) for name, values in self.sweep.items()},
            "processors": len(self.processors),
            **{name: getattr(self, name) for name in names},
        }


def all_processors() -> list[int]:
    """Return the processors that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Argument]]:
    """Read `num_workers=0:8`, `prefetch_factor=2,4` or `eval_mode=eager,sync_cpu` of `--sweep`.

    Raises:
        UsageError: One is not of that form, or an argument is given twice.
    """
    axes: dict[str, list[Argument]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not (values and name.isidentifier()):
            raise UsageError(
                f"--sweep {text!r} is not NAME=VALUES",
                "For example num_workers=0:8 or pin_memory=true.",
            )
        if name in axes:
            raise UsageError(
                f"--sweep {name} is given twice",
                "List all values in one: num_workers=0,2,4.",
            )
        axes[name] = _values(text, values)
    return axes


def _values(text: str, values: str) -> list[Argument]:
    first, _, last = values.partition(":")
    if first.isdecimal() and last.isdecimal():
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(numbers) <= _MAX_VALUES:
            raise UsageError(
                f"--sweep {text}: a range goes from a smaller to a larger number, {_MAX_VALUES} at most"
            )
        return list(numbers)
    words = values.split(",")
    if not all(map(str.strip, words)):
        raise UsageError(
            f"--sweep {text}: a value is empty", "Separate values by single commas."
        )
    return [parse_options([f"value={word}"])["value"] for word in words]


def swept_axes(
    kind: LoaderKind, axes: SweptArguments, sweep: SweptArguments, takes: Sequence[str]
) -> SweptArguments:
    """Return the axes with the user's values in their place; further ones come last.

    Raises:
        UsageError: An argument is neither the kind's nor one of the function's parameters, or a value can't be.
    """
    for name, values in sweep.items():
        if name not in (*axes, *takes, *kind.ARGUMENTS):
            known = list(dict.fromkeys([*axes, *takes]))
            raise UsageError(
                f"--sweep {name}: neither an argument of this loader nor a parameter of your function",
                f"{did_you_mean(name, known)}Arguments now: {', '.join(known) or 'none'}.",
            )
        if name in kind.ARGUMENTS and name not in takes:
            for value in values:
                try:
                    msgspec.convert(value, kind.ARGUMENTS[name])
                except msgspec.ValidationError as error:
                    raise UsageError(
                        f"--sweep {name}: {argument_text(value)} {invalid_field(error)}"
                    ) from None
    return {**axes, **sweep}


@dataclass(slots=True, kw_only=True)
class Measurement:
    """The measurement of one setting.

    Attributes:
        error: The message, the hint and the traceback, each on lines of its own.
        epochs: Those that were taken, or parts of them.
        busy_processors: How many all programs of the machine kept busy meanwhile.
        memory_bytes: Of all processes at once, each shared page counted once (psutil's proportional set size), at most.
        worker_bytes: Of the largest process that is not the first, at most.
        shared_bytes: Added to /dev/shm, at most.
    """

    arguments: Arguments
    outcome: LoaderOutcome = "ok"
    error: str | None = None
    epochs: list[Taken] = field(default_factory=list)
    busy_processors: float = 0.0
    memory_bytes: int = 0
    worker_bytes: int = 0
    shared_bytes: int = 0


class _Failure(Exception):
    def __init__(self, failed: Failed) -> None:
        self.failed = failed


class LoaderRunner:
    """Measures settings of a loader; no process outlives `close`."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._nursery = Nursery("batchtune.loaders.worker", LoaderReply, {})

    def close(self) -> None:
        """End the process that workers are forked from."""
        self._nursery.close()

    def inspect(self) -> Opened:
        """Build the loader once, with the first of the values that the user named. Raises LoaderError if that fails."""
        arguments = {name: values[0] for name, values in self._settings.sweep.items()}
        with self._worker():
            return self._open(arguments, inspect=True)

    def measure(self, arguments: Arguments, request: Take) -> Measurement:
        """Measure one setting in a fresh process: epochs as requested until the time is over, after a warm-up.

        A single epoch is taken, from the start, for digests.
        """
        measurement = Measurement(arguments=arguments)
        with self._worker():
            try:
                opened = self._open(arguments)
                with _watched_memory(opened.pid, measurement):
                    if not request.digests:
                        self._take(
                            Take(batches=_WARM_UP_BATCHES, seconds=request.seconds)
                        )
                    psutil.cpu_percent()  # the next call gives the share since this one
                    measurement.epochs += self._epochs(request)
                    measurement.busy_processors = (
                        psutil.cpu_percent() / 100 * psutil.cpu_count()
                    )
            except _Failure as failure:
                measurement.outcome = failure.failed.outcome
                measurement.error = failure.failed.text
        return measurement

    def repeats(self, arguments: Arguments, workers: int) -> bool:
        """Return whether workers of a setting repeat each other, by the values of their first batches."""
        request = Take(
            seconds=_REPEATS_SECONDS, batches=_REPEATS_ROUNDS * workers, digests=True
        )
        measured = self.measure(arguments, request)
        return measured.outcome == "ok" and repeated_batches(
            measured.epochs[0].digests, workers
        )

    def reproduced(self, arguments: Arguments) -> Reproduced:
        """Take an epoch in each of two fresh processes, from the same seed, and compare all tensors bit for bit.

        Raises LoaderError if one of the two fails.
        """
        first = self._epoch_to_compare(arguments)
        second = self._epoch_to_compare(arguments)
        for index, (batch, other) in enumerate(
            zip(first.digests, second.digests, strict=False)
        ):
            if batch != other:
                names = [
                    name
                    for name in {**batch, **other}
                    if batch.get(name) != other.get(name)
                ]
                return Reproduced(
                    batches=index + 1,
                    first_difference=index,
                    what=f"{', '.join(names)} differ",
                )
        return Reproduced(batches=min(len(first.digests), len(second.digests)))

    def _epoch_to_compare(self, arguments: Arguments) -> Taken:
        measured = self.measure(arguments, Take(seconds=COMPARED_SECONDS, digests=True))
        if measured.outcome != "ok":
            raise LoaderError(f"the epoch to compare failed: {measured.error}")
        return measured.epochs[0]

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

    def _epochs(self, request: Take) -> Iterator[Taken]:
        """Take epochs until the time is over, the last one in part."""
        ending = time.monotonic() + request.seconds
        for _ in range(_MOST_EPOCHS):
            yield self._take(request)
            left = ending - time.monotonic()
            if request.digests or left <= 0:
                return
            request = replace(request, seconds=left)

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
        limit = (
            request.seconds
            + max(request.steps or [0.0])
            + self._settings.timeout_seconds
        )
        return self._ask(request, Taken, limit)

    def _ask(
        self, request: Message, kind: type[LoaderAnswer], timeout: float
    ) -> LoaderAnswer:
        try:
            reply = self._nursery.ask(request, (kind, Failed), timeout)
        except WorkerLost as lost:
            if lost.outcome != "timeout":
                raise _Failure(
                    Failed(
                        outcome=lost.outcome,
                        message=f"the process that takes the batches {lost}",
                        traceback=tail(lost.output, lines=5) or None,
                    )
                ) from None
            reply = Failed(
                outcome="timeout",
                message=f"the loader took longer than {format_seconds(timeout)}{lost.place}",
                hint="If it just takes long, allow more with --timeout (a batch) or --setup-timeout (building it).",
            )
        if isinstance(reply, Failed):
            raise _Failure(reply)
        assert isinstance(reply, kind)
        return reply


def repeated_batches(digests: list[dict[str, str]], workers: int) -> bool:
    """Return whether workers repeat each other: in each of four rounds or more, all deliver the same batch.

    Workers deliver in turn. The batches of different rounds must differ: constant batches, or few different labels, are
    the same by chance.
    """
    rounds = [
        digests[first : first + workers]
        for first in range(0, len(digests) - workers + 1, workers)
    ]
    different = {tuple(batches[0].items()) for batches in rounds}
    if len(rounds) < _FEWEST_ROUNDS or len(different) < len(rounds):
        return False
    return all(batches == batches[:1] * workers for batches in rounds)


@contextmanager
def _watched_memory(pid: int, measurement: Measurement) -> Iterator[None]:
    """Look at a process and its descendants again and again, in a thread, until the block ends."""
    done = threading.Event()
    shared_before = _shared_bytes()

    def watch() -> None:
        waiting = 0.0
        while not done.wait(waiting):
            began = time.monotonic()
            with contextlib.suppress(psutil.Error):
                _look(pid, measurement)
            measurement.shared_bytes = max(
                measurement.shared_bytes, _shared_bytes() - shared_before
            )
            waiting = max(_LOOKING_SECONDS, (time.monotonic() - began) / _LOOKING_SHARE)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _shared_bytes() -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").used
    return 0


def _look(pid: int, measurement: Measurement) -> None:
    process = psutil.Process(pid)
    total = process.memory_full_info().pss
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            child_bytes = child.memory_full_info().pss
            total += child_bytes
            measurement.worker_bytes = max(measurement.worker_bytes, child_bytes)
    measurement.memory_bytes = max(measurement.memory_bytes, total)
