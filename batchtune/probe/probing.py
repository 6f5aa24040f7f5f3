"""Runs the probe from end to end: search, worker, journal, confirmation, models, `probe.json`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.cost_model import fit_cost
from batchtune.epochs.frontier import Frontier, largest_max_batch_length
from batchtune.epochs.measured_costs import TypicalTargets
from batchtune.epochs.step_times import StepTimes
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.probe import messages
from batchtune.probe.bounds import is_covered
from batchtune.probe.clock import SLOWER_IN_TURNS, ProbeClock
from batchtune.probe.confirmation import (
    Turns,
    alternating,
    confirm,
    error_in_turns,
    first_step_bytes,
    lifted_by,
    rounds_of,
)
from batchtune.probe.hooks import ProbeHooks, ProbeProgress
from batchtune.probe.journal import open_run, workload_sha256
from batchtune.probe.oom import message_verdict
from batchtune.probe.protocol import Ran
from batchtune.probe.refining import Refinement
from batchtune.probe.search import FrontierSearch, IgnoresShape, NextTrial, NothingFits, SingleFails, TooLong
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    RUN_FILES,
    TRIALS_FILE,
    Device,
    FrontierPoint,
    Models,
    Probe,
    Run,
    Trial,
    WorkloadRecord,
    meta_of,
    read_result,
    write_result,
)
from batchtune.run_folder import alone_in, append_trial, clear_run
from batchtune.shapes import BatchShape
from batchtune.units import counted

# A batch that still fails in turns after this many times is left out: smaller ones that passed take its place.
_MOST_CONFIRMATIONS = 6
# Lengths to time with typical targets.
_MOST_TIMED = 16


def run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    *,
    force: bool = False,
    sweep_settings: SweepSettings | None = None,
    hooks: ProbeHooks | None = None,
) -> Probe:
    """Find what fits, continuing what the run folder holds, and write `probe.json`.

    One probe at a time holds the run folder; `force` discards its content. Lengths are measured where the tables of
    `sweep_settings` need them, by default those of 10 to 20 buckets.

    Raises ResultError if the folder holds another run or can't be written, WorkloadError if the workload fails for
    another reason than memory, ProbeError if the device can't be used or the data do not fit.
    """
    hooks = hooks or ProbeHooks()
    sweep_settings = sweep_settings or SweepSettings()
    with alone_in(folder):
        previous, trials = (None, []) if force else open_run(lengths, settings, folder)
        changed = []
        if previous is not None and trials and previous.workload_sha256 != workload_sha256(settings):
            file = settings.workload.rpartition(":")[0]
            changed = [
                f"{file} has changed since this run began, and {counted(len(trials), 'trial')} measured the old code. "
                "If the change affects memory or time, measure again with --force."
            ]
            hooks.on_note(f"Warning: {changed[0]}")
        elif trials:
            hooks.on_note(f"{len(trials)} trials of an earlier run in {folder} are reused; --force measures again.")
        if lengths.targets is not None:
            hooks.on_note("Targets: each length is probed with the longest target that occurs at or below it.")
        with hooks.measurer or Supervisor(
            settings,
            previous.device.limit_bytes if previous else None,
            examples=lengths.count,
            on_note=hooks.on_note,
            first_worker=1 + max((trial.worker or 0 for trial in trials), default=0),
        ) as measurer:
            started = time.monotonic()
            device = measurer.start()
            if previous is None:
                # Not before: a workload that can't even be built must not cost an earlier run.
                # Without --force the folder may hold a run in which nothing passed.
                clear_run(folder, RUN_FILES if force else (TRIALS_FILE,))
                run = Run(
                    meta=meta_of(Run),
                    lengths=lengths.summary(),
                    workload=WorkloadRecord(spec=settings.workload, options=settings.options),
                    device=device,
                    settings=settings.recorded(),
                    workload_sha256=workload_sha256(settings),
                )
                write_result(folder / RUN_FILE, run)
            elif device.name != previous.device.name:
                raise ResultError(
                    f"{folder} was measured on {previous.device.name}; this is {device.name}",
                    "Give another folder with --run, or --force to start over in this one.",
                )
            began_with = previous.device if previous else device
            clock = ProbeClock.of(started, settings.minutes)
            return _Probing(
                lengths, settings, folder, began_with, device, measurer, hooks, trials, changed, sweep_settings, clock
            ).run()


@dataclass(slots=True)
class _Probing:
    """One probe at work; `first_device` is the device as it was when the run began, `device` as it is now.

    `changed` warns of trials from before a change of the workload's file.
    """

    lengths: Lengths
    settings: ProbeSettings
    folder: Path
    first_device: Device
    device: Device
    measurer: Supervisor
    hooks: ProbeHooks
    trials: list[Trial]
    changed: list[str]
    sweep_settings: SweepSettings
    clock: ProbeClock
    search: FrontierSearch = field(init=False)
    refinement: Refinement = field(init=False)
    told_too_long: bool = False
    out_of_time: bool = False

    def __post_init__(self) -> None:
        multiple = self.sweep_settings.multiple_of
        padded = self.lengths.padded_to(multiple) if multiple else self.lengths
        self.refinement = Refinement(padded, self.sweep_settings.num_buckets)
        self.search = FrontierSearch(
            padded, self.settings, self.device.limit_bytes, fit=fit_cost, refine=self.refinement
        )

    def run(self) -> Probe:
        """Search and confirm, and write `probe.json`; if interrupted, what is known by then."""
        try:
            return self._run()
        except KeyboardInterrupt:
            self._write_interrupted()
            raise

    def _run(self) -> Probe:
        """Search, confirm, and search again where a shape was given up, until all hold."""
        self._search()
        self._time_typical_targets()
        path = self.folder / PROBE_FILE
        if self.trials and path.exists():
            finished = read_result(path, Probe)
            is_complete = finished.confirmation is not None and not finished.unfinished
            if finished.trials == self.trials and is_complete:
                if not set(self.changed) <= set(finished.warnings):
                    finished = replace(finished, warnings=[*self.changed, *finished.warnings])
                    write_result(path, finished)
                return finished
        turns = Turns()
        for _ in range(_MOST_CONFIRMATIONS):
            shapes = self._shapes()
            if turns.confirmed and all(is_covered(shape, turns.confirmed) for shape in shapes):
                break  # smaller ones than those that passed in turns take up no more memory
            turns = self._confirm(shapes)
            if not self._learn(turns) or self.out_of_time:
                break
            self._search()
        probe = self._result(turns)
        write_result(path, probe)
        return probe

    def _write_interrupted(self) -> None:
        """Write what is known when the probe is interrupted, unless an earlier one knew more."""
        path = self.folder / PROBE_FILE
        known_better = path.exists() and read_result(path, Probe).is_proven
        if known_better or self.told_too_long:
            return
        if self.search.frontier(self.trials, unfinished=True):
            write_result(path, self._result(None))
            self.hooks.on_note(messages.interrupted(path))

    def _has_time(self) -> bool:
        """Return whether time is left for another trial, and to confirm what is known then."""
        if not self.clock.leaves_a_trial(self.trials, self.device.limit_bytes):
            self.out_of_time = True
        return not self.out_of_time

    def _search(self) -> None:
        while (wanted := self._next_trial()) is not None and self._has_time():
            if not self.told_too_long and (failed := self.search.longest_failure(self.trials)) is not None:
                # At once, not only when it is known how many examples are too long.
                self.told_too_long = True
                tried, total = self.search.progress(self.trials)
                workload = self.settings.workload
                note = messages.longest_does_not_fit(self.lengths, workload, self.device, failed, total - tried)
                self.hooks.on_note(note)
            self._measure(wanted.shape, fresh=wanted.fresh)

    def _next_trial(self) -> NextTrial | None:
        """Return what to try next; what ends the search becomes an error for the user."""
        workload = self.settings.workload
        try:
            return self.search.propose(self.trials)
        except IgnoresShape as equal:
            raise messages.ignores_shape(self.lengths, workload, equal) from None
        except TooLong as long:
            raise messages.too_long(self.lengths, workload, self.device, long) from None
        except (SingleFails, NothingFits) as none:
            disguised = message_verdict(none.trial.error or "") == "disguised"
            if isinstance(none, SingleFails) or disguised:
                raise messages.no_lack_of_memory(workload, none.trial) from None
            raise messages.nothing_fits(self.lengths, workload, self.device, none.trial) from None

    def _measure(self, shape: BatchShape, *, fresh: bool = False, timing: bool = False) -> None:
        self._show_progress(shape, None)
        self._keep(self.measurer.measure(shape, len(self.trials), fresh=fresh, timing=timing))

    def _keep(self, ran: Ran) -> None:
        """Journal a trial. Raises WorkloadError for an error of the workload's own."""
        append_trial(self.folder / TRIALS_FILE, ran.trial)
        self.trials.append(ran.trial)
        if ran.trial.outcome == "error":
            raise messages.workload_error(self.settings.workload, ran)
        self._show_progress(ran.trial.shape, ran.trial)

    def _show_progress(self, shape: BatchShape, trial: Trial | None) -> None:
        done, total = self.search.progress(self.trials)
        spent = sum(trial.elapsed_seconds for trial in self.trials)
        seconds_left = None
        if done:
            seconds_left = spent / done * (total - done)
            if not self.told_too_long:
                seconds_left += self.clock.confirmation_seconds(self.trials, self.device.limit_bytes)
        self.hooks.on_progress(
            ProbeProgress(
                shape=shape,
                trial=trial,
                done=done,
                total=total,
                seconds_left=seconds_left,
                device=self.device,
                shortening=self.told_too_long,
            )
        )

    def _time_typical_targets(self) -> None:
        """Time the frontier with typical targets, too: by the worst ones, epochs would look slower than they are."""
        typical = TypicalTargets.of(self.lengths)
        if typical is None or self.lengths.targets is None:
            return
        whole = bool((self.lengths.targets % 1 == 0).all())
        known = {trial.shape for trial in self.trials}
        points = self.search.frontier(self.trials)
        chosen = np.unique(np.linspace(0, len(points) - 1, min(len(points), _MOST_TIMED)).round().astype(int))
        for point in (points[index] for index in chosen[::-1]):
            target = float(typical([point.batch_size], [point.length])[0])
            if whole:
                target = float(np.ceil(target))
            shape = BatchShape(point.batch_size, point.length, target)
            if not self._has_time():
                return
            if shape not in known and target < (point.target_length or 0.0):
                self._measure(shape, timing=True)

    def _shapes(self) -> list[BatchShape]:
        """Return the largest batch of each point that no other point's contains, large and small ones in turns."""
        points = self.search.frontier(self.trials, unfinished=True)
        points += self.search.frontier(self.trials, joint=True, unfinished=True)
        peaks = {trial.shape: trial.peak_bytes or 0 for trial in self.trials if trial.outcome == "ok"}
        shapes = {BatchShape(point.batch_size, point.length, point.target_length) for point in points}
        return alternating(sorted(shapes & peaks.keys(), key=lambda shape: (-peaks[shape], str(shape))))

    def _confirm(self, shapes: Sequence[BatchShape]) -> Turns:
        rounds = rounds_of(self.trials, self.device.limit_bytes)
        seconds = {trial.shape: trial.step_seconds or 0.0 for trial in self.trials}
        left = [SLOWER_IN_TURNS * seconds[shape] for shape in shapes] * rounds
        total = len(left)

        def on_step(shape: BatchShape) -> bool:
            if not self.clock.leaves(left[0] if left else 0.0):
                self.out_of_time = True
                return False
            self.hooks.on_progress(
                ProbeProgress(
                    shape=shape,
                    trial=None,
                    done=total - len(left),
                    total=total,
                    seconds_left=sum(left),
                    device=self.device,
                    confirming=True,
                )
            )
            if left:  # more if a worker died
                left.pop(0)
            return True

        if not shapes:
            return Turns()
        return confirm(self.measurer, shapes, rounds, on_step)

    def _learn(self, turns: Turns) -> bool:
        """Take in what the turns showed; return whether anything must be measured again."""
        task = self.search.task
        task.held_bytes = max(task.held_bytes, turns.held_bytes)
        peaks = self.search.known(self.trials).peaks
        lifted = lifted_by(turns, peaks)
        for shape, in_turns in turns.peaks.items():
            spread = peaks.range(shape, [peak + lifted for peak in in_turns])
            task.spread_bytes = max(task.spread_bytes, spread)
        first_step = first_step_bytes(self.measurer, turns, peaks, self.device.limit_bytes)
        task.first_step_bytes = max(task.first_step_bytes, first_step)
        failures = list(turns.failures)
        first = turns.first_failed
        # The margin may not cover it: the first step of a smaller batch may need less.
        if first is not None and self.search.known(self.trials).is_proven(first.trial.shape):
            failures.append(first)
        for failure in failures:  # journalled as trials that rule the shapes out
            trial = replace(
                failure.trial,
                index=len(self.trials),
                steps=0,
                peak_bytes=None,
                rest_bytes=None,
                error=error_in_turns(failure.trial),
                worker=self.measurer.worker,
                confirmation=True,
            )
            self._keep(replace(failure, trial=trial))
        if failures or turns.first_failed is not None:
            return True
        known = self.search.known(self.trials)
        return not all(known.is_proven(shape) for shape in turns.confirmed)

    def _frontier(self, turns: Turns | None, *, joint: bool = False) -> list[FrontierPoint]:
        """Return what fits; if the probe was interrupted, so that no turns are complete, none of it is proven."""
        if turns is not None:
            return self.search.frontier(self.trials, turns.confirmed, joint=joint, unfinished=self.out_of_time)
        points = self.search.frontier(self.trials, joint=joint, unfinished=True)
        return [replace(point, trial=None) for point in points]

    def _result(self, turns: Turns | None) -> Probe:
        """Return the result; `turns` is None if the probe was interrupted."""
        points = self._frontier(turns)
        if self.out_of_time and (not points or points[-1].length < self.lengths.longest):
            turns = None  # the turns had too little time to prove anything useful
            points = self._frontier(turns)
        if not points:
            if turns is None:
                raise messages.out_of_time()
            raise messages.nothing_confirmed(turns)
        known = self.search.known(self.trials)
        margin = known.peaks.margin if known.peaks.are_known else None
        if turns is not None and points[-1].length < self.lengths.longest:
            raise messages.longest_not_proven(self.lengths, points[-1].length, self.device, margin)
        unfinished = turns is None or self.out_of_time
        times = StepTimes.fit(self.trials)
        equal = self.search.equal_batches(self.trials) if unfinished else None
        return Probe(
            meta=meta_of(Probe),
            lengths=self.lengths.summary(),
            workload=WorkloadRecord(spec=self.settings.workload, options=self.settings.options),
            device=self.first_device,
            settings=self.settings.recorded(),
            trials=self.trials,
            frontier=points,
            models=Models(peak_bytes=known.fit.model, step_seconds=None if times is None else times.model),
            max_batch_length=largest_max_batch_length(
                Frontier.of(points), self.lengths.histogram, self.settings.max_batch_size
            ),
            confirmation=None if turns is None else turns.record(self.trials),
            margin=margin,
            joint_frontier=self._frontier(turns, joint=True),
            warnings=[
                *self.changed,
                *messages.about_devices(self.first_device, self.device, self.trials),
                *messages.about_falls(self.search.not_monotone(self.trials), self.lengths.unit),
                *messages.about_margin(margin, self.device),
                *messages.about_the_end(unfinished, self.settings, self.refinement.left_at_stake(known)),
                *messages.about_turns(turns, _MOST_CONFIRMATIONS),
                *messages.about_equal_batches(equal, self.lengths.unit),
            ],
            unfinished=unfinished,
        )
