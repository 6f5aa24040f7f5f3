"""Output to the terminal: results on stdout; notes and progress on stderr, a bar on a terminal, elsewhere lines."""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.errors import UsageError, without_commands, without_secrets
from batchtune.units import counted, format_length, format_seconds, format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from batchtune.lengths import Lengths
    from batchtune.loaders.tuner import LoaderProgress
    from batchtune.manifests.storage import Traffic
    from batchtune.probe.messages import ProbeProgress
    from batchtune.probe.settings import ProbeSettings
    from batchtune.reports import RunResults
    from batchtune.reports.page import Page
    from batchtune.results import (
        BatchShape,
        Device,
        PackedRow,
        Row,
        StreamRow,
        Trial,
    )
    from batchtune.results.shared import Result
    from batchtune.verify import VerifyProgress

_FIRST_LINE_AFTER_SECONDS = 10.0
_SILENT_SECONDS = 30.0  # at most, in a log
_POLL_SECONDS = 0.5
_TOLD_SHARE = 1e-4  # of which the time left can be told


def note(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr, unless quiet."""
    if not quiet:
        # Names of files and columns may come from anywhere.
        harmless = visible(without_commands(without_secrets(text), wrapped=False))
        print(harmless, file=sys.stderr, flush=True)


def notes(texts: Iterable[str], *, quiet: bool) -> None:
    """Print lines to stderr, unless quiet."""
    for text in texts:
        note(text, quiet=quiet)


def visible(text: str) -> str:
    """Return text whose control and formatting characters are escapes; line ends and tabs stay."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t"
        and unicodedata.category(character) in ("Cc", "Cf", "Cs")
        else character
        for character in text
    )


def show(results: RunResults, *, full: bool) -> None:
    """Show a run on stdout."""
    from batchtune.reports.page import build_page

    show_page(build_page(results), full=full)


def show_page(page: Page, *, full: bool = True) -> None:
    """Show a page on stdout; without a terminal it is plain, and as wide as a report needs."""
    from rich.console import Console

    from batchtune.reports.terminal import text_of

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    sys.stdout.write(text_of(page, console, full=full))


def file_of(output: Path | None) -> Path | None:
    """Return the file that an option names; None is stdout, as `-` is."""
    if str(output) == "-":
        return None
    return output


def write_result(
    text: str,
    output: Path | None,
    *,
    inputs: Sequence[str | Path] = (),
    quiet: bool = False,
) -> None:
    """Write a result to a file, whole or not at all, never over `inputs` or a run's files; to stdout for None and `-`.

    Say where the file is, unless quiet: its folder may be new.
    """
    from batchtune.files import write_whole

    file = file_of(output)
    if file is None:
        sys.stdout.write(text.removesuffix("\n") + "\n")
    else:
        refuse_overwriting(file, inputs)
        write_whole(file, text)
        note(f"Wrote {file.resolve()}.", quiet=quiet)


def write_json(record: Result) -> None:
    """Write a record to stdout as JSON."""
    from batchtune.results import encode

    write_result(encode(record).decode(), None)


def refuse_overwriting(output: Path, inputs: Sequence[str | Path]) -> None:
    """Raise UsageError if a file is one of the inputs, or a file of a run folder."""
    from batchtune.results import RUN_FILES

    if not output.exists():
        return
    if output.name in RUN_FILES:
        raise UsageError(
            f"{output} is a file of a run folder and must not be overwritten",
            "Give another name.",
        )
    if any(Path(path).exists() and output.samefile(path) for path in inputs):
        raise UsageError(
            f"{output} is an input and must not be overwritten", "Give another name."
        )


def describe(lengths: Lengths, *, quiet: bool) -> None:
    """Describe the data in a few lines on stderr: what was read, what was left out, what looks wrong."""
    from batchtune.reports.page import survey, survey_sentences

    scan = survey(lengths)
    notes(
        [*survey_sentences(scan), *(f"Warning: {text}" for text in scan.warnings)],
        quiet=quiet,
    )


@contextmanager
def progress(doing: str, *, quiet: bool) -> Iterator[Progress]:
    """Show what is being done: a bar on a terminal, else lines, and nothing if quiet."""
    shown = Progress(doing)
    with ExitStack() as stack:
        if sys.stderr.isatty() and not quiet:
            shown.bar = stack.enter_context(_bar())
            shown.bar.add_task(doing, total=None)
        elif not quiet:
            ended = threading.Event()
            lines = threading.Thread(
                target=shown.write_lines, args=[ended], daemon=True
            )
            lines.start()
            stack.callback(lines.join)
            stack.callback(ended.set)
        yield shown


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


@dataclass(slots=True)
class Progress:
    """The progress of the present task; `ends` is a guess of when it will be over, on the monotonic clock."""

    doing: str
    ends: float = 0.0
    bar: Bar | None = None
    rows: int = 0
    started: float = field(default_factory=time.monotonic)

    def update(
        self,
        doing: str,
        done: float,
        total: float | None,
        seconds_left: float | None = None,
    ) -> None:
        """Show the present task, and how much of all is done."""
        self.doing = doing
        self.ends = time.monotonic() + (seconds_left or 0.0)
        if self.bar is not None:
            self.bar.update(
                self.bar.task_ids[0],
                description=f"{doing}{self._left()}",
                completed=done,
                total=total,
            )

    def reading(self, share: float, examples: int, traffic: Traffic) -> None:
        """Show which share of the bytes of a manifest is read, and what that cost over the network."""
        seconds = time.monotonic() - self.started
        doing = f"Reading: {counted(examples, 'example')} and {share:.0%} of the bytes"
        if traffic.requests:
            size = format_size(traffic.size)
            doing += f", {counted(traffic.requests, 'request')} for {size}"
        seconds_left = None
        if share > _TOLD_SHARE:
            seconds_left = seconds * (1 - share) / share
        self.update(doing, share, 1.0, seconds_left)

    def row(self, row: Row | PackedRow | StreamRow, rows: int | None = None) -> None:
        """Show one more row of a sweep, and how many there will be, if known."""
        self.rows += 1
        doing = f"Sweeping: {row.name}, row {self.rows}"
        if rows is not None:
            doing += f" of {rows}"
        self.update(doing, self.rows, rows)

    def loader(self, tuning: LoaderProgress) -> None:
        """Show the settings of a loader that are measured."""
        from batchtune.results import argument_text

        words = [
            f"{name}={argument_text(value)}" for name, value in tuning.arguments.items()
        ]
        doing = " ".join([tuning.doing, *words])
        self.update(
            f"{doing}, {tuning.done} of {tuning.total}",
            tuning.done,
            tuning.total,
            tuning.seconds,
        )

    def say(self, line: str) -> None:
        """Print a line above the bar; without a bar, nothing."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)

    def write_lines(self, ended: threading.Event) -> None:
        """Write a line of progress now and then, at least every 30 s, even while one step takes long."""
        due = _FIRST_LINE_AFTER_SECONDS
        while not ended.wait(_POLL_SECONDS):
            seconds = time.monotonic() - self.started
            if seconds >= due:
                due = seconds + min(seconds, _SILENT_SECONDS - 2 * _POLL_SECONDS)
                note(
                    f"{self.doing}, after {format_seconds(seconds)}{self._left()}; Ctrl-C stops it."
                )

    def _left(self) -> str:
        seconds = self.ends - time.monotonic()
        return f", about {format_seconds(seconds)} left" if seconds > 0 else ""


@contextmanager
def worker_bar(
    unit: str | None, settings: ProbeSettings, *, quiet: bool
) -> Iterator[WorkerBar]:
    """Show the training steps of a worker process; `unit` is that of the lengths."""
    doing = "Building the workload"
    if settings.command is not None:
        limit = format_seconds(settings.setup_timeout_seconds)
        doing = (
            f"Waiting for the script's first batches, at most {limit} (--setup-timeout)"
        )
    with progress(doing, quiet=quiet) as bar:
        yield WorkerBar(bar, unit, settings, quiet)


@dataclass(slots=True)
class WorkerBar:
    """Shows what a worker process does: lines about its device, then each step, with a line for each trial."""

    bar: Progress
    unit: str | None
    settings: ProbeSettings
    quiet: bool
    introduced: bool = False

    def probing(self, probing: ProbeProgress) -> None:
        """Show the progress of a probe."""
        if probing.trial is not None:
            self.bar.say(_trial_line(probing.trial, self._shape(probing.shape)))
            return
        if probing.confirming:
            doing = f"Confirming interleaved batches, {probing.done + 1:,} of {probing.total:,}:"
        elif probing.shortening:
            doing = "Finding the longest that fits:"
        elif probing.shape.sequences is not None:
            doing = f"Trial {probing.done + 1} of {probing.total} at most:"
        else:
            doing = f"{probing.done} of {probing.total} lengths done"
            added = probing.total - self.settings.num_lengths
            if added > 0:
                doing += f" ({added} added where the bucket tables gain)"
            doing += ", trying"
        self._show(probing, doing, probing.seconds_left)

    def verifying(self, verifying: VerifyProgress) -> None:
        """Show the progress of a verification."""
        if verifying.phase == "replayed":
            steps = counted(verifying.total, "step")
            self._show(verifying, f"Replaying the memory requests of {steps}, such as")
            return
        doing = f"{verifying.phase.replace('pairs', 'paired').capitalize()} batches"
        if verifying.process > 1:
            doing += f" in process {verifying.process}"
        self._show(
            verifying, f"{doing}, {verifying.done + 1:,} of {verifying.total:,}:"
        )

    def _show(
        self,
        worker: ProbeProgress | VerifyProgress,
        doing: str,
        seconds_left: float | None = None,
    ) -> None:
        if not self.introduced:
            self.introduced = True
            notes(_about(worker.device, self.settings), quiet=self.quiet)
        self.bar.update(
            f"{doing} {self._shape(worker.shape)}",
            worker.done,
            worker.total,
            seconds_left,
        )

    def _shape(self, shape: BatchShape) -> str:
        if shape.sequences is not None:
            return f"{shape.tokens:,} tokens in {counted(shape.batch_size, 'sequence')}"
        return f"{shape.batch_size:,} × {format_length(shape.length, self.unit)}"


def _about(device: Device, settings: ProbeSettings) -> Iterator[str]:
    """Describe the device, its limit, what is kept free, and why figures may be wrong."""
    from batchtune.trust import trust_warnings

    limit = f"{format_size(device.limit_bytes)}{device.whose}"
    kept = device.ddp_bytes + device.reserve_bytes
    allowed = int((settings.memory_bytes or 0) * settings.memory_fraction) - kept
    if device.limit_bytes < allowed:
        limit += " (no more is free on the device)"
    elif settings.memory_bytes is not None and settings.memory_fraction < 1:
        limit += f" ({settings.memory_fraction:.0%} of --memory, by --memory-fraction)"
    first = f"Device: {device.name}, {format_size(device.total_bytes)}; limit {limit}."
    if device.mig:
        first += " It is a part of a GPU (MIG)."
    if device.load_average is not None:
        first += f" Load average: {device.load_average:.1f}, on {counted(device.processors or 1, 'processor')}."
    yield first
    kept += device.outside_bytes or 0
    if kept:
        yield f"In addition, {format_size(kept)} are kept free for --reserve, --ddp and the device's libraries."
    if settings.ddp and not device.ddp_bytes:
        yield (
            "Warning: --ddp keeps nothing free: after the workload's setup no parameter requires a gradient. "
            "Give the size of its gradients with --reserve."
        )
    for text in trust_warnings(device, ()):
        yield f"Warning: {text}"


def _trial_line(trial: Trial, shape: str) -> str:
    """Return a trial as a line: `  12 × 24.5 s      ok      1.2 GiB   340 ms`."""
    outcome = "out of memory" if trial.outcome == "oom" else trial.outcome
    line = f"{shape:>22}  {outcome:<13}"
    if trial.peak_bytes is not None:
        line += f"  {format_size(trial.peak_bytes):>9}"
    elif trial.rank is not None:
        line += f"  on rank {trial.rank}"
    if trial.step_seconds is not None:
        line += f"  {format_seconds(trial.step_seconds):>8}"
    return line.rstrip()
