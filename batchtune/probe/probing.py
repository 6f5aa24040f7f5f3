"""Runs the probe from end to end: search, worker, journal, confirmation, models, `probe.json`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from batchtune.epochs.measured_costs import Frontier, largest_max_batch_length
from batchtune.epochs.packed_model import fit_packed
from batchtune.epochs.recorded import add_recorded_ooms
from batchtune.epochs.step_times import StepTimes
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.probe import messages
from batchtune.probe.confirmation import Turns, alternating, in_turns
from batchtune.probe.flow import Probing
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.packed_search import PackedSearch
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
    ClosedBy,
    Device,
    FrontierPoint,
    Models,
    PackedProbe,
    Probe,
    SweepSettings,
    Trial,
)
from batchtune.run_folder import ANOTHER, alone_in
from batchtune.units import counted, format_length

LargestBatch = Callable[[Device], int | None]
"""The device → the most examples of a batch in what will be recommended; None: any number."""


def run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    *,
    force: bool = False,
    sweep_settings: SweepSettings | None = None,
    most_in_a_batch: LargestBatch | None = None,
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
            previous, trials = open_run(lengths, settings, folder, hooks.on_note)
        if trials and not hooks.goes_on:
            hooks.on_note(
                f"Reusing {counted(len(trials), 'trial')} of an earlier run in {folder}; --force measures again."
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
                    ANOTHER,
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
                kind = _PackedProbing
            elif most_in_a_batch is not None:
                most = most_in_a_batch(device)
                if most is not None:
                    most = min(most, settings.max_batch_size or most)
                    settings = replace(settings, max_batch_size=most)
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
                start_seconds=time.monotonic() - started,
                deadline=started + 60 * (settings.minutes or math.inf),
            )
            return probing.run()


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
            raise self._nothing_in_time()
        known = self.search.known(self.trials)
        if turns is not None and points[-1].length < self.lengths.longest:
            raise messages.longest_not_proven(
                self.lengths, points[-1].length, self.device, known.peaks
            )
        equal = None
        if turns is None or self.out_of_time:
            equal = self.search.equal_batches(known)
        times = StepTimes.fit(self.trials)
        return self._probe(
            turns,
            known.peaks,
            falls=known.falls(),
            at_stake=self.refinement.left_at_stake(known),
            equal=equal,
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
        )


def check_packed(lengths: Lengths, settings: ProbeSettings) -> None:
    """Raise UsageError if the lengths can't be packed, or the settings are for padded batches."""
    values = lengths.runs.values
    fractional = values != np.floor(values)
    if fractional.any():
        count = int(lengths.runs.counts[fractional].sum())
        raise UsageError(
            f"{settings.workload} packs, which needs whole lengths, but {count:,} of {lengths.count:,} are fractional, "
            f"such as {values[fractional][0]:g}",
            "Give lengths in tokens, or convert them with --length-scale.",
        )
    if lengths.has_targets:
        raise UsageError(
            f"{settings.workload} packs, and packed sequences have one length, but the examples have target lengths",
            "Leave out --target-key. If prompt and answer are one sequence, add them up: --length-key prompt+answer.",
        )
    if settings.max_batch_size is not None:
        raise UsageError(
            f"--max-batch-size is for padded batches, but {settings.workload} packs",
            "Bound the tokens of a packed batch with --max-tokens.",
        )
    if settings.max_tokens is not None and settings.max_tokens < lengths.longest:
        raise UsageError(
            f"--max-tokens {settings.max_tokens:,} is less than the longest sequence "
            f"({format_length(lengths.longest, lengths.unit)}), which must fit in a batch",
            f"Give at least that, leave out longer ones with --max-length {settings.max_tokens}, or, if your training "
            f"cuts them, add --truncate {settings.max_tokens}.",
        )


def refuse_other_kind(
    packed: bool, trials: Sequence[Trial], settings: ProbeSettings, folder: Path
) -> None:
    """Raise ResultError if the folder's trials are of padded batches and the workload packs, or the other way round.

    Raise UsageError if a token budget is given for a workload that pads.
    """
    words = {True: "packed batches", False: "padded batches"}
    for trial in trials:
        if (trial.sequences is not None) != packed:
            raise ResultError(
                f"{folder} holds a probe of {words[not packed]}, but {settings.workload} makes {words[packed]}",
                ANOTHER,
            )
    if not packed and settings.max_tokens is not None:
        raise UsageError(
            f"--max-tokens is for a workload that packs, but {settings.workload} pads its batches",
            "Leave it out; a workload that packs says so with packed = True.",
        )


@dataclass(slots=True, kw_only=True)
class _PackedProbing(Probing):
    """The probe of packed batches."""

    search: PackedSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = PackedSearch(self.lengths, self.settings, self.device.limit_bytes)

    def _knows_something(self) -> bool:
        return self.search.known(self.trials).reached_budget is not None

    def _shapes(self) -> list[BatchShape]:
        """Return the batches that prove the budget, large and small ones in turns."""
        known = self.search.known(self.trials)
        budget = known.proven_budget
        if budget is None:
            return []
        shapes = set(known.shapes(budget).values())
        return alternating(
            sorted(
                shapes,
                key=lambda shape: (-(known.peaks.highest(shape) or 0), str(shape)),
            )
        )

    def _takes_in(self, turns: Turns) -> bool:
        self.search.task.steps += turns.steps
        known = self.search.known(self.trials)
        return all(map(known.holds, turns.confirmed))

    def _result(self, turns: Turns | None) -> Probe:
        """Return the result; `turns` is None if the probe was interrupted."""
        known = self.search.known(self.trials)
        budget = known.reached_budget
        proofs: list[int] = []
        if turns is not None:
            confirmed = self.search.known(self.trials, turns.confirmed)
            proven = confirmed.proven_budget
            if proven is not None:
                budget = proven
                indices = dict.fromkeys(map(known.proof, known.shapes(proven).values()))
                proofs = [index for index in indices if index is not None]
            elif self.out_of_time:
                turns = None  # they had too little time to prove anything
            else:
                raise messages.nothing_confirmed(turns)
        if budget is None:
            raise self._nothing_in_time()
        closed_by: ClosedBy = "time"
        if turns is not None and not self.out_of_time:
            closed_by = self.search.closed_by(known, budget)
        return self._probe(
            turns,
            known.peaks,
            needs_a_mask=known.needs_a_mask,
            frontier=[],
            models=Models(peak_bytes=None, step_seconds=None),
            max_batch_length=float(budget),
            packed=PackedProbe(
                max_tokens=budget,
                closed_by=closed_by,
                oom_tokens=known.oom_tokens,
                proofs=proofs,
                peak_bytes=fit_packed(*known.measured),
                step_seconds=known.time_model,
            ),
        )
