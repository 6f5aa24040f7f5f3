"""The probe from end to end: search, worker, journal, confirmation, models, `probe.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from batchtune.cost import Frontier, fit_cost, fit_step_seconds, largest_max_batch_length
from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import ROUNDS, Failure, Turns, confirm
from batchtune.probe.journal import append_trial, read_trials
from batchtune.probe.oom import message_verdict
from batchtune.probe.protocol import Measured, Stepped
from batchtune.probe.search import FrontierSearch, NothingFits, Proposal, SearchSettings, SingleFails, TooLong
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    TRIALS_FILE,
    Confirmation,
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
from batchtune.trust import settings_differences, trust_warnings
from batchtune.tuning.confirming import shapes_to_confirm
from batchtune.tuning.probe_settings import ProbeSettings
from batchtune.tuning.run_folder import alone_in, clear_run, open_run, run_record, workload_sha256
from batchtune.tuning.sweep import SweepSettings
from batchtune.tuning.targets import TypicalTargets
from batchtune.units import format_length, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """What the probe is doing: one before each trial, one after it, and one before each step of the confirmation.

    Attributes:
        shape: The batch shape in question.
        trial: Its outcome; None before it is known.
        done, total: Lengths whose largest batch is known, and all of them; steps while confirming.
        seconds_left: A guess, from the time that trials took so far; None at the beginning.
        device: What is measured.
        confirming: Whether the shapes at the limit are run in turns.
    """

    shape: BatchShape
    trial: Trial | None
    done: int
    total: int
    seconds_left: float | None
    device: Device
    confirming: bool = False


# What was measured under other conditions must not be continued, so these ends need a folder of their own.
_START_OVER = "then start over with --force, or in another folder with --run"

# Where batches still fail in turns after so many times, more are not tried: the report says so.
_MOST_CONFIRMATIONS = 6
# Once after a larger shape is no matter; in one step of ten it is.
_MANY_RETRIES = 0.1

OnProgress = Callable[[ProbeProgress], None]
OnNote = Callable[[str], None]


def run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    *,
    force: bool = False,
    sweep_settings: SweepSettings | None = None,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> Probe:
    """Finds what fits, continuing what the run folder holds, and writes `probe.json`.

    Args:
        lengths: The data set.
        settings: What to measure.
        folder: The run folder; made where missing, and held by one probe at a time.
        sweep_settings: Of the sweep that will follow: the batches of the table that it would recommend are
            confirmed. None: of one with 20 optimal buckets.
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
        if lengths.targets is not None and on_note is not None:
            on_note("Targets: each length is probed with the longest target that occurs at or below it.")
        with Supervisor(
            settings.setup(previous.device.limit_bytes if previous else None),
            trial_timeout_seconds=settings.trial_timeout_seconds,
            first_worker=1 + max((trial.worker or 0 for trial in trials), default=0),
        ) as supervisor:
            device = supervisor.start()
            if previous is None:
                if force:  # not before: a workload that can't even be built must not cost an earlier run
                    clear_run(folder)
                write_result(folder / RUN_FILE, run_record(lengths, settings, device))
            else:
                _check_device(previous, device, folder)
            probing = _Probing(
                lengths=lengths,
                settings=settings,
                folder=folder,
                first_device=previous.device if previous else device,
                device=device,
                supervisor=supervisor,
                on_progress=on_progress,
                trials=trials,
                sweep_settings=sweep_settings
                or SweepSettings(strategies=("optimal",), num_buckets=(20,), max_batch_size=settings.max_batch_size),
            )
            return probing.run()


def _about_earlier(previous: Run, settings: ProbeSettings, trials: Sequence[Trial], folder: Path) -> str:
    """What there is already, and whether the workload's file has changed since."""
    text = f"{len(trials)} trials of an earlier run in {folder} are taken over; --force measures anew."
    if previous.workload_sha256 != workload_sha256(settings):
        text = f"Warning: {settings.workload.rpartition(':')[0]} has changed since its trials were measured. {text}"
    return text


def _check_device(previous: Run, device: Device, folder: Path) -> None:
    if device.name != previous.device.name:
        raise ResultError(
            f"{folder} was measured on {previous.device.name}; this is {device.name}",
            "Give another folder with --run, or --force to start over in this one.",
        )


@dataclass(slots=True, kw_only=True)
class _Probing:
    """One probe at work: the trials so far, and who runs the next.

    Attributes:
        first_device: The device as it was when the run began; `device` is how it is now.
    """

    lengths: Lengths
    settings: ProbeSettings
    folder: Path
    first_device: Device
    device: Device
    supervisor: Supervisor
    on_progress: OnProgress | None
    trials: list[Trial]
    sweep_settings: SweepSettings
    search: FrontierSearch = field(init=False)

    def __post_init__(self) -> None:
        limits = SearchSettings(
            num_lengths=self.settings.num_lengths,
            tolerance=self.settings.tolerance,
            max_batch_size=self.settings.max_batch_size,
            limit_bytes=self.device.limit_bytes,
        )
        self.search = FrontierSearch(self.lengths, limits, fit=fit_cost)

    def run(self) -> Probe:
        """Searches, confirms, and searches again where a shape was given up, until all hold; writes `probe.json`."""
        self._search()
        self._time_typical_targets()
        if (finished := self._finished()) is not None:
            return finished
        shapes = self._shapes()
        for _ in range(_MOST_CONFIRMATIONS):
            turns = self._confirm(shapes)
            if not turns.failures:
                break
            for failure in turns.failures:
                self._give_up(failure)
            self._search()
            shapes = self._shapes()
        probe = self._result(turns, len(shapes))
        write_result(self.folder / PROBE_FILE, probe)
        return probe

    def _finished(self) -> Probe | None:
        """The probe that was written for just these trials; None where there is none."""
        path = self.folder / PROBE_FILE
        if not self.trials or not path.exists():
            return None
        probe = read_result(path, Probe)
        return probe if probe.trials == self.trials and probe.confirmation is not None else None

    # The search

    def _search(self) -> None:
        while (proposal := self._propose()) is not None:
            self._measure(proposal.shape, fresh=proposal.fresh)

    def _measure(self, shape: BatchShape, *, fresh: bool = False) -> None:
        self._tell(shape, None)
        trial, measured = self.supervisor.measure(shape, len(self.trials), fresh=fresh)
        self._keep(trial)
        if trial.outcome == "error":
            raise _workload_error(self.settings, trial, measured)
        self._tell(shape, trial)

    def _keep(self, trial: Trial) -> None:
        append_trial(self.folder / TRIALS_FILE, trial)
        self.trials.append(trial)

    def _propose(self) -> Proposal | None:
        """What to try next, with the search's findings that end it turned into errors for the user."""
        try:
            return self.search.propose(self.trials)
        except SingleFails as single:
            raise _no_lack_of_memory(self.settings, single.trial) from None
        except NothingFits as nothing:
            if message_verdict(nothing.trial.error or "") == "disguised":
                raise _no_lack_of_memory(self.settings, nothing.trial) from None
            self._raise_nothing_fits(nothing)
        except TooLong as long:
            self._raise_too_long(long)

    def _raise_nothing_fits(self, nothing: NothingFits) -> NoReturn:
        shortest = format_length(self.lengths.shortest, self.lengths.unit)
        raise ProbeError(
            f"the memory limit of {format_size(self.device.limit_bytes)} is too small: even a batch of one of the "
            f"shortest example ({shortest}) exceeds it ({nothing})",
            f"Give more with --memory, or take a smaller model with --set; {_START_OVER}.",
        ) from None

    def _raise_too_long(self, long: TooLong) -> NoReturn:
        unit = self.lengths.unit
        raise ProbeError(
            f"the longest example ({format_length(self.lengths.longest, unit)}) does not fit within "
            f"{format_size(self.device.limit_bytes)}, even alone: {long.too_long:,} of {self.lengths.count:,} "
            f"examples are longer than {format_length(long.fitting_length, unit)}, the longest that fits",
            f"Leave them out with --max-length {long.fitting_length!r}, give more memory with --memory, "
            f"or take a smaller model (checkpointing, a lower precision) with --set; {_START_OVER}.",
        ) from None

    def _time_typical_targets(self) -> None:
        """Times the frontier once more with targets as batches really have them.

        The search tries the worst target of each length, which memory must hold; times of those alone would make an
        epoch look slower than it is.
        """
        typical, targets = TypicalTargets.of(self.lengths), self.lengths.targets
        if typical is None or targets is None:
            return
        whole = bool((targets == np.floor(targets)).all())
        known = {(trial.batch_size, trial.length, trial.target_length) for trial in self.trials}
        for point in reversed(self.search.frontier(self.trials)):
            target = float(typical([point.batch_size], [point.length])[0])
            target = float(np.ceil(target)) if whole else target
            shape = BatchShape(point.batch_size, point.length, target)
            if (shape.batch_size, shape.length, target) in known or target >= (point.target_length or 0.0):
                continue
            self._measure(shape)

    # The confirmation

    def _shapes(self) -> list[BatchShape]:
        return shapes_to_confirm(self.lengths, self._result(Turns(), 0), self.sweep_settings)

    @property
    def _given_up(self) -> int:
        return sum(trial.confirmation for trial in self.trials)

    def _confirm(self, shapes: Sequence[BatchShape]) -> Turns:
        total, done = sum(ROUNDS) * len(shapes), 0

        def on_step(shape: BatchShape) -> None:
            nonlocal done
            self._report(shape, None, min(done, total), total, confirming=True)
            done += 1

        return confirm(self.supervisor, shapes, on_step) if shapes else Turns()

    def _give_up(self, failure: Failure) -> None:
        """Journals a shape that failed among the others as a trial that rules it out."""
        trial = _failed_trial(failure, len(self.trials), self.supervisor.worker)
        self._keep(trial)
        if trial.outcome == "error":
            raise _workload_error(self.settings, trial, failure.stepped)
        self._tell(failure.shape, trial)

    # What is told and written

    def _tell(self, shape: BatchShape, trial: Trial | None) -> None:
        if self.on_progress is not None:
            closed, total = self.search.progress(self.trials)
            spent = sum(trial.elapsed_seconds for trial in self.trials)
            self._report(shape, trial, closed, total, spent / closed * (total - closed) if closed else None)

    def _report(
        self,
        shape: BatchShape,
        trial: Trial | None,
        done: int,
        total: int,
        seconds_left: float | None = None,
        *,
        confirming: bool = False,
    ) -> None:
        if self.on_progress is not None:
            progress = ProbeProgress(
                shape=shape,
                trial=trial,
                done=done,
                total=total,
                seconds_left=seconds_left,
                device=self.device,
                confirming=confirming,
            )
            self.on_progress(progress)

    def _result(self, turns: Turns, shapes: int) -> Probe:
        points = self.search.frontier(self.trials)
        peak_model = self.search.peak_model(self.trials)
        frontier = Frontier.of(points, self.device.limit_bytes, peak_model)
        return Probe(
            meta=meta_of(Probe),
            lengths=self.lengths.summary(),
            workload=WorkloadRecord(spec=self.settings.workload, options=self.settings.options),
            device=self.first_device,
            settings=self.settings.recorded(),
            trials=self.trials,
            frontier=points,
            models=Models(
                peak_bytes=peak_model,
                step_seconds=fit_step_seconds(self.trials),
            ),
            max_batch_length=largest_max_batch_length(frontier, self.lengths.histogram, self.settings.max_batch_size),
            confirmation=Confirmation(
                shapes=shapes,
                steps=turns.steps,
                workers=len(ROUNDS) if turns.steps else 0,
                alloc_retries=turns.alloc_retries,
                reserved_growth_bytes=turns.reserved_growth_bytes,
                given_up=self._given_up,
            ),
            warnings=self._warnings(turns),
        )

    def _warnings(self, turns: Turns) -> list[str]:
        changed = settings_differences(self.first_device, self.device)
        return [
            *trust_warnings(self.device, self.trials),
            *(f"The run was continued under other settings: {text}" for text in changed),
            *(self._leap(shape) for shape in self.search.not_monotone(self.trials)),
            *_about_turns(turns),
        ]

    def _leap(self, shape: BatchShape) -> str:
        return (
            f"Memory does not grow with the batch everywhere: {shape.batch_size} × "
            f"{format_length(shape.length, self.lengths.unit)} ran out of it, twice, though a larger batch passed. "
            "What lies between measured lengths is not certain there: probe more of them with --num-lengths."
        )


def _about_turns(turns: Turns) -> Iterator[str]:
    if turns.failures:
        failed = turns.failures[-1]
        yield (
            f"Confirmed {_MOST_CONFIRMATIONS} times, and each time batches failed, {failed.shape} the last: "
            f"{failed.error}. They were made smaller, but training may fail all the same: leave more memory free with "
            "--memory-fraction."
        )
    if turns.alloc_retries > _MANY_RETRIES * turns.steps:
        yield (
            f"In turns, the allocator emptied its cache {turns.alloc_retries} times in {turns.steps} steps: what one "
            "shape leaves behind does not fit the next, and each time takes time. Set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, in training too, or a lower --memory-fraction."
        )


def _failed_trial(failure: Failure, index: int, worker: int) -> Trial:
    stepped, shape = failure.stepped, failure.shape
    return Trial(
        index=index,
        batch_size=shape.batch_size,
        length=shape.length,
        target_length=shape.target_length,
        outcome=stepped.outcome,
        steps=0,
        step_seconds=None,
        peak_bytes=None,
        reserved_bytes=stepped.reserved_bytes,
        alloc_retries=stepped.alloc_retries,
        error=failure.error,
        elapsed_seconds=0.0,
        worker=worker,
        confirmation=True,
    )


def _no_lack_of_memory(settings: ProbeSettings, trial: Trial) -> WorkloadError:
    error = _workload_error(settings, trial, None)
    error.hint = f"This is no lack of memory: the probe stops. Mend it; {_START_OVER}."
    return error


def _workload_error(settings: ProbeSettings, trial: Trial, told: Measured | Stepped | None) -> WorkloadError:
    stage = told.stage if told and told.stage else "step"
    shape = BatchShape(trial.batch_size, trial.length, trial.target_length)
    return WorkloadError(
        f"{settings.workload} failed in its {stage}, with a batch of {shape}: {trial.error}",
        (told.hint if isinstance(told, Measured) else None)
        or "This is no lack of memory: the probe stops. Mend it and run the same command again; "
        "the trials so far are kept.",
        told.traceback if told else None,
    )
