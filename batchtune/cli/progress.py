"""Progress on stderr: bars on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from batchtune.cli import console
from batchtune.units import counted, format_length, format_percent, format_seconds, format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from batchtune.buckets.sweep_settings import SweepSettings
    from batchtune.loaders.tuner import LoaderProgress
    from batchtune.probe.hooks import ProbeProgress
    from batchtune.results import Device, LoaderRow, Row, StreamRow, Trial
    from batchtune.shapes import BatchShape
    from batchtune.verify.verifying import VerifyProgress

_BAR_AFTER_SECONDS = 1.0
_FIRST_LINE_AFTER_SECONDS = 10.0
_SILENT_SECONDS = 30.0  # at most, in the log of a worker process
_POLL_SECONDS = 0.5
_TASK = cast("TaskID", 0)  # each bar has one
_VERIFYING = {"worst": "Worst batches", "shuffled": "Shuffled batches"}
_TUNING = {
    "opening": "Building the loader",
    "comparing": "Comparing the first batches of workers, with",
    "measuring": "Measuring",
    "starting": "Starting epochs with",
    "confirming": "Taking batches as training does, with",
    "stages": "Measuring the stages",
    "reproducing": "Comparing two epochs of",
}


@contextmanager
def _bar(doing: str, total: float | None = None, *, quiet: bool) -> Iterator[Bar]:
    """Show a bar with one task on a terminal, and none elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    shown = stderr.is_terminal and not quiet
    silent = Console(stderr=True, quiet=True)
    with Progress(*columns, console=stderr if shown else silent, transient=True, disable=not shown) as bar:
        bar.add_task(doing, total=total)
        yield bar


def _lines() -> Callable[[], float | None]:
    """Return a clock for lines in place of a bar: the seconds if one is due, after 10 s and each time they double."""
    started = time.monotonic()
    due = _FIRST_LINE_AFTER_SECONDS

    def seconds_if_due() -> float | None:
        nonlocal due
        seconds = time.monotonic() - started
        if seconds < due:
            return None
        due = 2 * seconds
        return seconds

    return seconds_if_due


@contextmanager
def reading_bar(*, quiet: bool) -> Iterator[Callable[[float, int], None] | None]:
    """Show a bar for reading a manifest once that takes longer than a second, or lines if stderr is no terminal."""
    started = time.monotonic()
    lines = _lines()
    bars: list[Bar] = []
    with ExitStack() as stack:

        def in_lines(share: float, examples: int) -> None:
            if seconds := lines():
                read = f"{counted(examples, 'example')} and {share:.0%} of the bytes"
                console.note(f"Reading: {read} in {format_seconds(seconds)}; Ctrl-C stops it.")

        def in_a_bar(share: float, examples: int) -> None:
            seconds = time.monotonic() - started
            if not bars and seconds > _BAR_AFTER_SECONDS:
                bars.append(stack.enter_context(_bar("Reading", 1.0, quiet=quiet)))
            for bar in bars:
                left = format_seconds(seconds * (1 - share) / max(share, 1e-9))
                rate = f"{counted(examples, 'example')}, {examples / seconds:,.0f}/s"
                bar.update(_TASK, completed=share, description=f"Reading: {rate}, about {left} left")

        if quiet:
            yield None
        elif sys.stderr.isatty():
            yield in_a_bar
        else:
            yield in_lines


@contextmanager
def sweep_bar(settings: SweepSettings, *, quiet: bool) -> Iterator[Callable[[Row], None]]:
    """Show a bar that counts the rows of a sweep."""
    with _bar("Sweeping", len(settings.strategies) * len(settings.num_buckets), quiet=quiet) as bar:
        yield lambda row: bar.update(_TASK, advance=1, description=row.name)


@contextmanager
def stream_bar(*, quiet: bool) -> Iterator[Callable[[StreamRow, int], None]]:
    """Show a bar that counts the rows of a stream's sweep."""
    with _bar("Simulating", quiet=quiet) as bar:
        yield lambda row, rows: bar.update(_TASK, advance=1, total=rows, description=row.name)


@contextmanager
def loader_bar(*, quiet: bool) -> Iterator[Callable[[LoaderProgress], None]]:
    """Show a bar for the settings of a loader, with a line for each that was measured."""
    from batchtune.results import argument_text

    with _bar("Building the loader", quiet=quiet) as bar:
        in_lines = bar.disable and not quiet
        due = _lines()

        def show(progress: LoaderProgress) -> None:
            words = " ".join(f"{name}={argument_text(value)}" for name, value in progress.arguments.items())
            what = f"{_TUNING[progress.doing]} {words}".strip()
            if progress.seconds is not None:
                what += f", at most {format_seconds(progress.seconds)}"
                console.note(f"{what}.", quiet=quiet)
            if progress.row is not None:
                bar.console.print(_loader_line(progress.row), highlight=False, markup=False)
            bar.update(_TASK, completed=progress.done, total=progress.total, description=what)
            seconds = due() if in_lines else None
            if seconds is not None:
                console.note(f"{what}, {progress.done} of {progress.total} in this round, {format_seconds(seconds)}.")

        yield show


def _loader_line(row: LoaderRow) -> str:
    if row.outcome != "ok":
        return f"{row.name}: {(row.error or row.outcome).splitlines()[0]}"
    idle = "" if row.gpu_idle is None else f", the step waits {format_percent(row.gpu_idle)}"
    return f"{row.name}: {row.rate_words}{idle}"


@contextmanager
def worker_bar(unit: str | None, *, ddp: bool, quiet: bool) -> Iterator[WorkerBar]:
    """Show a bar for the training steps of a worker process; `unit` is that of the lengths."""
    with _bar("Building the workload", quiet=quiet) as bar:
        shown = WorkerBar(bar, unit, ddp, quiet)
        if quiet or not bar.disable:
            yield shown
            return
        ended = threading.Event()
        lines = threading.Thread(target=shown.write_lines, args=[ended], daemon=True)
        lines.start()
        try:
            yield shown
        finally:
            ended.set()
            lines.join()


@dataclass(slots=True)
class WorkerBar:
    """Shows what a worker process does: lines about its device, then a bar, with a line for each trial of a probe."""

    _bar: Bar
    _unit: str | None
    _ddp: bool
    _quiet: bool
    _introduced: bool = False
    _doing: str = "Building the workload"
    _ends: float | None = None  # on the monotonic clock, by a guess

    def probing(self, progress: ProbeProgress) -> None:
        """Show the progress of a probe."""
        if progress.trial is not None:
            self._introduce(progress.device)
            line = _trial_line(progress.trial, self._shape(progress.shape))
            self._bar.console.print(line, highlight=False, markup=False)
            self._bar.update(_TASK, completed=progress.done, total=progress.total)
        elif progress.confirming:
            self._update(progress, f"Confirming in turns, step {progress.done + 1:,} of {progress.total:,}:")
        elif progress.shortening:
            self._update(progress, "Finding the longest that fits:")
        else:
            self._update(progress, f"{progress.done} of {progress.total} lengths done, trying")

    def verifying(self, progress: VerifyProgress) -> None:
        """Show the progress of a verification."""
        step = f"step {progress.done + 1:,} of {progress.total:,}"
        self._update(progress, f"{_VERIFYING[progress.phase]}, {step}:")

    def write_lines(self, ended: threading.Event) -> None:
        """Write a line on what is done now and then, at least every 30 s, also while one step takes long."""
        started = time.monotonic()
        due = _FIRST_LINE_AFTER_SECONDS
        while not ended.wait(_POLL_SECONDS):
            seconds = time.monotonic() - started
            if seconds >= due:
                due = seconds + min(seconds, _SILENT_SECONDS - 2 * _POLL_SECONDS)
                console.note(self.line(seconds))

    def line(self, seconds: float) -> str:
        """Return the line for a log, so many seconds after the start."""
        left = ""
        if self._ends is not None and self._ends > time.monotonic():
            left = f", about {format_seconds(self._ends - time.monotonic())} left"
        return f"{self._doing}, after {format_seconds(seconds)}{left}; Ctrl-C stops it."

    def _shape(self, shape: BatchShape) -> str:
        return f"{shape.batch_size:,} × {format_length(shape.length, self._unit)}"

    def _introduce(self, device: Device) -> None:
        if not self._introduced:
            self._introduced = True
            console.notes(_about(device, ddp=self._ddp), quiet=self._quiet)

    def _update(self, progress: ProbeProgress | VerifyProgress, doing: str) -> None:
        self._introduce(progress.device)
        doing = f"{doing} {self._shape(progress.shape)}"
        self._doing = doing
        self._ends = None
        description = doing
        if progress.seconds_left:
            self._ends = time.monotonic() + progress.seconds_left
            description += f", about {format_seconds(progress.seconds_left)} left"
        self._bar.update(_TASK, description=description, completed=progress.done, total=progress.total)


def _about(device: Device, *, ddp: bool) -> Iterator[str]:
    """Describe the device, its limit, what is kept free and why, and why figures may be wrong."""
    from batchtune.trust import trust_warnings

    part = " (a part of a GPU: MIG)" if device.mig else ""
    first = f"Device: {device.name}{part}, {format_size(device.total_bytes)}; limit {format_size(device.limit_bytes)}."
    if device.load_average is not None:
        first += f" Load average: {device.load_average:.1f}, on {counted(device.processors or 1, 'processor')}."
    yield first
    if device.outside_bytes:
        outside = format_size(device.outside_bytes)
        yield f"CUDA and its libraries hold {outside} outside PyTorch's allocator, which is kept free too."
    if device.ddp_bytes:
        yield f"Kept free for DDP's gradient buckets: {format_size(device.ddp_bytes)}, a copy of the gradients."
    elif ddp:
        yield (
            "Warning: --ddp keeps nothing free: after the workload's setup no parameter requires a gradient. "
            "Give the size of its gradients with --reserve."
        )
    if device.reserve_bytes:
        yield f"Kept free by --reserve: {format_size(device.reserve_bytes)}."
    yield from (f"Warning: {text}" for text in trust_warnings(device, ()))


def _trial_line(trial: Trial, shape: str) -> str:
    """Return a trial as a line: `  12 × 24.5 s      ok      1.2 GiB   340 ms`."""
    peak = ""
    if trial.peak_bytes is not None:
        peak = format_size(trial.peak_bytes)
    last = ""
    if trial.caught:
        last = "caught by the workload"
    elif trial.step_seconds is not None:
        last = format_seconds(trial.step_seconds)
    outcome = "out of memory" if trial.outcome == "oom" else trial.outcome
    return f"{shape:>22}  {outcome:<13}  {peak:>9}  {last:>8}".rstrip()
