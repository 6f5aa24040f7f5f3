"""The probe from end to end: search, worker, journal, confirmation, models, `probe.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from batchtune.cost import Frontier, fit_cost, fit_step_seconds, largest_max_batch_length
from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import (
    ROUNDS,
    Failure,
    Stepper,
    Turns,
    alternating,
    confirm,
    first_step_excess,
)
from batchtune.probe.journal import append_trial, read_trials
from batchtune.probe.oom import message_verdict
from batchtune.probe.protocol import Measured, Stepped
from batchtune.probe.search import (
    Evidence,
    FrontierSearch,
    NothingFits,
    Proposal,
    SearchSettings,
    SingleFails,
    TooLong,
    shape_of,
)
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
from batchtune.tuning.probe_settings import ProbeSettings
from batchtune.tuning.refining import Refinement
from batchtune.tuning.run_folder import alone_in, check_trials, clear_run, open_run, run_record, workload_sha256
from batchtune.tuning.shortage import START_OVER, longest_does_not_fit, nothing_fits, too_long
from batchtune.tuning.sweep_settings import SweepSettings
from batchtune.tuning.targets import TypicalTargets
from batchtune.units import counted, format_length, format_size


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
        shortening: Whether the longest example does not fit, and the longest that does is looked for.
    """

    shape: BatchShape
    trial: Trial | None
    done: int
    total: int
    seconds_left: float | None
    device: Device
    confirming: bool = False
    shortening: bool = False


# What still fails in turns after so many times is left out: next to it, only smaller batches that did not fail count.
_MOST_CONFIRMATIONS = 6
# Of that part of a batch the first step of a process is measured where the batch itself runs out of memory in it.
_SMALLER = 0.75
# So many shapes tell how much longer a step takes in turns than repeated.
_FEWEST_TIMED = 3
# So many lengths are timed with typical targets.
_MOST_TIMED = 16
# A margin of more than this part of the limit is worth a word; so are the first few shapes at which memory falls.
_LARGE_MARGIN = 0.02
_MOST_NAMED = 3
# Once after a larger shape is no matter; in one step of ten it is.
_MANY_RETRIES = 0.1


class Measurer(Stepper, Protocol):
    """What measures: the probe's `Supervisor`."""

    @property
    def worker(self) -> int:
        """Number of the current worker process."""

    def __enter__(self) -> Measurer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    def start(self) -> Device:
        """Builds the workload in a new worker."""

    def measure(
        self, shape: BatchShape, index: int, *, fresh: bool = False, timing: bool = False
    ) -> tuple[Trial, Measured | None]:
        """Runs one trial."""


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
    measurer: Measurer | None = None,
) -> Probe:
    """Finds what fits, continuing what the run folder holds, and writes `probe.json`.

    Args:
        lengths: The data set.
        settings: What to measure.
        folder: The run folder; made where missing, and held by one probe at a time.
        sweep_settings: Of the sweep that will follow: lengths are measured where its tables need them. None: of one
            with 10 to 20 buckets.
        force: Start over, and throw away what the folder holds.
        on_progress: Told before and after each trial.
        on_note: Told, in a sentence, what the user should know of the trials that are already there.
        measurer: What measures; None: worker processes on the device that the settings name.

    Raises:
        ResultError: The folder holds another run, or can't be written.
        WorkloadError: The workload failed with something that is no lack of memory.
        ProbeError: The device can't be used, or the data do not fit.
    """
    with alone_in(folder):
        previous = None if force else open_run(lengths, settings, folder)
        trials = [] if force else read_trials(folder / TRIALS_FILE)
        check_trials(trials, lengths, folder)
        if previous is not None and trials and on_note is not None:
            on_note(_about_earlier(previous, settings, trials, folder))
        if lengths.targets is not None and on_note is not None:
            on_note("Targets: each length is probed with the longest target that occurs at or below it.")
        with measurer or Supervisor(
            settings.setup(previous.device.limit_bytes if previous else None),
            trial_timeout_seconds=settings.trial_timeout_seconds,
            setup_timeout_seconds=settings.setup_timeout_seconds,
            wait_seconds=settings.wait_seconds,
            on_note=on_note,
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
                on_note=on_note,
                trials=trials,
                sweep_settings=sweep_settings or SweepSettings(),
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
    supervisor: Measurer
    on_progress: OnProgress | None
    on_note: OnNote | None
    trials: list[Trial]
    sweep_settings: SweepSettings
    search: FrontierSearch = field(init=False)
    refinement: Refinement = field(init=False)
    told_too_long: bool = False

    def __post_init__(self) -> None:
        limits = SearchSettings(
            num_lengths=self.settings.num_lengths,
            tolerance=self.settings.tolerance,
            max_batch_size=self.settings.max_batch_size,
            limit_bytes=self.device.limit_bytes,
            max_lengths=self.settings.most_lengths,
        )
        multiple_of = self.sweep_settings.multiple_of
        padded = self.lengths if multiple_of is None else self.lengths.padded_to(multiple_of)
        self.refinement = Refinement(padded, self.sweep_settings.num_buckets)
        self.search = FrontierSearch(padded, limits, fit=fit_cost, refine=self.refinement)

    def run(self) -> Probe:
        """Searches, confirms, and searches again where a shape was given up, until all hold; writes `probe.json`."""
        self._search()
        self._time_typical_targets()
        if (finished := self._finished()) is not None:
            return finished
        for _ in range(_MOST_CONFIRMATIONS):
            shapes = self._shapes()
            turns = self._confirm(shapes)
            if not self._learn(turns):
                break
            self._search()
        probe = self._result(turns, shapes)
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
            if not self.told_too_long and (failure := self.search.longest_failure(self.trials)) is not None:
                self._tell_too_long(failure)
            self._measure(proposal.shape, fresh=proposal.fresh)

    def _measure(self, shape: BatchShape, *, fresh: bool = False, timing: bool = False) -> None:
        self._tell(shape, None)
        trial, measured = self.supervisor.measure(shape, len(self.trials), fresh=fresh, timing=timing)
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
            raise nothing_fits(self.lengths, self.settings.workload, self.device, nothing.trial) from None
        except TooLong as long:
            raise too_long(self.lengths, self.settings.workload, self.device, long) from None

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
        points = self.search.frontier(self.trials)
        chosen = np.unique(np.linspace(0, len(points) - 1, min(len(points), _MOST_TIMED)).round().astype(int))
        for point in (points[index] for index in chosen[::-1]):
            target = float(typical([point.batch_size], [point.length])[0])
            target = float(np.ceil(target)) if whole else target
            shape = BatchShape(point.batch_size, point.length, target)
            if (shape.batch_size, shape.length, target) in known or target >= (point.target_length or 0.0):
                continue
            self._measure(shape, timing=True)

    # The confirmation

    def _shapes(self) -> list[BatchShape]:
        """The largest batch of each point that no other point's contains, large and small ones in turns."""
        points = [*self.search.frontier(self.trials), *self.search.joint_frontier(self.trials)]
        own = {
            BatchShape(trial.batch_size, trial.length, trial.target_length): trial.peak_bytes or 0
            for trial in self.trials
            if trial.outcome == "ok"
        }
        shapes = {BatchShape(point.batch_size, point.length, point.target_length) for point in points}
        needs = sorted((shape for shape in shapes if shape in own), key=lambda shape: (-own[shape], str(shape)))
        return alternating(needs)

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

    def _learn(self, turns: Turns) -> bool:
        """Takes in what the turns showed; whether anything has to be measured anew for it."""
        evidence = self.search.evidence(self.trials)
        failures = list(turns.failures)
        if (first := turns.first_failed) is not None and evidence.highest_peak(first.shape) is None:
            failures.append(first)
        for failure in failures:
            self._give_up(failure)
        ranges = [evidence.peak_range(shape, peaks) for shape, peaks in turns.peaks.items()]
        self.search.spread_bytes = max(self.search.spread_bytes, *ranges, 0)
        self.search.first_step_bytes = max(self.search.first_step_bytes, self._first_step_bytes(turns, evidence))
        again = self.search.evidence(self.trials)
        return bool(failures) or not all(again.is_proven(shape) for shape in turns.peaks)

    def _first_step_bytes(self, turns: Turns, evidence: Evidence) -> int:
        """By how much the first step of the fresh worker exceeded later ones of the same shape."""
        if turns.first_step is not None:
            shape, peak = turns.first_step
            later = [evidence.highest_peak(shape) or peak, *turns.peaks.get(shape, ())]
            excess: int = peak - max(later)
            return max(0, excess)
        if turns.first_failed is None or (highest := evidence.highest_peak(turns.first_failed.shape)) is None:
            return 0
        shape = turns.first_failed.shape
        smaller = replace(shape, batch_size=max(1, int(shape.batch_size * _SMALLER)))
        return max(self.device.limit_bytes - highest, first_step_excess(self.supervisor, smaller) or 0)

    def _give_up(self, failure: Failure) -> None:
        """Journals a shape that failed among the others as a trial that rules it out."""
        trial = _failed_trial(failure, len(self.trials), self.supervisor.worker)
        self._keep(trial)
        if trial.outcome == "error":
            raise _workload_error(self.settings, trial, failure.stepped)
        self._tell(failure.shape, trial)

    # What is told and written

    def _tell_too_long(self, failure: Trial) -> None:
        """Says at once that the probe will not succeed, not only when it is known how many examples are too long."""
        self.told_too_long = True
        if self.on_note is not None:
            tried, total = self.search.progress(self.trials)
            workload = self.settings.workload
            self.on_note(longest_does_not_fit(self.lengths, workload, self.device, failure, total - tried))

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
                shortening=self.told_too_long,
            )
            self.on_progress(progress)

    def _result(self, turns: Turns, shapes: Sequence[BatchShape]) -> Probe:
        failed = {failure.shape for failure in turns.failures}
        confirmed = [shape for shape in shapes if shape not in failed]
        points = self.search.frontier(self.trials, confirmed)
        if not points:
            raise self._nothing_confirmed(turns)
        peak_model = self.search.peak_model(self.trials)
        frontier = Frontier.of(points)
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
                shapes=len(shapes),
                steps=turns.steps,
                workers=len(ROUNDS) if turns.steps else 0,
                alloc_retries=turns.alloc_retries,
                reserved_growth_bytes=turns.reserved_growth_bytes,
                given_up=self._given_up,
                time_ratio=_time_ratio(turns, self.trials),
            ),
            margin=self.search.margin(self.trials),
            joint_frontier=self.search.joint_frontier(self.trials, confirmed),
            warnings=self._warnings(turns),
        )

    def _warnings(self, turns: Turns) -> list[str]:
        changed = settings_differences(self.first_device, self.device)
        return [
            *trust_warnings(self.device, self.trials),
            *_about_caught(self.trials),
            *(f"The run was continued under other settings: {text}" for text in changed),
            *(self._falls(smaller, larger) for smaller, larger in self.search.not_monotone(self.trials)[:_MOST_NAMED]),
            *self._about_margin(),
            *self._about_lengths(),
            *_about_turns(turns),
        ]

    def _falls(self, smaller: BatchShape, larger: BatchShape) -> str:
        shown = [
            f"{shape.batch_size} × {format_length(shape.length, self.lengths.unit)}"
            + ("" if shape.target_length is None else f" with targets up to {shape.target_length:g}")
            for shape in (smaller, larger)
        ]
        return (
            f"Memory does not grow with the batch everywhere: {shown[0]} ran out of it, twice, though {shown[1]} "
            "passed. All batch sizes at that length and beyond stay below the one that failed."
        )

    def _about_margin(self) -> Iterator[str]:
        margin = self.search.margin(self.trials)
        if margin is None or margin.bytes <= _LARGE_MARGIN * self.device.limit_bytes:
            return
        share, limit = f"{margin.bytes / self.device.limit_bytes:.1%}", format_size(self.device.limit_bytes)
        if margin.first_step_bytes > margin.spread_bytes:
            yield (
                f"The first step of a process needs {format_size(margin.first_step_bytes)} more than later ones with "
                f"the same batch: {share} of the limit of {limit} is left free for it. A step with a small batch "
                "before training begins would make that room usable."
            )
        else:
            yield (
                f"Peaks of equal batches differ by up to {format_size(margin.spread_bytes)}: {share} of the limit of "
                f"{limit} is left free for that. A workload whose memory does not depend on chance can have larger "
                "batches."
            )

    def _about_lengths(self) -> Iterator[str]:
        lost = self.refinement.left_at_stake(self.search.evidence(self.trials))
        if lost is not None:
            yield (
                f"Measured as many lengths as --max-lengths allows, {self.settings.most_lengths}: a table may cost up "
                f"to {lost:.1%} more than with all sizes known. Allow more with --max-lengths, and run the same "
                "command again."
            )

    def _nothing_confirmed(self, turns: Turns) -> ProbeError:
        failed = turns.failures[-1] if turns.failures else turns.first_failed
        return ProbeError(
            "no batch that fits alone passed in turns with the others"
            + (f": {failed.shape} failed last, {failed.error}" if failed else ""),
            f"Leave more memory free with --memory-fraction, or give more with --memory; {START_OVER}.",
        )


def _about_turns(turns: Turns) -> Iterator[str]:
    if turns.failures:
        failed = turns.failures[-1]
        yield (
            f"Confirmed {_MOST_CONFIRMATIONS} times, and each time batches failed, {failed.shape} the last: "
            f"{failed.error}. What failed last is left out: smaller batches that passed take its place. Leave more "
            "memory free with --memory-fraction, and probe anew with --force."
        )
    if turns.alloc_retries > _MANY_RETRIES * turns.steps:
        yield (
            f"In turns, the allocator emptied its cache {turns.alloc_retries} times in {turns.steps} steps: what one "
            "shape leaves behind does not fit the next, and each time takes time. Set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, in training too, or a lower --memory-fraction."
        )


def _about_caught(trials: Sequence[Trial]) -> Iterator[str]:
    caught = [trial for trial in trials if trial.caught]
    if caught:
        yield (
            f"The workload catches out-of-memory errors itself: in {len(caught)} of {counted(len(trials), 'trial')} "
            "memory ran out and the step returned all the same, as if it had passed. Those batches count as too large. "
            "Training would skip them unseen: let the error get out of the step."
        )


def _time_ratio(turns: Turns, trials: Sequence[Trial]) -> float | None:
    """What the turns' steps took over what the trials of the same shapes took."""
    alone = {shape_of(trial): trial.mean_step_seconds for trial in trials if trial.mean_step_seconds}
    both = [(float(np.mean(seconds)), alone[shape]) for shape, seconds in turns.seconds.items() if shape in alone]
    if len(both) < _FEWEST_TIMED:
        return None
    in_turns, repeated = np.sum(both, axis=0)
    return float(in_turns / repeated)


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
        caught=stepped.caught,
    )


def _no_lack_of_memory(settings: ProbeSettings, trial: Trial) -> WorkloadError:
    error = _workload_error(settings, trial, None)
    longer = ", or allow more with --trial-timeout" if trial.outcome == "timeout" else ""
    error.hint = f"This is no lack of memory: the probe stops. Fix it{longer}; {START_OVER}."
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
