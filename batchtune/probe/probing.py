"""Runs the probe from end to end: search, worker, journal, confirmation, models, `probe.json`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from batchtune.epochs.measured_costs import Frontier, largest_max_batch_length
from batchtune.epochs.recorded import add_recorded_ooms
from batchtune.epochs.step_times import StepTimes
from batchtune.errors import ProbeError, ResultError
from batchtune.lengths import Lengths
from batchtune.probe import messages
from batchtune.probe.bounds import is_covered
from batchtune.probe.confirmation import (
    Turns,
    confirm,
    error_in_turns,
    in_turns,
    rounds_of,
)
from batchtune.probe.messages import (
    SLOWER_IN_TURNS,
    ProbeClock,
    ProbeHooks,
    ProbeProgress,
)
from batchtune.probe.refining import Refinement, with_typical_targets
from batchtune.probe.requests import Ran
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import ProbeSettings, begin_run, open_run
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    PROBE_FILE,
    TRIALS_FILE,
    BatchShape,
    Device,
    FrontierPoint,
    Models,
    Probe,
    SweepSettings,
    Trial,
    meta_of,
    read_result,
    write_result,
)
from batchtune.run_folder import alone_in, append_trial

# A batch that still fails in turns after this many times is left out: smaller ones that passed take its place.
_MOST_CONFIRMATIONS = 6


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
    with alone_in(folder):
        previous = None
        trials: list[Trial] = []
        if not force:
            previous, trials = open_run(lengths, settings, folder)
        if trials:
            hooks.on_note(
                f"{len(trials)} trials of an earlier run in {folder} are reused; --force measures again."
            )
        changed = list(messages.about_changes(previous, trials, settings))
        for warning in changed:
            hooks.on_note(f"Warning: {warning}")
        with hooks.measurer or Supervisor(
            settings,
            previous.device.limit_bytes if previous is not None else None,
            lengths=lengths,
            on_note=hooks.on_note,
            nodes=hooks.nodes,
            first_worker=1 + max((trial.worker or 0 for trial in trials), default=0),
        ) as measurer:
            started = time.monotonic()
            device = measurer.start()
            if previous is None:
                previous = begin_run(lengths, settings, folder, device, force=force)
            elif device.name != previous.device.name:
                raise ResultError(
                    f"{folder} was measured on {previous.device.name}; this is {device.name}",
                    "Give another folder with --run, or --force to start over in this one.",
                )
            add_recorded_ooms(lengths, trials, folder, hooks.on_note)
            probing = _Probing(
                lengths=lengths,
                settings=settings,
                folder=folder,
                run_device=previous.device,
                device=device,
                measurer=measurer,
                hooks=hooks,
                trials=trials,
                changed=changed,
                sweep_settings=sweep_settings or SweepSettings(),
                clock=ProbeClock.since(started, settings.minutes),
            )
            return probing.run()


@dataclass(slots=True, kw_only=True)
class _Probing:
    """One probe at work; `run_device` is the device as it was when the run began, `device` as it is now.

    `changed` warns of trials from before a change of the workload's file.
    """

    lengths: Lengths
    settings: ProbeSettings
    folder: Path
    run_device: Device
    device: Device
    measurer: Supervisor
    hooks: ProbeHooks
    trials: list[Trial]
    changed: list[str]
    sweep_settings: SweepSettings
    clock: ProbeClock
    search: FrontierSearch = field(init=False)
    refinement: Refinement = field(init=False)
    is_shortening: bool = False  # the longest example does not fit
    out_of_time: bool = False

    def __post_init__(self) -> None:
        padded = self.lengths
        if self.sweep_settings.multiple_of:
            padded = padded.padded_to(self.sweep_settings.multiple_of)
        self.refinement = Refinement(padded, self.sweep_settings.num_buckets)
        self.search = FrontierSearch(
            padded, self.settings, self.device.limit_bytes, refine=self.refinement
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
        finished = self._finished()
        if finished is not None:
            return finished
        turns = Turns()
        for _ in range(_MOST_CONFIRMATIONS):
            shapes = self._shapes()
            if turns.confirmed and all(
                is_covered(shape, turns.confirmed) for shape in shapes
            ):
                break  # smaller ones than those that passed in turns take up no more memory
            turns = self._confirm(shapes)
            if not self._learn(turns) or self.out_of_time:
                break
            self._search()
        probe = self._result(turns)
        write_result(self.folder / PROBE_FILE, probe)
        return probe

    def _finished(self) -> Probe | None:
        """Return the probe that the folder holds, if it was made of these trials and is finished."""
        path = self.folder / PROBE_FILE
        if not self.trials or not path.exists():
            return None
        probe = read_result(path, Probe)
        is_finished = probe.confirmation is not None and not probe.unfinished
        if probe.trials != self.trials or not is_finished:
            return None
        if not set(self.changed) <= set(probe.warnings):
            probe = replace(probe, warnings=[*self.changed, *probe.warnings])
            write_result(path, probe)
        return probe

    def _write_interrupted(self) -> None:
        """Write what is known when the probe is interrupted, unless an earlier one knew more."""
        path = self.folder / PROBE_FILE
        knows_better = path.exists() and read_result(path, Probe).is_proven
        if (
            not knows_better
            and not self.is_shortening
            and self.search.frontier(self.trials, unfinished=True)
        ):
            write_result(path, self._result(None))
            self.hooks.on_note(messages.interrupted(path))

    def _has_time(self) -> bool:
        """Return whether time is left for another trial, and to confirm what is known then."""
        if not self.clock.leaves_a_trial(self.trials, self.device.limit_bytes):
            self.out_of_time = True
        return not self.out_of_time

    def _search(self) -> None:
        while (
            wanted := self.search.propose(self.trials)
        ) is not None and self._has_time():
            if not self.is_shortening and self.search.does_not_fit(self.trials):
                self.is_shortening = True
                self.hooks.on_note(
                    messages.longest_does_not_fit(self.lengths, self.device)
                )
            self._measure(wanted.shape, fresh=wanted.fresh)

    def _measure(
        self, shape: BatchShape, *, fresh: bool = False, timing: bool = False
    ) -> None:
        self._show_progress(shape, None)
        self._keep(
            self.measurer.measure(shape, len(self.trials), fresh=fresh, timing=timing)
        )

    def _keep(self, ran: Ran) -> None:
        """Journal a trial. Raises WorkloadError for an error of the workload's own."""
        append_trial(self.folder / TRIALS_FILE, ran.trial)
        self.trials.append(ran.trial)
        if ran.trial.outcome == "error":
            raise messages.workload_error(self.settings.workload, ran)
        self._show_progress(ran.trial.shape, ran.trial)

    def _show_progress(self, shape: BatchShape, trial: Trial | None) -> None:
        done, total = self.search.progress(self.trials)
        seconds_left = None
        if done:
            spent = sum(trial.elapsed_seconds for trial in self.trials)
            seconds_left = spent / done * (total - done)
            if not self.is_shortening:
                seconds_left += self.clock.confirmation_seconds(
                    self.trials, self.device.limit_bytes
                )
        self.hooks.on_progress(
            ProbeProgress(
                shape=shape,
                trial=trial,
                done=done,
                total=total,
                seconds_left=seconds_left,
                device=self.device,
                shortening=self.is_shortening,
            )
        )

    def _time_typical_targets(self) -> None:
        """Time the frontier with typical targets, too: by the worst ones, epochs would look slower than they are."""
        known = {trial.shape for trial in self.trials}
        points = self.search.frontier(self.trials)
        for shape in with_typical_targets(self.lengths, points):
            if not self._has_time():
                return
            if shape not in known:
                self._measure(shape, timing=True)

    def _shapes(self) -> list[BatchShape]:
        """Return what to confirm, in order."""
        pairs = self.search.frontier(self.trials, joint=True, unfinished=True)
        points = self.search.frontier(self.trials, unfinished=True)
        return in_turns([*points, *pairs], self.trials)

    def _confirm(self, shapes: list[BatchShape]) -> Turns:
        """Run the shapes in turns."""
        if not shapes:
            return Turns()
        rounds = rounds_of(self.trials, self.device.limit_bytes)
        seconds = {
            trial.shape: SLOWER_IN_TURNS * (trial.step_seconds or 0.0)
            for trial in self.trials
        }
        left = shapes * rounds
        total = len(left)

        def on_step(shape: BatchShape) -> bool:
            if not self.clock.leaves(seconds[shape]):
                self.out_of_time = True
                return False
            self.hooks.on_progress(
                ProbeProgress(
                    shape=shape,
                    trial=None,
                    done=total - len(left),
                    total=total,
                    seconds_left=sum(seconds[other] for other in left),
                    device=self.device,
                    confirming=True,
                )
            )
            del left[:1]  # none is left if a worker died and all run again
            return True

        return confirm(self.measurer, shapes, rounds, on_step)

    def _learn(self, turns: Turns) -> bool:
        """Take in what the turns showed; return whether anything must be measured again."""
        self.search.task.steps += turns.steps
        for failure in turns.failures:  # journalled as trials that rule the shapes out
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
        known = self.search.known(self.trials)
        some_failed = bool(turns.failures) or any(
            step.outcome == "oom" for step in turns.steps
        )
        return some_failed or not all(map(known.is_proven, turns.confirmed))

    def _frontier(
        self, turns: Turns | None, *, joint: bool = False
    ) -> list[FrontierPoint]:
        """Return what fits; if the probe was interrupted, so that no turns are complete, none of it is proven."""
        if turns is not None:
            return self.search.frontier(
                self.trials, turns.confirmed, joint=joint, unfinished=self.out_of_time
            )
        points = self.search.frontier(self.trials, joint=joint, unfinished=True)
        return [replace(point, trial=None) for point in points]

    def _result(self, turns: Turns | None) -> Probe:
        """Return the result; `turns` is None if the probe was interrupted."""
        points = self._frontier(turns)
        if self.out_of_time and (
            not points or points[-1].length < self.lengths.longest
        ):
            turns = None  # the turns had too little time to prove anything useful
            points = self._frontier(turns)
        if turns is not None and not points:
            raise messages.nothing_confirmed(turns)
        if not points:
            raise ProbeError(
                "the time of --minutes ended before the first trial",
                "Allow more. Building the workload counts, and so does the first trial's time.",
            )
        known = self.search.known(self.trials)
        margin = known.peaks.margin if known.peaks.are_known else None
        if turns is not None and points[-1].length < self.lengths.longest:
            raise messages.longest_not_proven(
                self.lengths, points[-1].length, self.device, margin
            )
        unfinished = turns is None or self.out_of_time
        times = StepTimes.fit(self.trials)
        return Probe(
            meta=meta_of(Probe),
            lengths=self.lengths.summary(),
            workload=self.settings.subject,
            device=self.run_device,
            settings=self.settings.recorded(),
            trials=self.trials,
            frontier=points,
            models=Models(
                peak_bytes=known.fit.model,
                step_seconds=None if times is None else times.model,
            ),
            max_batch_length=largest_max_batch_length(
                Frontier.of(points),
                self.lengths.histogram,
                self.settings.max_batch_size,
            ),
            confirmation=None if turns is None else turns.record(self.trials),
            margin=margin,
            joint_frontier=self._frontier(turns, joint=True),
            warnings=[
                *self.changed,
                *messages.about_devices(self.run_device, self.device, self.trials),
                *messages.about_falls(known.falls()),
                *messages.about_margin(margin, self.device),
                *messages.about_the_end(
                    unfinished, self.settings, self.refinement.left_at_stake(known)
                ),
                *messages.about_equal_batches(
                    self.search.equal_batches(known) if unfinished else None
                ),
                *messages.about_turns(turns),
            ],
            unfinished=unfinished,
        )
