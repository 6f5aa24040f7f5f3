"""Measures settings of a data loader, and chooses the best: all of them first, then the best ones in turns."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec.structs import replace

from batchtune.errors import LoaderError
from batchtune.loaders import kind_of
from batchtune.loaders.base import LoaderKind, Machine
from batchtune.loaders.demand import StepModel, epoch_examples
from batchtune.loaders.protocol import Taken
from batchtune.loaders.recommend import EQUAL_IDLE, equal_to_best, ranked, reason_for, warnings_for
from batchtune.loaders.repeats import WorkerRepeats
from batchtune.loaders.rows import COMPARED_SECONDS, measured_idle, merged, reproduced, row_of
from batchtune.loaders.runner import LoaderRunner, Measurement, Plan, too_small
from batchtune.loaders.settings import LoaderSettings, quick_note, swept_axes
from batchtune.results import (
    Argument,
    Arguments,
    LoaderRow,
    LoaderStage,
    LoaderTuning,
    Reproduced,
    meta_of,
)
from batchtune.units import counted

# How many settings are measured in turns.
_FINALISTS = 3
# Where the step still waits and processors are idle, workers wait for disks or networks: their number is doubled, up to
# this many for each processor.
_WORKERS_PER_PROCESSOR = 8
_IDLE_PROCESSORS = 0.7
# How long a consumer is run that computes as long as the step takes.
_PACED_BATCHES = 150
_PACED_SECONDS = 20.0
# How many epochs are begun to see how one starts.
_STARTS = 3
_STAGES_SECONDS = 3.0
# A quick tuning begins no measurement later than this; what remains of a minute is for the one that runs.
_QUICK_SECONDS = 40.0
# The figures of a row that a consumer that computes changes.
_WITH_STEPS = ("first_batch_seconds", "memory_bytes", "worker_bytes", "shared_bytes", "growth_bytes_per_batch")


Doing = Literal["opening", "comparing", "measuring", "starting", "confirming", "stages", "reproducing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """The progress of a tuning: the setting that it measures, how many of the round are done, and then its row.

    `seconds` is how long what is done takes at most, where that is known.
    """

    doing: Doing
    arguments: Arguments = field(default_factory=dict)
    done: int = 0
    total: int = 1
    row: LoaderRow | None = None
    seconds: float | None = None


OnProgress = Callable[[LoaderProgress], None]


class Tuner:
    """One tuning: the rows that are known, and the measurements of each."""

    def __init__(
        self, settings: LoaderSettings, runner: LoaderRunner, model: StepModel, report: OnProgress, began: float
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._model = model
        self._on_progress = report
        self._began = began
        opened = model.opened
        self._kind: LoaderKind = kind_of(opened.kind)
        self._repeats = WorkerRepeats(self._kind, dealt=opened.dealt)
        self.rows: dict[str, LoaderRow] = {}
        self._measured: dict[str, Measurement] = {}
        self._notes: list[str] = []
        self._stages: list[LoaderStage] = []
        self._reproduced: Reproduced | None = None
        machine = Machine(processors=len(settings.processors), accelerator=opened.device != "cpu")
        axes = self._kind.axes(machine, frozenset(opened.takes))
        self._axes = swept_axes(axes, settings.sweep, opened.takes, self._kind.ARGUMENTS)
        if settings.quick:
            all_axes = self._axes
            self._axes = {**self._kind.quick_axes(axes), **settings.sweep}
            self._notes.append(quick_note(all_axes, self._axes))

    def tune(self) -> None:
        """Measure all settings, halving their number in each round, then the best more closely."""
        arguments = self._repeats.setting_to_compare(self._kind.settings(self._axes))
        if arguments is not None:
            self._on_progress(LoaderProgress(doing="comparing", arguments=arguments))
            self._repeats.compare_batches(self._runner, arguments)
        finalists = self._halve()
        if finalists:
            self._compare(finalists)
        if self._settings.stages:
            self._on_progress(LoaderProgress(doing="stages"))
            with self._noting("The stages can't be measured"):
                self._stages = self._runner.stages(max(_STAGES_SECONDS, self._settings.seconds))
        if self._settings.check_reproducible:
            self._check_reproducible()

    def _check_reproducible(self) -> None:
        row = self._recommended()
        if row is None:
            return
        longest = 2 * COMPARED_SECONDS
        if row.estimated_epoch_seconds is not None and self._model.steps is None:
            longest = min(longest, 2 * row.estimated_epoch_seconds)
        self._on_progress(LoaderProgress(doing="reproducing", arguments=row.arguments, seconds=longest))
        with self._noting("Two epochs can't be compared"):
            self._reproduced = reproduced(self._runner, row.arguments, self._kind)

    def _is_late(self) -> bool:
        """Return whether a quick tuning has to come to its end."""
        return self._settings.quick and time.monotonic() - self._began > _QUICK_SECONDS

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Make a warning of an error, so that what was measured before is kept."""
        try:
            yield
        except LoaderError as error:
            self._notes.append(f"{what}: {error.message}.")

    def _halve(self) -> list[LoaderRow]:
        """Return the settings that are left, the best first: a few that work."""
        axes = dict(self._axes)
        for name in self._kind.START_AXES:
            if name in axes:
                axes[name] = axes[name][:1]
        settings = self._kind.settings(axes)
        seconds = self._settings.seconds
        rounds = 1
        while True:
            plan = Plan(seconds=seconds)
            rows = self._measure_all(settings, plan, rounds)
            while rounds == 1 and not self._settings.quick and (more := self._more_workers(rows, axes)):
                rows += self._measure_all(more, plan, rounds, before=len(rows))
            best = self._ranked([row for row in rows if row.outcome == "ok"])
            best = best[: max(_FINALISTS, math.ceil(len(rows) / 2))]
            if len(best) <= _FINALISTS:
                return best
            settings = [row.arguments for row in rows if row in best]  # still the cheapest first
            seconds *= 2
            rounds += 1

    def _more_workers(self, rows: Sequence[LoaderRow], axes: dict[str, Sequence[Argument]]) -> list[Arguments]:
        """Return settings with twice as many workers as any, where these may help and the user named no number."""
        name = self._kind.WORKERS
        working = [row for row in rows if row.outcome == "ok"]
        if not (self._kind.MORE_WORKERS and working) or name in self._settings.sweep:
            return []
        fastest = max(working, key=lambda row: row.batches_per_second or 0.0)
        if self._model.has_time_to_spare(fastest, self._measured[fastest.name].epochs):
            return []
        processors = len(self._settings.processors)
        most_workers = max(row.workers for row in rows)
        busy = (fastest.processors or 0.0) / processors
        if fastest.workers < most_workers or busy > _IDLE_PROCESSORS:
            return []
        if 2 * most_workers > _WORKERS_PER_PROCESSOR * processors:
            return []
        return self._kind.settings({**axes, name: [max(1, 2 * most_workers)]})

    def _measure_all(
        self, settings: Sequence[Arguments], plan: Plan, rounds: int, doing: Doing = "measuring", before: int = 0
    ) -> list[LoaderRow]:
        """Measure settings one after the other, `before` others of the same round."""
        rows: list[LoaderRow] = []
        total = before + len(settings)
        for done, arguments in enumerate(settings, before):
            if self._is_late():
                left_out = counted(total - done, "setting")
                self._notes.append(f"--quick did not come to {left_out}, as the time was over.")
                break
            progress = LoaderProgress(doing=doing, arguments=arguments, done=done, total=total)
            self._on_progress(progress)
            row = self._measure(arguments, plan, rounds, starting=doing == "starting")
            rows.append(row)
            self._on_progress(dataclasses.replace(progress, done=done + 1, row=row))
        return rows

    def _measure(self, arguments: Arguments, plan: Plan, rounds: int, *, starting: bool) -> LoaderRow:
        measurement = self._excluded(arguments)
        if measurement is None:
            measurement = self._run(arguments, plan)
            self._repeats.compare_epochs(measurement, self._measured)
            measurement = self._repeating(arguments) or measurement
        row = row_of(measurement, self._kind, rounds, rates=not starting)  # a few batches say nothing of rates
        if starting:
            self.rows.setdefault(row.name, row)
            return row
        if measurement.outcome == "ok":
            self._measured[row.name] = measurement
            row = replace(row, estimated_epoch_seconds=self._model.epoch_seconds(row, measurement.epochs))
        self.rows[row.name] = row
        return row

    def _excluded(self, arguments: Arguments) -> Measurement | None:
        """Return the failure of a setting that is known before it runs; None if it may work."""
        repeating = self._repeating(arguments)
        if repeating is not None:
            return repeating
        batch_bytes = max((row.batch_bytes or 0 for row in self.rows.values()), default=0)
        error = too_small(self._kind, arguments, batch_bytes)
        if error is None:
            return None
        return Measurement(arguments=arguments, outcome="shared_memory", error=error)

    def _repeating(self, arguments: Arguments) -> Measurement | None:
        """Return the failure of a setting whose workers repeat each other; None as long as they are not known to."""
        if self._repeats.error is None or self._kind.workers(arguments) < 2:
            return None
        return Measurement(arguments=arguments, outcome="repeats", error=self._repeats.error)

    def _run(self, arguments: Arguments, plan: Plan) -> Measurement:
        """Measure a setting; what would end the command is an error of this setting alone, once another one worked."""
        try:
            return self._runner.measure(arguments, plan, self._kind)
        except LoaderError as error:
            if not self._measured:
                raise
            parts = (error.message, error.hint, error.traceback)
            text = "\n".join(part for part in parts if part)
            return Measurement(arguments=arguments, outcome="error", error=text)

    def _compare(self, finalists: Sequence[LoaderRow]) -> None:
        """Measure the best settings in turns, until the best of all is one of these.

        With step times, unmeasured settings are taken to wait as little as their rates allow. Where receiving batches
        takes time, all of them wait longer: this ends once further settings don't shorten the wait.
        """
        start: Arguments = {}
        if not self._settings.quick:
            start = self._best_start(finalists[0])
        compared: set[str] = set()
        shortest = math.inf
        while not self._is_late():
            candidates = []
            for row in self._ranked(self._rated()):
                if row.name in compared:
                    break
                candidates.append(row)
            if not candidates:
                return
            compared |= self._measure_in_turns(candidates[:_FINALISTS], start)
            waits = [row.gpu_idle for row in self._rated() if row.gpu_idle is not None]
            if waits and min(waits) > shortest - EQUAL_IDLE:
                return
            shortest = min(waits, default=math.inf)

    def _rated(self) -> list[LoaderRow]:
        """Return the rows that work and whose rate is known, the cheapest first."""
        return [row for row in self.rows.values() if row.outcome == "ok" and row.batches_per_second is not None]

    def _ranked(self, rows: Sequence[LoaderRow]) -> list[LoaderRow]:
        """Return rows that work, the best first."""
        if self._model.steps is None:
            return ranked(rows)
        least_idle = {row.name: self._model.least_idle(row, self._measured[row.name].epochs) for row in rows}
        return ranked(rows, least_idle)

    def _recommended(self) -> LoaderRow | None:
        """Return the best row: with step times, of those whose waits were measured, if any."""
        rows = self._rated()
        with_step = [row for row in rows if row.gpu_idle is not None]
        return next(iter(self._ranked(with_step or rows)), None)

    def _measure_in_turns(self, rows: Sequence[LoaderRow], start: Arguments) -> set[str]:
        """Measure settings with all their arguments, one after the other and again; return the names of their rows.

        With step times, a consumer computes as long as the step takes.
        """
        doing: Doing = "measuring"
        if self._model.steps is not None:
            doing = "confirming"
        measurements: dict[str, list[Measurement]] = {row.name: [] for row in rows}
        turns = list(rows) * self._settings.trials
        for done, row in enumerate(turns):
            if self._is_late():
                break
            earlier = measurements[row.name]
            if earlier and earlier[-1].outcome != "ok":
                continue
            arguments = row.arguments
            if row.workers:
                arguments = arguments | start
            self._on_progress(LoaderProgress(doing=doing, arguments=arguments, done=done, total=len(turns)))
            earlier.append(self._run(arguments, self._closer_plan(row)))
        names = set()
        for row in rows:
            if not measurements[row.name]:
                continue
            closer = self._closer_row(row, measurements[row.name])
            self._on_progress(LoaderProgress(doing=doing, done=len(turns), total=len(turns), row=closer))
            if closer.name != row.name:  # one row for each setting: they only start differently
                del self.rows[row.name]
                self._measured[closer.name] = self._measured.pop(row.name)
            self.rows[closer.name] = closer
            names.add(closer.name)
        return names

    def _closer_plan(self, row: LoaderRow) -> Plan:
        """Return how a setting is measured each time when it is compared with others in turns."""
        if self._model.steps is None:
            return Plan(seconds=self._settings.seconds * 2 ** (row.rounds - 1))
        epochs = self._measured[row.name].epochs
        steps = [float(step) for step in self._model.steps_of(epochs)]
        period = sum(steps) / len(steps) / max(1e-3, 1 - self._model.least_idle(row, epochs))
        seconds = self._settings.seconds
        if not self._settings.quick:
            seconds = min(_PACED_SECONDS, max(seconds, _PACED_BATCHES * period))
        return Plan(seconds=seconds / self._settings.trials, steps=steps)

    def _closer_row(self, row: LoaderRow, measurements: Sequence[Measurement]) -> LoaderRow:
        """Return a row with what was measured in turns."""
        last = measurements[-1]
        if last.outcome != "ok":
            return row_of(last, self._kind, row.rounds)
        in_turns = merged(measurements)
        closer = row_of(in_turns, self._kind, row.rounds)
        if self._model.steps is None:
            self._measured[row.name] = in_turns
        else:
            idle = [measured_idle(trial, row.workers) for trial in in_turns.trials]
            with_steps = {name: getattr(closer, name) for name in _WITH_STEPS}
            closer = replace(row, arguments=last.arguments, gpu_idle=float(np.median(idle)), **with_steps)
        epochs = self._measured[row.name].epochs
        return replace(closer, estimated_epoch_seconds=self._model.epoch_seconds(closer, epochs))

    def _best_start(self, row: LoaderRow) -> Arguments:
        """Return the arguments with which an epoch of this setting starts soonest; of equal ones the first."""
        start_axes = {name: self._axes[name] for name in self._kind.START_AXES if name in self._axes}
        fixed = {name: [value] for name, value in row.arguments.items()}
        settings = self._kind.settings({**fixed, **start_axes})
        if len(settings) < 2:
            return {}
        plan = Plan(seconds=self._settings.seconds, epochs=_STARTS, batches=2 * max(1, row.workers))
        working = [row for row in self._measure_all(settings, plan, 1, "starting") if row.outcome == "ok"]
        if not working:
            return {}
        soonest = min(row.first_batch_seconds or 0.0 for row in working)
        limit = soonest + max(0.05, 0.1 * soonest)
        best = next(row for row in working if (row.first_batch_seconds or 0.0) <= limit)
        return {name: best.arguments[name] for name in start_axes}

    def result(self, notes: Sequence[str], *, interrupted: bool = False) -> LoaderTuning:
        """Return the record of what is known now."""
        rated = self._rated()
        equal = {row.name: is_equal for row, is_equal in zip(rated, equal_to_best(rated), strict=True)}
        names = list(self.rows)
        best = self._recommended()
        epochs: list[Taken] = []
        for measurement in self._measured.values():
            epochs += measurement.epochs
        steps = self._model.steps
        opened = self._model.opened
        demand = None
        if steps is not None and best is not None:
            demand = steps.demand(self._measured[best.name].epochs, exact=opened.exact)
        tuning = LoaderTuning(
            meta=meta_of(LoaderTuning),
            lengths=None if steps is None else steps.lengths,
            target=self._settings.target_record,
            kind=opened.kind,
            settings=self._settings.record(),
            device_name=opened.device_name,
            batch=next((taken.words for taken in epochs if taken.words), None),
            epoch_batches=self._model.epoch_batches(epochs),
            epoch_examples=opened.examples or epoch_examples(epochs) or None,
            demand=demand,
            rows=[replace(row, equal_to_best=equal.get(name)) for name, row in self.rows.items()],
            recommended=None if best is None else names.index(best.name),
            reason="",
            stages=self._stages,
            reproduced=self._reproduced,
            interrupted=interrupted,
            warnings=[],
        )
        warnings = [
            *self._repeats.warnings(self._measured),
            *notes,
            *self._notes,
            *opened.warnings,
            *warnings_for(tuning, len(self._settings.processors)),
        ]
        return replace(tuning, reason=reason_for(tuning), warnings=warnings)
