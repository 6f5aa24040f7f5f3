"""Tunes a data loader: measures its settings, holds them against the step, recommends one, and writes `loader.json`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from batchtune.errors import LoaderError, ResultError
from batchtune.loaders import kind_of
from batchtune.loaders.base import LoaderKind, Machine
from batchtune.loaders.protocol import Opened
from batchtune.loaders.runner import LoaderRunner, Measurement, Plan, too_small
from batchtune.loaders.settings import LoaderSettings, quick_note, swept_axes
from batchtune.results import (
    LOADER_FILE,
    Argument,
    Arguments,
    LoaderRow,
    LoaderTuning,
    WorkloadRecord,
    meta_of,
    read_result,
    write_result,
)
from batchtune.tuning.loader_demand import IdleModel, Steps, steps_of_run
from batchtune.tuning.loader_progress import Doing, LoaderProgress, OnProgress
from batchtune.tuning.loader_recommend import equal_to_best, ranked, reason_for, warnings_for
from batchtune.tuning.loader_repeats import WorkerRepeats
from batchtune.tuning.loader_rows import COMPARED_SECONDS, measured_idle, reproduced, row_of, together
from batchtune.tuning.run_folder import alone_in
from batchtune.units import counted

_OF_RATES = (
    *("examples_per_second", "batches_per_second", "length_per_second", "examples_per_second_spread"),
    *("wait_p50_seconds", "wait_p99_seconds", "processors", "other_processors", "gpu_idle", "estimated_epoch_seconds"),
    "growth_bytes_per_batch",
)
# How many settings are measured in turns.
_FINALISTS = 3
# Where the step still waits and processors are idle, workers wait for disks or networks: their number is doubled, up to
# this many for each processor.
_WORKERS_PER_PROCESSOR = 8
_IDLE_PROCESSORS = 0.7
# How long a consumer is run that computes as long as the step takes.
_PACED_BATCHES = 150
_PACED_SECONDS = 20.0
# Steps that show the time to receive a batch: twice as long as a worker takes for one, for 30 batches.
_LONG_STEP = 2.0
_RECEIVED = 30
# How many epochs are begun to see how one starts.
_STARTS = 3
_STAGES_SECONDS = 3.0
# A quick tuning begins no measurement later than this; what remains of a minute is for the one that runs.
_QUICK_SECONDS = 40.0
# The figures of a row that a consumer that computes changes.
_WITH_STEPS = ("first_batch_seconds", "memory_bytes", "worker_bytes", "shared_bytes", "growth_bytes_per_batch")


def run_loader_tuning(
    settings: LoaderSettings, folder: Path, *, force: bool = False, on_progress: OnProgress = lambda progress: None
) -> LoaderTuning:
    """Tune the loader against the step of a run folder, and write `loader.json` there.

    Interrupted, it writes what it has measured so far.

    Raises:
        LoaderError: The target can't be imported, is no loader, or every setting fails alike.
        ResultError: The folder holds the tuning of another loader, and `force` is not set; or can't be read or written.
        UsageError: `settings.sweep` names an unknown argument.
    """
    check_folder(folder, settings, force=force)
    began = time.monotonic()
    steps, missing = steps_of_run(folder, settings.step_seconds)
    with alone_in(folder), LoaderRunner(settings) as runner:
        on_progress(LoaderProgress(doing="opening"))
        opened = runner.inspect()
        tuner = _Tuner(settings, runner, opened, steps, on_progress, began)
        try:
            tuner.tune()
        except KeyboardInterrupt:
            if tuner.rows:
                write_result(folder / LOADER_FILE, tuner.result([], interrupted=True))
            raise
        found = tuner.result([missing] if missing else [])
        write_result(folder / LOADER_FILE, found)
    return found


class _Tuner:
    """One tuning: the rows that are known, and the measurements of each."""

    def __init__(
        self,
        settings: LoaderSettings,
        runner: LoaderRunner,
        opened: Opened,
        steps: Steps | None,
        report: OnProgress,
        began: float,
    ) -> None:
        self._settings, self._runner, self._opened, self._on_progress = settings, runner, opened, report
        self._kind: LoaderKind = kind_of(opened.kind)
        machine = Machine(processors=len(settings.processors), accelerator=opened.device != "cpu")
        axes = self._kind.axes(machine, frozenset(opened.takes))
        self._axes = swept_axes(axes, settings.sweep, opened.takes, self._kind.ARGUMENTS)
        self._began = began
        self._measured: dict[str, Measurement] = {}
        self._idle = IdleModel(steps, self._kind, machine.processors, opened)
        self.rows: dict[str, LoaderRow] = {}
        self._chosen: str | None = None
        self._notes: list[str] = []
        self._extras: dict[str, object] = {}
        self._repeats = WorkerRepeats(self._kind, dealt=opened.dealt)
        if settings.quick:
            every = self._axes
            self._axes = {**self._kind.quick_axes(axes), **settings.sweep}
            self._notes.append(quick_note(every, self._axes))

    def tune(self) -> None:
        """Measure all settings, halving their number in each round, then the best more closely."""
        every = self._kind.settings(self._axes)
        if (arguments := self._repeats.setting_to_compare(every)) is not None:
            self._on_progress(LoaderProgress(doing="comparing", arguments=arguments))
            self._repeats.compare_batches(self._runner, arguments)
        finalists = self._halve()
        if finalists:
            self._choose(finalists)
        if self._settings.stages:
            self._on_progress(LoaderProgress(doing="stages"))
            with self._noting("The stages can't be measured"):
                self._extras["stages"] = self._runner.stages(max(_STAGES_SECONDS, self._settings.seconds))
        if self._settings.check_reproducible and self._chosen is not None:
            row, most = self.rows[self._chosen], 2 * COMPARED_SECONDS
            if row.estimated_epoch_seconds is not None and self._idle.steps is None:
                most = min(most, 2 * row.estimated_epoch_seconds)
            self._on_progress(LoaderProgress(doing="reproducing", arguments=row.arguments, seconds=most))
            with self._noting("Two epochs can't be compared"):
                self._extras["reproduced"] = reproduced(self._runner, row.arguments, self._kind)

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
        once = {name: values[:1] if name in self._kind.START_AXES else values for name, values in self._axes.items()}
        left = self._kind.settings(once)
        seconds, rounds = self._settings.seconds, 1
        while True:
            plan = Plan(seconds=seconds)
            found = self._measure_all(left, plan, rounds)
            if rounds == 1 and not self._settings.quick:
                found = self._receiving(found)
            while rounds == 1 and not self._settings.quick and (more := self._more_workers(found, once)):
                found += self._measure_all(more, plan, rounds, before=len(found))
            best = ranked([row for row in found if row.outcome == "ok"])
            best = best[: max(_FINALISTS, -(-len(found) // 2))]
            if len(best) <= _FINALISTS:
                return best
            left = [row.arguments for row in found if row in best]  # still the cheapest first
            seconds, rounds = 2 * seconds, rounds + 1

    def _receiving(self, found: list[LoaderRow]) -> list[LoaderRow]:
        """Measure how long it takes to receive a batch, and return the rows with the idle shares that follow."""
        with_workers = [row for row in found if row.outcome == "ok" and row.workers and row.batches_per_second]
        if not (self._idle.steps and self._kind.MORE_WORKERS and with_workers):
            return found
        row = min(with_workers, key=lambda row: row.workers)
        step = _LONG_STEP * row.workers / (row.batches_per_second or 1.0)
        plan = Plan(seconds=min(_PACED_SECONDS, max(self._settings.seconds, _RECEIVED * step)), steps=[step])
        self._on_progress(LoaderProgress(doing="confirming", arguments=row.arguments))
        paced = self._run(row.arguments, plan)
        if paced.outcome != "ok":
            return found
        self._idle.learn_receiving(row, paced.epochs)
        for one in with_workers:
            self.rows[one.name] = self._idle.priced(one, self._measured[one.name].epochs)
        return [self.rows[one.name] for one in found]

    def _more_workers(self, found: Sequence[LoaderRow], axes: dict[str, Sequence[Argument]]) -> list[Arguments]:
        """Return settings with twice as many workers as any, where these may help and the user named no number."""
        name = self._kind.WORKERS
        working = [row for row in found if row.outcome == "ok"]
        if not (self._kind.MORE_WORKERS and working) or name in self._settings.sweep:
            return []
        processors, most = len(self._settings.processors), max(row.workers for row in found)
        fastest = max(working, key=lambda row: row.batches_per_second or 0.0)
        if self._idle.keeps_up(fastest, self._measured[fastest.name].epochs):
            return []
        busy = (fastest.processors or 0.0) / processors
        if fastest.workers < most or busy > _IDLE_PROCESSORS or 2 * most > _WORKERS_PER_PROCESSOR * processors:
            return []
        return self._kind.settings({**axes, name: [max(1, 2 * most)]})

    def _measure_all(
        self, settings: Sequence[Arguments], plan: Plan, rounds: int, doing: Doing = "measuring", before: int = 0
    ) -> list[LoaderRow]:
        """Measure settings one after the other, `before` others of the same round."""
        found: list[LoaderRow] = []
        now = LoaderProgress(doing=doing, done=before, total=before + len(settings))
        for done, arguments in enumerate(settings, before):
            if self._is_late():
                left_out = counted(len(settings) + before - done, "setting")
                self._notes.append(f"--quick did not come to {left_out}, as the time was over.")
                break
            now = dataclasses.replace(now, arguments=arguments, done=done, row=None)
            self._on_progress(now)
            found.append(self._measure(arguments, plan, rounds, starting=doing == "starting"))
            self._on_progress(dataclasses.replace(now, done=done + 1, row=found[-1]))
        return found

    def _measure(self, arguments: Arguments, plan: Plan, rounds: int, *, starting: bool) -> LoaderRow:
        sizes = [row.batch_bytes for row in self.rows.values() if row.batch_bytes]
        reason = too_small(self._kind, arguments, max(sizes)) if sizes else None
        if self._repeats.error is not None and self._kind.workers(arguments) > 1:
            measurement = Measurement(arguments=arguments, outcome="repeats", error=self._repeats.error)
        elif reason is not None:
            measurement = Measurement(arguments=arguments, outcome="shared_memory", error=reason)
        else:
            measurement = self._run(arguments, plan)
        self._repeats.compare_epochs(measurement, self._measured, self._idle)
        if self._repeats.error is not None and self._kind.workers(arguments) > 1:
            measurement = Measurement(arguments=arguments, outcome="repeats", error=self._repeats.error)
        row = row_of(measurement, self._kind, rounds)
        if starting:
            row = replace(row, **dict.fromkeys(_OF_RATES))  # a few batches say nothing of rates
            self.rows.setdefault(row.name, row)
            return row
        if measurement.outcome == "ok":
            self._measured[row.name] = measurement
            self._idle.learn(row, measurement.epochs)
            row = self._idle.priced(row, measurement.epochs)
        self.rows[row.name] = row
        return row

    def _run(self, arguments: Arguments, plan: Plan) -> Measurement:
        """Measure a setting; what would end the command is an error of this setting alone, once another one worked."""
        try:
            return self._runner.measure(arguments, plan, self._kind)
        except LoaderError as error:
            if not self._measured:
                raise
            text = "\n".join(part for part in (error.message, error.hint, error.traceback) if part)
            return Measurement(arguments=arguments, outcome="error", error=text)

    def _choose(self, finalists: Sequence[LoaderRow]) -> None:
        """Measure the best settings in turns, until the best of all is one of these, and recommend that."""
        start = {} if self._settings.quick else self._best_start(finalists[0])
        closely: set[str] = set()
        while best := ranked(self._rated()):
            self._chosen = best[0].name
            known = next((place for place, row in enumerate(best) if row.name in closely), len(best))
            if known == 0 or self._is_late():
                return
            closely |= self._measured_in_turns(best[: min(known, _FINALISTS)], start)
        self._chosen = None

    def _rated(self) -> list[LoaderRow]:
        """Return the rows that work and whose rate is known, the cheapest first."""
        return [row for row in self.rows.values() if row.outcome == "ok" and row.batches_per_second is not None]

    def _measured_in_turns(self, rows: Sequence[LoaderRow], start: Arguments) -> set[str]:
        """Measure settings with all their arguments, one after the other and again; return the names of their rows.

        With step times, a consumer computes as long as the step takes.
        """
        doing: Doing = "confirming" if self._idle.steps else "measuring"
        every: dict[str, list[Measurement]] = {row.name: [] for row in rows}
        turns = [(number, row) for number in range(self._settings.trials) for row in rows]
        now = LoaderProgress(doing=doing, total=len(turns))
        for done, (number, row) in enumerate(turns):
            if self._is_late():
                break
            if number and every[row.name][-1].outcome != "ok":
                continue
            arguments = row.arguments | (start if row.workers else {})
            now = dataclasses.replace(now, arguments=arguments, done=done)
            self._on_progress(now)
            every[row.name].append(self._run(arguments, self._closer_plan(row)))
        names = set()
        for row in (row for row in rows if every[row.name]):
            found = self._closer_row(row, every[row.name])
            self._on_progress(dataclasses.replace(now, done=len(turns), row=found))
            if found.name != row.name:  # one row for each setting: they only start differently
                del self.rows[row.name]
                self._measured[found.name] = self._measured.pop(row.name)
            self.rows[found.name] = found
            names.add(found.name)
        return names

    def _closer_plan(self, row: LoaderRow) -> Plan:
        """Return how a setting is measured each time when it is compared with others in turns."""
        if not self._idle.steps:
            return Plan(seconds=self._settings.seconds * 2 ** (row.rounds - 1))
        steps = [float(step) for step in self._idle.steps_of(self._measured[row.name].epochs)]
        period = sum(steps) / len(steps) / max(1e-3, 1 - (row.gpu_idle or 0.0))
        most = self._settings.seconds if self._settings.quick else _PACED_SECONDS
        seconds = min(most, max(self._settings.seconds, _PACED_BATCHES * period))
        return Plan(seconds=seconds / self._settings.trials, steps=steps)

    def _closer_row(self, row: LoaderRow, measurements: Sequence[Measurement]) -> LoaderRow:
        """Return a row with what was measured in turns."""
        last = measurements[-1]
        if last.outcome != "ok":
            return replace(row_of(last, self._kind, row.rounds), rounds=row.rounds)
        rows = [row_of(one, self._kind, row.rounds) for one in measurements]
        if not self._idle.steps:
            self._measured[row.name] = dataclasses.replace(last, trials=[one.epochs for one in measurements])
            return self._idle.priced(together(rows), self._measured[row.name].epochs)
        epochs = [taken for one in measurements for taken in one.epochs]
        self._idle.learn(row, epochs, paced=True)
        others = {name: getattr(together(rows), name) for name in _WITH_STEPS}
        waits = [measured_idle(one.epochs, row.workers) for one in measurements]
        found = replace(row, arguments=last.arguments, gpu_idle_measured=float(np.median(waits)), **others)
        seconds = self._idle.epoch_seconds(found, self._measured[row.name].epochs)
        return replace(found, estimated_epoch_seconds=seconds)

    def _best_start(self, row: LoaderRow) -> Arguments:
        """Return the arguments with which an epoch of this setting starts soonest; of equal ones the first."""
        axes = {name: self._axes[name] for name in self._kind.START_AXES if name in self._axes}
        ways = self._kind.settings({**{name: [value] for name, value in row.arguments.items()}, **axes})
        if len(ways) < 2:
            return {}
        plan = Plan(seconds=self._settings.seconds, epochs=_STARTS, batches=2 * max(1, row.workers))
        working = [one for one in self._measure_all(ways, plan, 1, "starting") if one.outcome == "ok"]
        if not working:
            return {}
        soonest = min(one.first_batch_seconds or 0.0 for one in working)
        enough = soonest + max(0.05, 0.1 * soonest)
        best = next(one for one in working if (one.first_batch_seconds or 0.0) <= enough)
        return {name: best.arguments[name] for name in axes}

    def result(self, notes: Sequence[str], *, interrupted: bool = False) -> LoaderTuning:
        """Return the record of what is known now."""
        rated = self._rated()
        if self._chosen is None and rated and (interrupted or self._settings.quick):
            self._chosen = ranked(rated)[0].name
        equal = dict(zip((row.name for row in rated), equal_to_best(rated), strict=True))
        rows = [replace(row, equal_to_best=equal.get(name)) for name, row in self.rows.items()]
        recommended = next((index for index, row in enumerate(rows) if row.name == self._chosen), None)
        epochs = [taken for one in self._measured.values() for taken in one.epochs]
        chosen = self._measured.get(self._chosen or "")
        steps, opened = self._idle.steps, self._opened
        found = LoaderTuning(
            meta=meta_of(LoaderTuning),
            lengths=None if steps is None else steps.lengths,
            target=_target(self._settings),
            kind=opened.kind,
            settings=self._settings.record(),
            device_name=opened.device_name,
            batch=next((taken.words for taken in epochs if taken.words), None),
            epoch_batches=self._idle.epoch_batches(epochs),
            epoch_examples=opened.examples or self._idle.epoch_examples(epochs) or None,
            demand=None if chosen is None or steps is None else steps.demand(chosen.epochs, exact=opened.exact),
            rows=rows,
            recommended=recommended,
            reason="",
            queue=self._idle.record,
            interrupted=interrupted,
            warnings=[*notes, *self._notes, *opened.warnings],
            **self._extras,  # type: ignore[arg-type]
        )
        warnings = [
            *self._repeats.warnings(self._measured, self._idle),
            *found.warnings,
            *warnings_for(found, len(self._settings.processors)),
        ]
        return replace(found, reason=reason_for(found), warnings=warnings)


def check_folder(folder: Path, settings: LoaderSettings, *, force: bool) -> None:
    """Raise ResultError if the folder can't hold the tuning, or holds that of another loader, unless `force` is set."""
    if folder.exists() and not folder.is_dir():
        raise ResultError(f"{folder} is not a folder, and a run needs one", "Give another with --run.")
    path = folder / LOADER_FILE
    if path.exists() and not force:
        theirs = read_result(path, LoaderTuning).target
        if theirs != _target(settings):
            raise ResultError(
                f"{path} is of another loader: {theirs.words}",
                "Give another folder with --run, or --force to replace it.",
            )


def _target(settings: LoaderSettings) -> WorkloadRecord:
    return WorkloadRecord(spec=settings.target, options=dict(settings.options))
