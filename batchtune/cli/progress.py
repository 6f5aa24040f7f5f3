"""Live progress on stderr: what is tried, what was found, how long still. Silent where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

from batchtune.cli import console
from batchtune.cli.options import RunOptions

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from batchtune.lengths import Lengths
    from batchtune.manifests import Progress
    from batchtune.probe.settings import ProbeSettings
    from batchtune.results import Device, Probe, Row, Trial
    from batchtune.tuning.probing import ProbeProgress
    from batchtune.tuning.sweep import SweepSettings
    from batchtune.tuning.verify_steps import VerifyProgress

_SHOWN_AFTER_SECONDS = 1.0
_FIRST_LINE_AFTER_SECONDS = 10.0


def probe_with_progress(
    lengths: Lengths,
    settings: ProbeSettings,
    run: RunOptions,
    *,
    default_workload: bool,
    sweep_settings: SweepSettings | None = None,
) -> Probe:
    """Runs the probe with a line for each trial and a bar below."""
    from batchtune.tuning.probing import ProbeHooks, run_probe
    from batchtune.tuning.sweeping import holds_other_lengths

    holds_other_lengths(lengths, run.run, force=run.force)
    if default_workload:
        chosen = f"Workload: {settings.workload}, the built-in for lengths in {lengths.unit}; --workload names yours."
        console.notes([chosen], quiet=run.quiet)
    with _bar(quiet=run.quiet) as bar:
        watcher = _ProbeWatcher(bar, lengths.unit, ddp=settings.ddp, quiet=run.quiet)
        return run_probe(
            lengths,
            settings,
            run.run,
            force=run.force,
            sweep_settings=sweep_settings,
            hooks=ProbeHooks(on_progress=watcher, on_note=lambda text: console.notes([text], quiet=run.quiet)),
        )


@contextmanager
def row_counter(settings: SweepSettings, *, quiet: bool) -> Iterator[Callable[[Row], None]]:
    """A bar that counts the rows of a sweep."""
    with _bar(quiet=quiet) as bar:
        task = bar.add_task("Sweeping", total=len(settings.strategies) * len(settings.num_buckets))
        yield lambda row: bar.update(task, advance=1, description=f"{row.strategy}, {row.num_buckets} buckets")


@contextmanager
def reading_bar(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar for the reading of a manifest: it comes once that takes longer than a second.

    Where stderr is no terminal, a line after 10 s, and then whenever the time has doubled.
    """
    started = time.monotonic()
    if quiet or not sys.stderr.isatty():
        yield None if quiet else _lines(started)
        return
    with ExitStack() as stack:
        shown: list[Callable[[Progress], None]] = []

        def on_progress(progress: Progress) -> None:
            seconds = time.monotonic() - started
            if not shown and seconds > _SHOWN_AFTER_SECONDS:
                bar = stack.enter_context(_bar(quiet=quiet))
                task = bar.add_task("Reading", total=1.0)
                shown.append(lambda now: bar.update(task, completed=now.share, description=_rate(now, started)))
            for show in shown:
                show(progress)

        yield on_progress


def _lines(started: float) -> Callable[[Progress], None]:
    from batchtune.units import counted, format_seconds

    next_seconds = _FIRST_LINE_AFTER_SECONDS

    def on_progress(progress: Progress) -> None:
        nonlocal next_seconds
        seconds = time.monotonic() - started
        if seconds >= next_seconds:
            next_seconds = 2 * seconds
            read = f"{counted(progress.examples, 'example')} and {progress.share:.0%} of the bytes"
            console.note(f"Reading: {read} in {format_seconds(seconds)}; Ctrl-C ends it.")

    return on_progress


def _rate(progress: Progress, started: float) -> str:
    from batchtune.units import counted, format_seconds

    seconds = time.monotonic() - started
    left = seconds * (1 - progress.share) / max(progress.share, 1e-9)
    rate = f"{progress.examples / seconds:,.0f}/s"
    return f"Reading: {counted(progress.examples, 'example')}, {rate}, about {format_seconds(left)} left"


class _Watcher:
    """A bar for what a worker does; tells of its device first."""

    def __init__(self, bar: Bar, unit: str | None, *, ddp: bool, quiet: bool) -> None:
        self._bar = bar
        self._unit = unit
        self._ddp = ddp
        self._quiet = quiet
        self._task = bar.add_task("Building the workload", total=None)
        self._introduced = False

    def _introduce(self, device: Device) -> None:
        if not self._introduced:
            self._introduced = True
            console.notes(_about(device, ddp=self._ddp), quiet=self._quiet)


class _ProbeWatcher(_Watcher):
    """Turns the probe's progress into lines and a bar."""

    def __call__(self, progress: ProbeProgress) -> None:
        from batchtune.units import format_length, format_seconds

        self._introduce(progress.device)
        length = format_length(progress.shape.length, self._unit)
        if progress.trial is None:
            left = f", about {format_seconds(progress.seconds_left)} left" if progress.seconds_left else ""
            doing = "Looking for the longest that fits:" if progress.shortening else "Trying"
            doing = "Confirming in turns:" if progress.confirming else doing
            description = f"{doing} {progress.shape.batch_size:,} × {length}{left}"
            self._bar.update(self._task, description=description, completed=progress.done, total=progress.total)
        else:
            self._bar.console.print(_told(progress.trial, length), highlight=False, markup=False)
            self._bar.update(self._task, completed=progress.done, total=progress.total)


@contextmanager
def verify_bar(unit: str | None, *, ddp: bool, quiet: bool) -> Iterator[Callable[[VerifyProgress], None]]:
    """A bar that counts the steps of a verification, with the batch that is run; the device is told before."""
    with _bar(quiet=quiet) as bar:
        watch = _VerifyWatcher(bar, unit, ddp=ddp, quiet=quiet)
        yield watch


class _VerifyWatcher(_Watcher):
    """Turns the verification's progress into a bar."""

    _DOING: ClassVar = {"worst": "Worst batches", "shuffled": "Shuffled batches", "proposal": "Trying smaller batches"}

    def __call__(self, progress: VerifyProgress) -> None:
        from batchtune.units import format_length, format_seconds

        self._introduce(progress.device)
        shape = f"{progress.shape.batch_size:,} × {format_length(progress.shape.length, self._unit)}"
        of = "" if progress.total is None else f" of {progress.total:,}"
        left = "" if progress.seconds_left is None else f", about {format_seconds(progress.seconds_left)} left"
        description = f"{self._DOING[progress.doing]}, step {progress.done + 1:,}{of}: {shape}{left}"
        self._bar.update(self._task, description=description, completed=progress.done, total=progress.total)


def _about(device: Device, *, ddp: bool) -> list[str]:
    """The device, its limit, what is kept free and why, and why figures may be wrong."""
    from batchtune.trust import trust_warnings
    from batchtune.units import counted, format_size

    part = " (a part of a GPU: MIG)" if device.mig else ""
    processors = counted(device.processors or 1, "processor")
    lines = [
        f"Device: {device.name}{part}, {format_size(device.total_bytes)}; "
        f"the limit is {format_size(device.limit_bytes)}."
        + (f" Load average: {device.load_average:.1f}, on {processors}." if device.load_average is not None else "")
    ]
    if device.outside_bytes:
        lines.append(
            f"CUDA and its libraries hold {format_size(device.outside_bytes)} outside PyTorch's allocator; that is "
            "kept free besides."
        )
    if device.ddp_bytes:
        lines.append(
            f"DDP's gradient buckets: one copy of the gradients, {format_size(device.ddp_bytes)}, is kept free."
        )
    elif ddp:
        lines.append(
            "Warning: --ddp keeps nothing free: after the workload's setup there was no parameter that requires a "
            "gradient. Say with --reserve how much its gradients take."
        )
    if device.reserve_bytes:
        lines.append(f"--reserve: {format_size(device.reserve_bytes)} are kept free.")
    return [*lines, *(f"Warning: {text}" for text in trust_warnings(device, ()))]


def _told(trial: Trial, length: str) -> str:
    """A trial as a line: `  12 × 24.5 s      ok      1.2 GiB   340 ms`."""
    from batchtune.units import format_seconds, format_size

    peak = format_size(trial.peak_bytes) if trial.peak_bytes is not None else ""
    time = format_seconds(trial.step_seconds) if trial.step_seconds is not None else ""
    outcome = "out of memory" if trial.outcome == "oom" else trial.outcome
    if trial.caught:
        time = "caught by the workload"
    return f"{f'{trial.batch_size:,} × {length}':>22}  {outcome:<13}  {peak:>9}  {time:>8}".rstrip()


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    shown = stderr.is_terminal and not quiet
    silent = Console(stderr=True, quiet=True)
    with Progress(*columns, console=stderr if shown else silent, transient=True, disable=not shown) as bar:
        yield bar
