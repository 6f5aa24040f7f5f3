"""The probe from end to end: search, worker, journal, models, `probe.json`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.cost import Frontier, fit_cost, largest_max_batch_length
from batchtune.errors import ProbeError, ResultError, UsageError, WorkloadError
from batchtune.files import unwritable
from batchtune.lengths import Lengths
from batchtune.probe.journal import append_trial, read_trials
from batchtune.probe.oom import message_verdict
from batchtune.probe.protocol import Measured, Setup
from batchtune.probe.search import FrontierSearch, NothingFits, SearchSettings, SingleFails, TooLong
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    SAMPLER_FILE,
    SWEEP_FILE,
    TRIALS_FILE,
    CostModel,
    Device,
    Models,
    Probe,
    Run,
    Trial,
    WorkloadRecord,
    meta_of,
    read_result,
    write_result,
)
from batchtune.shapes import BatchShape
from batchtune.units import format_length, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """What to measure, where, and how closely.

    Attributes:
        workload: `builtin:NAME`, `path/to/file.py:NAME` or `package.module:NAME`.
        options: Passed to it.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        memory_bytes: Cap on the worker's memory; None: the whole device.
        memory_fraction: Part of it that may be used.
        num_lengths: How many lengths to probe.
        tolerance: How far below the true limit a batch size may be.
        max_batch_size: Never try more examples.
        trial_timeout_seconds: Longest that one trial may take.
        seed: Of the workload's random numbers.

    Raises:
        UsageError: A value is out of range.
    """

    workload: str
    options: dict[str, Any]
    device: str = "auto"
    memory_bytes: int | None = None
    memory_fraction: float = 0.9
    num_lengths: int = 12
    tolerance: float = 0.01
    max_batch_size: int | None = None
    trial_timeout_seconds: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UsageError(f"there is no device {self.device!r}", "Say --device auto, cpu, cuda or cuda:N.")
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(f"the memory fraction must be above 0 and at most 1, got {self.memory_fraction}")
        if not 0 <= self.tolerance < 1:
            raise UsageError(f"the tolerance must be at least 0 and below 1, got {self.tolerance}")
        if self.num_lengths < 2:
            raise UsageError(f"at least 2 lengths must be probed, got {self.num_lengths}")
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise UsageError(f"the largest batch size must be at least 1, got {self.max_batch_size}")
        if not self.trial_timeout_seconds > 0:
            raise UsageError(f"the time limit of a trial must be positive, got {self.trial_timeout_seconds}")

    def recorded(self) -> dict[str, Any]:
        """The settings that trials depend on, as `run.json` and `probe.json` carry them."""
        return {
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "memory_fraction": self.memory_fraction,
            "num_lengths": self.num_lengths,
            "tolerance": self.tolerance,
            "max_batch_size": self.max_batch_size,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """What the probe is doing; one before each trial and one after it.

    Attributes:
        shape: The batch shape in question.
        trial: Its outcome; None before it is known.
        done, total: Work done and work in all, as far as is known.
        seconds_left: A guess, from the time that trials took so far; None at the beginning.
        device: What is measured.
    """

    shape: BatchShape
    trial: Trial | None
    done: int
    total: int
    seconds_left: float | None
    device: Device


# What was measured under other conditions must not be continued, so these ends need a folder of their own.
_START_OVER = "then start over with --force, or in another folder with --run"

OnProgress = Callable[[ProbeProgress], None]
OnNote = Callable[[str], None]


def run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> Probe:
    """Finds what fits, continuing what the run folder holds, and writes `probe.json`.

    Args:
        lengths: The data set.
        settings: What to measure.
        folder: The run folder; made where missing, and held by one probe at a time.
        force: Start over, and throw away what the folder holds.
        on_progress: Told before and after each trial.
        on_note: Told, in a sentence, what the user should know of the trials that are already there.

    Raises:
        ResultError: The folder holds another run, or can't be written.
        WorkloadError: The workload failed with something that is no lack of memory.
        ProbeError: The device can't be used, or the data do not fit.
    """
    with alone_in(folder):
        previous = None if force else open_run(lengths, settings, folder)
        trials = [] if force else read_trials(folder / TRIALS_FILE)
        if previous is not None and trials and on_note is not None:
            on_note(_about_earlier(previous, settings, trials, folder))
        return _run_probe(lengths, settings, folder, previous, trials, force=force, on_progress=on_progress)


def _about_earlier(previous: Run, settings: ProbeSettings, trials: Sequence[Trial], folder: Path) -> str:
    """What there is already, and whether the workload's file has changed since."""
    text = f"{len(trials)} trials of an earlier run in {folder} are taken over; --force measures anew."
    if previous.workload_sha256 != _workload_sha256(settings):
        text = f"Warning: {settings.workload.rpartition(':')[0]} has changed since its trials were measured. {text}"
    return text


def _workload_sha256(settings: ProbeSettings) -> str | None:
    """Of the file that holds the workload; None where it is no file."""
    path = Path(settings.workload.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" and path.is_file() else None


def _run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    previous: Run | None,
    trials: list[Trial],
    *,
    force: bool,
    on_progress: OnProgress | None,
) -> Probe:
    journal = folder / TRIALS_FILE
    setup = Setup(
        workload=settings.workload,
        options=settings.options,
        device=settings.device,
        memory_bytes=settings.memory_bytes,
        memory_fraction=settings.memory_fraction,
        limit_bytes=previous.device.limit_bytes if previous else None,
        seed=settings.seed,
    )
    with Supervisor(setup, trial_timeout_seconds=settings.trial_timeout_seconds) as supervisor:
        device = supervisor.start()
        if previous is None:
            if force:  # not before: a workload that can't even be built must not cost an earlier run
                clear_run(folder)
            write_result(folder / RUN_FILE, _run_record(lengths, settings, device))
        elif device.name != previous.device.name:
            raise ResultError(
                f"{folder} was measured on {previous.device.name}; this is {device.name}",
                "Give another folder with --run, or --force to start over in this one.",
            )
        search = _search(lengths, settings, device)
        while (shape := _propose(search, trials, lengths, device, settings)) is not None:
            _tell(on_progress, search, trials, shape, device, done=None)
            trial, measured = supervisor.measure(shape, len(trials))
            append_trial(journal, trial)
            trials.append(trial)
            if trial.outcome == "error":
                raise _workload_error(settings, trial, measured)
            _tell(on_progress, search, trials, shape, device, done=trial)
    probe = _result(lengths, settings, device, search, trials)
    write_result(folder / PROBE_FILE, probe)
    return probe


def open_run(lengths: Lengths, settings: ProbeSettings, folder: Path) -> Run | None:
    """The run that the folder holds, if it is this one and can be continued.

    Raises:
        ResultError: It is another's: other lengths, workload or settings.
    """
    if not (folder / RUN_FILE).exists():
        if (folder / TRIALS_FILE).exists() or (folder / PROBE_FILE).exists():
            raise ResultError(
                f"{folder} holds a probe, but no {RUN_FILE} that says of what",
                "Give another folder with --run, or --force to start over in this one.",
            )
        return None
    run = read_result(folder / RUN_FILE, Run)
    differences = list(_differences(run, lengths, settings))
    if differences:
        raise ResultError(
            f"{folder} holds a run of something else: {'; '.join(differences)}",
            "Give another folder with --run, or --force to start over in this one.",
        )
    return run


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process; the system lets go of it when the process ends, however it does.

    Raises:
        ResultError: Another process holds it, or it can't be made.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ResultError(
            f"another probe is at work in {folder}", "Wait for it, or give another folder with --run."
        ) from None
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):  # where nothing was written, nothing stays
            folder.rmdir()


def clear_run(folder: Path) -> None:
    """Removes batchtune's own files from a run folder, and nothing else.

    Raises:
        ResultError: They can't be removed.
    """
    for name in (RUN_FILE, TRIALS_FILE, PROBE_FILE, SWEEP_FILE, SAMPLER_FILE):
        path = folder / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ResultError(f"{path} can't be removed: {error.strerror or error}") from error


def _differences(run: Run, lengths: Lengths, settings: ProbeSettings) -> Sequence[str]:
    different = []
    if run.lengths.fingerprint != lengths.fingerprint:
        theirs = f"{run.lengths.count:,} lengths up to {format_length(run.lengths.max, run.lengths.unit)}"
        ours = f"{lengths.count:,} up to {format_length(lengths.longest, lengths.unit)}"
        different.append(f"other lengths ({theirs}; these are {ours})")
    if run.workload != WorkloadRecord(spec=settings.workload, options=settings.options):
        different.append(f"the workload {_described(run.workload)}")
    for name, value in settings.recorded().items():
        if run.settings.get(name) != value:
            different.append(f"{name} = {run.settings.get(name)}, now {value}")
    return different


def _described(workload: WorkloadRecord) -> str:
    options = ", ".join(f"{key}={value}" for key, value in workload.options.items())
    return f"{workload.spec} ({options})" if options else workload.spec


def _run_record(lengths: Lengths, settings: ProbeSettings, device: Device) -> Run:
    return Run(
        meta=meta_of(Run),
        lengths=lengths.summary(),
        workload=WorkloadRecord(spec=settings.workload, options=settings.options),
        device=device,
        settings=settings.recorded(),
        workload_sha256=_workload_sha256(settings),
    )


def _search(lengths: Lengths, settings: ProbeSettings, device: Device) -> FrontierSearch:
    limits = SearchSettings(
        num_lengths=settings.num_lengths,
        tolerance=settings.tolerance,
        max_batch_size=settings.max_batch_size,
        limit_bytes=device.limit_bytes,
    )
    return FrontierSearch(lengths, limits, fit=fit_cost)


def _propose(
    search: FrontierSearch, trials: Sequence[Trial], lengths: Lengths, device: Device, settings: ProbeSettings
) -> BatchShape | None:
    """The next shape, with the search's findings that end it turned into errors for the user."""
    try:
        return search.propose(trials)
    except SingleFails as single:
        raise _no_lack_of_memory(settings, single.trial) from None
    except NothingFits as nothing:
        if message_verdict(nothing.trial.error or "") == "disguised":
            raise _no_lack_of_memory(settings, nothing.trial) from None
        raise ProbeError(
            f"the memory limit of {format_size(device.limit_bytes)} is too small: even a batch of one of the shortest "
            f"example ({format_length(lengths.shortest, lengths.unit)}) exceeds it ({nothing})",
            f"Give more with --memory, or take a smaller model with --set; {_START_OVER}.",
        ) from None
    except TooLong as long:
        raise ProbeError(
            f"the longest example ({format_length(lengths.longest, lengths.unit)}) does not fit within "
            f"{format_size(device.limit_bytes)}, even alone: {long.too_long:,} of {lengths.count:,} examples are "
            f"longer than {format_length(long.fitting_length, lengths.unit)}, the longest that fits",
            f"Leave them out with --max-length {long.fitting_length!r}, give more memory with --memory, "
            f"or take a smaller model (checkpointing, a lower precision) with --set; {_START_OVER}.",
        ) from None


def _no_lack_of_memory(settings: ProbeSettings, trial: Trial) -> WorkloadError:
    error = _workload_error(settings, trial, None)
    error.hint = f"This is no lack of memory: the probe stops. Mend it; {_START_OVER}."
    return error


def _tell(
    on_progress: OnProgress | None,
    search: FrontierSearch,
    trials: Sequence[Trial],
    shape: BatchShape,
    device: Device,
    done: Trial | None,
) -> None:
    if on_progress is None:
        return
    closed, total = search.progress(trials)
    spent = sum(trial.elapsed_seconds for trial in trials)
    left = spent / closed * (total - closed) if closed else None
    on_progress(ProbeProgress(shape=shape, trial=done, done=closed, total=total, seconds_left=left, device=device))


def _workload_error(settings: ProbeSettings, trial: Trial, measured: Measured | None) -> WorkloadError:
    stage = measured.stage if measured and measured.stage else "step"
    shape = BatchShape(trial.batch_size, trial.length, trial.target_length)
    return WorkloadError(
        f"{settings.workload} failed in its {stage}, with a batch of {shape}: {trial.error}",
        "This is no lack of memory: the probe stops. Mend it and run the same command again; "
        "the trials so far are kept.",
        measured.traceback if measured else None,
    )


def _result(
    lengths: Lengths, settings: ProbeSettings, device: Device, search: FrontierSearch, trials: list[Trial]
) -> Probe:
    points = search.frontier(trials)
    peak_model = search.peak_model(trials)
    frontier = Frontier.of(points, device.limit_bytes, peak_model)
    return Probe(
        meta=meta_of(Probe),
        lengths=lengths.summary(),
        workload=WorkloadRecord(spec=settings.workload, options=settings.options),
        device=device,
        settings=settings.recorded(),
        trials=trials,
        frontier=points,
        models=Models(
            peak_bytes=peak_model,
            step_seconds=_step_time_model([trial for trial in trials if trial.outcome == "ok"]),
        ),
        max_batch_length=largest_max_batch_length(frontier, lengths.histogram),
    )


def _step_time_model(passed: Sequence[Trial]) -> CostModel | None:
    timed = [(trial.batch_size, trial.length, trial.step_seconds) for trial in passed if trial.step_seconds]
    if not timed:
        return None
    batch_sizes, long, seconds = zip(*timed, strict=True)
    return fit_cost(batch_sizes, long, seconds)
