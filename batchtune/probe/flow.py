"""The way of a probe from its first trial to `probe.json`, whatever it searches: padded batches or packed ones."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from batchtune.allocators import EXPANDABLE
from batchtune.buckets.micro_batches import KnownSizes
from batchtune.epochs.cost_model import fit_packed
from batchtune.epochs.measured_costs import (
    Frontier,
    StepTimes,
    largest_max_batch_length,
)
from batchtune.epochs.recorded import add_recorded_ooms
from batchtune.errors import ProbeError, ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.probe import messages
from batchtune.probe.confirmation import (
    Turns,
    alternating,
    confirm,
    error_in_turns,
    in_turns,
    rounds_of,
)
from batchtune.probe.knowledge import TRIALS, Refinement, with_typical_targets
from batchtune.probe.messages import ProbeHooks, ProbeProgress
from batchtune.probe.outcomes import Peaks, is_covered
from batchtune.probe.packed_search import PackedSearch
from batchtune.probe.requests import Measurer, Ran
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import (
    ProbeSettings,
    begin_run,
    open_run,
    refuse_other_allocator,
)
from batchtune.probe.supervisor import measurer_for
from batchtune.results import (
    PROBE_FILE,
    TRAINING_FILE,
    TRIALS_FILE,
    BatchShape,
    ClosedBy,
    Device,
    FrontierPoint,
    Models,
    PackedProbe,
    Probe,
    SweepSettings,
    Trial,
    meta_of,
    read_result,
    write_result,
)
from batchtune.run_folder import ANOTHER, alone_in, append_trial
from batchtune.units import counted, format_length, format_seconds

PROBE_SHARE = 0.75
"""The share of --minutes that the probe of a tuning may take, so that the proof has the rest."""
# A batch that still fails in turns after this many times is left out: smaller ones that passed take its place.
_MOST_CONFIRMATIONS = 6
# A step among other shapes may take this many times as long as in its trial, with its batch made.
_SLOWER_IN_TURNS = 1.25
# The next trial may take as long as the longest of this many recent ones.
_RECENT = 5


@dataclass(slots=True, kw_only=True)
class Probing(ABC):
    """One probe at work; `run_device` is the device as it was when the run began, `device` as it is now.

    A worker takes `start_seconds` to start. The probe must end at the `deadline` on the monotonic
    clock. `changed` warns of trials from before a change of the workload's file; `own_size` is the
    size of the training's own batches; padded batches are measured for the tables of
    `sweep_settings`.
    """

    lengths: Lengths
    settings: ProbeSettings
    folder: Path
    run_device: Device
    device: Device
    measurer: Measurer
    hooks: ProbeHooks
    trials: list[Trial]
    changed: list[str]
    own_size: int
    sweep_settings: SweepSettings
    start_seconds: float
    deadline: float
    search: FrontierSearch | PackedSearch = field(init=False)  # chooses the trials
    is_shortening: bool = False  # the longest example does not fit
    out_of_time: bool = False

    @abstractmethod
    def _shapes(self) -> list[BatchShape]:
        """Return what to confirm, in order."""

    @abstractmethod
    def _knows_something(self) -> bool:
        """Return whether something fits, by now."""

    @abstractmethod
    def _takes_in(self, turns: Turns) -> bool:
        """Keep the steps of the turns as evidence; return whether all that passed in them is still proven."""

    def _all_shrink(self, failed: Trial) -> bool:
        """Return whether a failure in turns, which says little about the batch itself, makes all batches smaller.

        The allocator left room that it could not use, and batches may still leave more of it.
        """
        peaks = self.search.known(self.trials).peaks
        return (
            self.device.fragments
            and failed.outcome == "oom"
            and peaks.may_leave_more_free
        )

    @abstractmethod
    def _result(self, turns: Turns | None) -> Probe:
        """Return the result; `turns` is None if the probe was interrupted."""

    def _probe(
        self,
        turns: Turns | None,
        peaks: Peaks,
        *,
        falls: Sequence[tuple[BatchShape, BatchShape]] = (),
        needs_a_mask: bool = False,
        at_stake: float | None = None,
        equal: messages.IgnoresShape | None = None,
        **found: Any,
    ) -> Probe:
        """Return the result with what was found, and what all results hold, with all warnings."""
        margin = peaks.margin if peaks.are_known else None
        unfinished = turns is None or self.out_of_time
        return Probe(
            meta=meta_of(Probe),
            lengths=self.lengths.summary(),
            workload=self.settings.subject,
            device=self.run_device,
            settings=self.settings.recorded(),
            trials=self.trials,
            confirmation=None if turns is None else turns.record(self.trials),
            margin=margin,
            unfinished=unfinished,
            warnings=[
                *self.changed,
                *messages.about_devices(self.run_device, self.device, self.trials),
                *messages.about_falls(falls),
                *messages.about_margin(margin, self.device),
                *messages.about_masks(needs_a_mask),
                *messages.about_the_end(unfinished, self.settings, at_stake),
                *messages.about_equal_batches(equal),
                *messages.about_turns(turns, self.device),
            ],
            **found,
        )

    def _complete(self) -> None:
        """Run what is only of use once the search has ended."""
        return

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
        self._complete()
        finished = self._finished()
        if finished is not None:
            return finished
        turns = Turns()
        for _ in range(_MOST_CONFIRMATIONS):
            shapes = self._shapes()
            are_covered = all(is_covered(shape, turns.confirmed) for shape in shapes)
            if turns.confirmed and are_covered and not turns.cut_short:
                break  # smaller ones than those that passed in turns take up no more memory
            turns = self._confirm(shapes)
            if not self._learn(turns) or self.out_of_time:
                break
            self._search()
        if self.out_of_time:
            self._replace_lost(turns)
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
        most = self.lengths.count
        tried = probe.settings.get("max_batch_size") or most
        is_wide = tried >= (self.settings.max_batch_size or most)
        if probe.trials != self.trials or not (is_finished and is_wide):
            return None
        if not set(self.changed) <= set(probe.warnings):
            probe = replace(probe, warnings=[*self.changed, *probe.warnings])
            write_result(path, probe)
        return probe

    def _write_interrupted(self) -> None:
        """Write what is known when the probe is interrupted, unless an earlier one knew more."""
        path = self.folder / PROBE_FILE
        knows_better = path.exists() and read_result(path, Probe).is_proven
        if not knows_better and not self.is_shortening and self._knows_something():
            write_result(path, self._result(None))
            self.hooks.on_note(messages.interrupted(path))

    def _has_time(self) -> bool:
        """Return whether time is left for a trial, to confirm what is known then, and to replace what fails there."""
        if not self._leaves(2 * self._trial_seconds() + self._confirmation_seconds()):
            self.out_of_time = True
        return not self.out_of_time

    def _leaves(self, seconds: float) -> bool:
        """Return whether this many seconds are left."""
        return time.monotonic() + seconds <= self.deadline

    def _trial_seconds(self) -> float:
        """Return how long a trial takes, as long as the recent ones; 0 before any."""
        recent = self.trials[-_RECENT:]
        return max((trial.elapsed_seconds for trial in recent), default=0.0)

    def _confirmation_seconds(self, lengths: int = 0) -> float:
        """Return about how long the confirmation will take: a batch of each length, by the longest of its trials.

        There will be at least that many `lengths`.
        """
        longest: dict[tuple[float, float | None], float] = {}
        for trial in self.trials:
            length = (trial.length, trial.target_length)
            longest[length] = max(longest.get(length, 0.0), trial.step_seconds or 0.0)
        seconds = sum(longest.values()) / self.device.accumulation
        if lengths > len(longest):
            seconds *= lengths / len(longest)
        seconds *= _SLOWER_IN_TURNS * rounds_of(self.trials, self.device.limit_bytes)
        return self.start_seconds + seconds

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

    def _replace_lost(self, turns: Turns) -> None:
        """Run smaller batches than those that the turns have shown to be too large, while time is left."""
        while (
            (wanted := self.search.propose(self.trials))
            and is_covered(wanted.shape, turns.confirmed)
            and self._leaves(self._trial_seconds())
        ):
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
            trials: float = total - done
            lengths = 0
            if shape.sequences is None and not self.is_shortening:
                # Lengths, and more are added: half of all probes end with about this many trials.
                lengths = total
                trials = max(
                    trials, TRIALS * self.settings.num_lengths - len(self.trials)
                )
            spent = sum(trial.elapsed_seconds for trial in self.trials)
            seconds_left = spent / len(self.trials) * trials
            if not self.is_shortening:
                seconds_left += self._confirmation_seconds(lengths)
                seconds_left = self._with_proof(seconds_left)
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

    def _with_proof(self, seconds: float) -> float:
        """Return how long the caller still takes if the probe takes so many seconds, or ends at its deadline."""
        seconds = min(seconds, self.deadline - time.monotonic())
        spent = sum(trial.elapsed_seconds for trial in self.trials)
        return seconds + self.hooks.proof_share * (spent + seconds)

    def _confirm(self, shapes: list[BatchShape]) -> Turns:
        """Run the shapes in turns."""
        if not shapes:
            return Turns()
        seconds = {
            shape: _SLOWER_IN_TURNS * self._batch_seconds(shape) for shape in shapes
        }
        left = shapes * rounds_of(self.trials, self.device.limit_bytes)
        script = self.device.script
        if script is not None and script.accumulation > 1:
            # A loop that holds batches has not trained on the last ones.
            left += shapes[: script.look_ahead]
        total = len(left)

        def on_step(shape: BatchShape) -> bool:
            if not self._leaves(seconds[shape]):
                self.out_of_time = True
                return False
            self.hooks.on_progress(
                ProbeProgress(
                    shape=shape,
                    trial=None,
                    done=total - len(left),
                    total=total,
                    seconds_left=self._with_proof(
                        sum(seconds[other] for other in left)
                    ),
                    device=self.device,
                    confirming=True,
                )
            )
            del left[:1]  # none is left if a worker died and all run again
            return True

        return confirm(
            self.measurer,
            list(left),
            on_step,
            self._all_shrink,
            self.device.accumulation,
        )

    def _batch_seconds(self, shape: BatchShape) -> float:
        """Return the time of a batch of the smallest shape that ran and contains this one; 0 if unknown."""
        containing = [
            (trial.shape.padded_length, trial.step_seconds)
            for trial in self.trials
            if trial.step_seconds is not None and is_covered(shape, [trial.shape])
        ]
        _, seconds = min(containing, default=(0.0, 0.0))
        return seconds / self.device.accumulation

    def _nothing_in_time(self) -> ProbeError:
        """Return the error if the probe's time ended before anything passed."""
        minutes = math.ceil(2 * self.start_seconds / 60 + 1)
        to_tune = math.ceil(minutes / PROBE_SHARE)
        return ProbeError(
            "the time of --minutes ended before the first trial: a start takes "
            f"{format_seconds(self.start_seconds)}, and proving what fits needs a second one",
            f"Allow at least --minutes {minutes}, to tune {to_tune}, and more where steps are slow.",
        )

    def _learn(self, turns: Turns) -> bool:
        """Take in what the turns showed; return whether anything must be measured again."""
        for failure in turns.failures:  # journalled as trials that rule the shapes out
            kept = failure.with_trial(
                index=len(self.trials),
                steps=0,
                peak_bytes=None,
                rest_bytes=None,
                error=error_in_turns(failure.trial),
                worker=self.measurer.worker,
                confirmation=True,
                shuffled=self._all_shrink(failure.trial),
            )
            self._keep(kept)
        are_proven = self._takes_in(turns)
        some_failed = bool(turns.failures) or any(
            step.outcome == "oom" for step in turns.steps
        )
        return some_failed or not are_proven


# Runs the probe from end to end: search, worker, journal, confirmation, models, `probe.json`.

SizesOf = Callable[[Device], KnownSizes]
"""The device to probe → what is known of padded batch sizes."""


def run_probe(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    *,
    force: bool = False,
    sweep_settings: SweepSettings | None = None,
    sizes_of: SizesOf | None = None,
    hooks: ProbeHooks | None = None,
) -> Probe:
    """Find what fits, continuing what the run folder holds, and write `probe.json`.

    One probe at a time holds the run folder; `force` discards its content. Lengths are measured
    where the tables of `sweep_settings` need them, by default those of 10 to 20 buckets. No batch
    is larger than `sizes_of` says that it will be; the training's own size is tried first.

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
            sizes = KnownSizes()
            if measurer.packed:
                kind = _PackedProbing
            elif sizes_of is not None:
                sizes = sizes_of(device)
                if sizes.most is not None:
                    most = min(sizes.most, settings.max_batch_size or sizes.most)
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
                own_size=sizes.own,
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
        self.search.task.own_size = self.own_size
        self.search.task.expandable = self.device.allocator == EXPANDABLE

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
        self.search.task.expandable = self.device.allocator == EXPANDABLE

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
