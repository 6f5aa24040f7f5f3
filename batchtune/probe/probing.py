"""Runs the probe from end to end: search, worker, journal, confirmation, models, `probe.json`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace

from batchtune.epochs.measured_costs import Frontier, largest_max_batch_length
from batchtune.epochs.recorded import add_recorded_ooms
from batchtune.epochs.step_times import StepTimes
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.probe import messages
from batchtune.probe.confirmation import Turns, in_turns
from batchtune.probe.flow import Probing, nothing_in_time
from batchtune.probe.messages import ProbeClock, ProbeHooks
from batchtune.probe.packed import PackedProbing, check_packed, refuse_other_kind
from batchtune.probe.refining import Refinement, with_typical_targets
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import (
    ProbeSettings,
    begin_run,
    open_run,
    refuse_other_allocator,
)
from batchtune.probe.supervisor import measurer_for
from batchtune.results import (
    TRAINING_FILE,
    BatchShape,
    Device,
    FrontierPoint,
    Models,
    Probe,
    SweepSettings,
    Trial,
)
from batchtune.run_folder import alone_in


def run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    *,
    force: bool = False,
    sweep_settings: SweepSettings | None = None,
    most_in_a_batch: Callable[[Device], int | None] | None = None,
    hooks: ProbeHooks | None = None,
) -> Probe:
    """Find what fits, continuing what the run folder holds, and write `probe.json`.

    One probe at a time holds the run folder; `force` discards its content. Lengths are measured where the tables of
    `sweep_settings` need them, by default those of 10 to 20 buckets. `most_in_a_batch` returns how many examples a
    batch has at most in what will be recommended, so that no more are tried; None: any number.

    Raises ResultError if the folder holds another run or can't be written, WorkloadError if the workload fails for
    another reason than memory, ProbeError if the device can't be used or the data do not fit.
    """
    hooks = hooks or ProbeHooks()
    with alone_in(folder):
        previous = None
        trials: list[Trial] = []
        if not force:
            previous, trials = open_run(lengths, settings, folder)
        if trials and not hooks.goes_on:
            hooks.on_note(
                f"{len(trials)} trials of an earlier run in {folder} are reused; --force measures again."
            )
        changed = list(messages.about_changes(previous, trials, settings))
        for warning in changed:
            hooks.on_note(f"Warning: {warning}")
        with hooks.measurer or measurer_for(
            settings,
            previous.device.limit_bytes if previous is not None else None,
            lengths=lengths,
            on_note=hooks.on_note,
            nodes=hooks.nodes,
            last_worker=max((trial.worker or 0 for trial in trials), default=0),
        ) as measurer:
            started = time.monotonic()
            device = measurer.start()
            if measurer.packed:
                check_packed(lengths, settings)
            if previous is None:
                previous = begin_run(lengths, settings, folder, device, force=force)
            elif device.name != previous.device.name:
                raise ResultError(
                    f"{folder} was measured on {previous.device.name}; this is {device.name}",
                    "Give another folder with --run, or --force to start over in this one.",
                )
            refuse_other_allocator(str(folder), previous.device.allocator, device)
            refuse_other_kind(measurer.packed, trials, settings, folder)
            if not measurer.packed:
                add_recorded_ooms(lengths, trials, folder, hooks.on_note)
            elif (folder / TRAINING_FILE).exists():
                hooks.on_note(
                    f"A probe of packed batches does not use {TRAINING_FILE}: what ran out of memory there is measured "
                    "again."
                )
            kind: type[Probing] = _PaddedProbing
            if measurer.packed:
                kind = PackedProbing
            elif most_in_a_batch is not None:
                settings = _with_most(settings, most_in_a_batch(device))
            probing = kind(
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


def _with_most(settings: ProbeSettings, most: int | None) -> ProbeSettings:
    """Return settings that try no batch of more than `most` examples."""
    if most is None or most >= (settings.max_batch_size or most + 1):
        return settings
    return structs.replace(settings, max_batch_size=most)


@dataclass(slots=True, kw_only=True)
class _PaddedProbing(Probing):
    """The probe of padded batches: the largest batch size at each length."""

    search: FrontierSearch = field(init=False)
    refinement: Refinement = field(init=False)

    def __post_init__(self) -> None:
        padded = self.lengths
        if self.sweep_settings.multiple_of:
            padded = padded.padded_to(self.sweep_settings.multiple_of)
        self.refinement = Refinement(padded, self.sweep_settings.num_buckets)
        self.search = FrontierSearch(
            padded, self.settings, self.device.limit_bytes, refine=self.refinement
        )

    @property
    def _searching(self) -> FrontierSearch:
        return self.search

    def _knows_something(self) -> bool:
        return bool(self.search.frontier(self.trials, unfinished=True))

    def _complete(self) -> None:
        """Time sizes that longer batches have proven, and the frontier with typical targets, which take less time."""
        known = {trial.shape for trial in self.trials}
        points = self.search.frontier(self.trials)
        untimed = [
            point.shape
            for point in points
            if point.closed_by == "data" and point.step_seconds is None
        ]
        for shape in [*untimed, *with_typical_targets(self.lengths, points)]:
            if not self._has_time():
                return
            if shape not in known:
                self._measure(shape, timing=True)

    def _shapes(self) -> list[BatchShape]:
        """Return what to confirm, in order."""
        pairs = self.search.frontier(self.trials, joint=True, unfinished=True)
        points = self.search.frontier(self.trials, unfinished=True)
        return in_turns([*points, *pairs])

    def _all_shrink(self, failed: Trial) -> bool:
        """Return whether the allocator left room that it could not use, and tables may still leave more of it."""
        peaks = self.search.known(self.trials).peaks
        return (
            self.device.fragments
            and failed.outcome == "oom"
            and peaks.may_leave_more_free
        )

    def _takes_in(self, turns: Turns) -> bool:
        before = self._shapes()
        self.search.task.steps += turns.steps
        return self._shapes() == before

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
            raise nothing_in_time(self.clock)
        known = self.search.known(self.trials)
        margin = known.peaks.margin if known.peaks.are_known else None
        if turns is not None and points[-1].length < self.lengths.longest:
            raise messages.longest_not_proven(
                self.lengths, points[-1].length, self.device, margin
            )
        unfinished = turns is None or self.out_of_time
        times = StepTimes.fit(self.trials)
        return self._probe(
            turns,
            known.peaks,
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
                *messages.about_turns(turns, self.device),
            ],
        )
