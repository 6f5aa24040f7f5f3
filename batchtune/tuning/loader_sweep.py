"""Tunes a data loader: measures its settings, holds them against the step, recommends one, and writes `loader.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from batchtune.errors import LoaderError, ResultError
from batchtune.loaders import kind_of
from batchtune.loaders.base import LoaderKind, Machine
from batchtune.loaders.protocol import Opened
from batchtune.loaders.runner import LoaderRunner, Measurement, Plan, too_small
from batchtune.loaders.settings import LoaderSettings, swept_axes
from batchtune.results import (
    BUSY_IDLE,
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
from batchtune.tuning.loader_recommend import ranked, reason_for, warnings_for
from batchtune.tuning.loader_rows import measured_idle, repeated_batches, reproduced, row_of
from batchtune.tuning.run_folder import alone_in
from batchtune.units import counted, format_number

_OF_RATES = (
    *("examples_per_second", "batches_per_second", "length_per_second", "examples_per_second_spread"),
    *("wait_p50_seconds", "wait_p99_seconds", "processors", "other_processors", "gpu_idle", "estimated_epoch_seconds"),
    "growth_bytes_per_batch",
)
# How many settings are measured again, and run as training would run them.
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
# How many batches of each worker are compared, and for how long they are taken at most.
_COMPARED_ROUNDS = 8
_COMPARED_SECONDS = 10.0

Doing = Literal["opening", "comparing", "measuring", "starting", "confirming", "stages", "reproducing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """The progress of a tuning: the setting that it measures, how many of the round are done, and then its row."""

    doing: Doing
    arguments: Arguments = field(default_factory=dict)
    done: int = 0
    total: int = 1
    row: LoaderRow | None = None


OnProgress = Callable[[LoaderProgress], None]


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
    steps, missing = steps_of_run(folder, settings.step_seconds)
    with alone_in(folder), LoaderRunner(settings) as runner:
        on_progress(LoaderProgress(doing="opening"))
        opened = runner.inspect()
        tuner = _Tuner(settings, runner, opened, steps, on_progress)
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
        self, settings: LoaderSettings, runner: LoaderRunner, opened: Opened, steps: Steps | None, report: OnProgress
    ) -> None:
        self._settings, self._runner, self._opened, self._on_progress = settings, runner, opened, report
        self._kind: LoaderKind = kind_of(opened.kind)
        machine = Machine(processors=len(settings.processors), accelerator=opened.device != "cpu")
        axes = self._kind.axes(machine, frozenset(opened.takes))
        self._axes = swept_axes(axes, settings.sweep, opened.takes, self._kind.ARGUMENTS)
        self._measured: dict[str, Measurement] = {}
        self._idle = IdleModel(steps, self._kind, machine.processors, opened)
        self.rows: dict[str, LoaderRow] = {}
        self._chosen: str | None = None
        self._notes: list[str] = []
        self._extras: dict[str, object] = {}
        self._repeats: str | None = None

    def tune(self) -> None:
        """Measure all settings, halving their number in each round, then the best more closely."""
        self._compare_workers()
        finalists = self._halve()
        if finalists:
            self._choose(finalists)
        if self._settings.stages:
            self._on_progress(LoaderProgress(doing="stages"))
            with self._noting("The stages can't be measured"):
                self._extras["stages"] = self._runner.stages(max(_STAGES_SECONDS, self._settings.seconds))
        if self._settings.check_reproducible and self._chosen is not None:
            arguments = self.rows[self._chosen].arguments
            self._on_progress(LoaderProgress(doing="reproducing", arguments=arguments))
            with self._noting("Two epochs can't be compared"):
                self._extras["reproduced"] = reproduced(self._runner, arguments, self._kind)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Make a warning of an error, so that what was measured before is kept."""
        try:
            yield
        except LoaderError as error:
            self._notes.append(f"{what}: {error.message}.")

    def _halve(self) -> list[LoaderRow]:
        """Return the settings of the last round that work, the best first."""
        once = {name: values[:1] if name in self._kind.START_AXES else values for name, values in self._axes.items()}
        left = self._kind.settings(once)
        seconds, rounds = self._settings.seconds, 1
        while True:
            last = len(left) <= _FINALISTS
            plan = Plan(seconds=seconds, trials=self._settings.trials if last else 1)
            found = self._measure_all(left, plan, rounds)
            if rounds == 1:
                found = self._receiving(found)
            while rounds == 1 and (more := self._more_workers(found, once)):
                found += self._measure_all(more, plan, rounds, before=len(found))
            best = ranked([row for row in found if row.outcome == "ok"])
            if last or not best:
                return best
            kept = {row.name for row in best[: max(_FINALISTS, -(-len(found) // 2))]}
            left = [row.arguments for row in found if row.name in kept]  # still the cheapest first
            seconds, rounds = 2 * seconds, rounds + 1

    def _compare_workers(self) -> None:
        """Find out whether workers deliver the same batches, which none can whose examples are dealt to them."""
        several = [one for one in self._kind.settings(self._axes) if self._kind.workers(one) > 1]
        if self._opened.dealt or not several:
            return
        arguments, workers = several[0], self._kind.workers(several[0])
        self._on_progress(LoaderProgress(doing="comparing", arguments=arguments))
        plan = Plan(seconds=_COMPARED_SECONDS, batches=_COMPARED_ROUNDS * workers, digests=True)
        with suppress(LoaderError):  # which its measurement shows, too
            measured = self._runner.measure(arguments, plan, self._kind)
            if measured.outcome == "ok" and repeated_batches(measured.epochs[0].digests, workers):
                self._repeats = self._repeating(f"the first batches of {workers} are the same, one after the other")

    def _repeating(self, how: str) -> str:
        return f"{self._kind.WORKERS_ARE} repeat each other: {how}\n{self._kind.SPLIT}"

    def _is_repeated(self, measurement: Measurement) -> bool:
        """Return whether each of several workers delivered a whole epoch, in whatever order."""
        workers = self._kind.workers(measurement.arguments)
        examples = self._idle.epoch_examples(measurement.epochs)
        if self._opened.dealt or workers < 2 or not examples:
            return False
        alone = [one for one in self._measured.values() if self._kind.workers(one.arguments) < 2]
        return any(examples == workers * (self._idle.epoch_examples(one.epochs) or 0) for one in alone)

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
            now = dataclasses.replace(now, arguments=arguments, done=done, row=None)
            self._on_progress(now)
            found.append(self._measure(arguments, plan, rounds, starting=doing == "starting"))
            self._on_progress(dataclasses.replace(now, done=done + 1, row=found[-1]))
        return found

    def _measure(self, arguments: Arguments, plan: Plan, rounds: int, *, starting: bool) -> LoaderRow:
        sizes = [row.batch_bytes for row in self.rows.values() if row.batch_bytes]
        reason = too_small(self._kind, arguments, max(sizes)) if sizes else None
        if self._repeats is not None and self._kind.workers(arguments) > 1:
            measurement = Measurement(arguments=arguments, outcome="repeats", error=self._repeats)
        elif reason is not None:
            measurement = Measurement(arguments=arguments, outcome="shared_memory", error=reason)
        else:
            measurement = self._run(arguments, plan)
        if measurement.outcome == "ok" and self._is_repeated(measurement):
            self._repeats = self._repeating("each delivers the whole data set")
            measurement = Measurement(arguments=arguments, outcome="repeats", error=self._repeats)
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
        """Choose how epochs start, then run the best settings as training would, until one keeps its promise."""
        start = self._best_start(finalists[0])
        tried: list[LoaderRow] = []
        candidates = self._with_more_workers(finalists[0])
        for number, row in enumerate(candidates):
            now = LoaderProgress(doing="measuring", done=number, total=len(candidates))
            tried.append(self._confirmed(row.arguments | (start if row.workers else {}), row.rounds, now))
            if not self._idle.steps or (tried[-1].outcome == "ok" and (tried[-1].idle or 0.0) <= BUSY_IDLE):
                break
        working = [row for row in tried if row.outcome == "ok"]
        if working:
            self._chosen = ranked(working)[0].name

    def _with_more_workers(self, first: LoaderRow) -> list[LoaderRow]:
        """Return a row, and of those with more workers, the best with each number, in ascending order."""
        rated = [row for row in self.rows.values() if row.batches_per_second is not None]
        more = ranked([row for row in rated if row.outcome == "ok" and row.workers > first.workers])
        by_workers: dict[int, LoaderRow] = {}
        for row in more:
            by_workers.setdefault(row.workers, row)
        return [first, *(by_workers[workers] for workers in sorted(by_workers))][:_FINALISTS]

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

    def _confirmed(self, arguments: Arguments, rounds: int, now: LoaderProgress) -> LoaderRow:
        """Measure a setting with all its arguments, then with a consumer that computes as long as the step takes."""
        now = dataclasses.replace(now, arguments=arguments)
        self._on_progress(now)
        plan = Plan(seconds=self._settings.seconds * 2 ** (rounds - 1), trials=self._settings.trials)
        row = self._measure(arguments, plan, rounds, starting=False)
        self._on_progress(dataclasses.replace(now, done=now.done + 1, row=row))
        if row.outcome != "ok" or not self._idle.steps:
            return row
        self._on_progress(dataclasses.replace(now, doing="confirming"))
        epochs = self._measured[row.name].epochs
        steps = [float(step) for step in self._idle.steps_of(epochs)]
        period = sum(steps) / len(steps) / max(1e-3, 1 - (row.gpu_idle or 0.0))
        plan = Plan(seconds=min(_PACED_SECONDS, max(self._settings.seconds, _PACED_BATCHES * period)), steps=steps)
        paced = self._run(arguments, plan)
        if paced.outcome != "ok":
            row = replace(row, outcome=paced.outcome, error=paced.error)
        else:
            self._idle.learn(row, paced.epochs, paced=True)
            row = replace(row, gpu_idle_measured=measured_idle(paced.epochs, row.workers))
            row = replace(row, estimated_epoch_seconds=self._idle.epoch_seconds(row, epochs))
        self.rows[row.name] = row
        return row

    def result(self, notes: Sequence[str], *, interrupted: bool = False) -> LoaderTuning:
        """Return the record of what is known now."""
        rows = list(self.rows.values())
        if self._chosen is None and interrupted:
            best = ranked([row for row in rows if row.outcome == "ok" and row.batches_per_second is not None])
            self._chosen = best[0].name if best else None
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
            warnings=[*self._repetition(), *notes, *self._notes, *opened.warnings, *self._unequal_epochs()],
            **self._extras,  # type: ignore[arg-type]
        )
        warnings = [*found.warnings, *warnings_for(found, len(self._settings.processors))]
        return replace(found, reason=reason_for(found), warnings=warnings)

    def _repetition(self) -> Iterator[str]:
        """Yield a warning if workers repeat each other."""
        if self._repeats is not None:
            how, split = self._repeats.splitlines()
            left_out = f"Settings with several {self._kind.WORKERS_ARE} are left out."
            yield f"{how[0].upper()}{how[1:]}. {split} {left_out}"

    def _unequal_epochs(self) -> Iterator[str]:
        """Yield a warning if an epoch has more examples with some numbers of workers than with others."""
        counts: dict[int, int] = {}
        for name, measurement in self._measured.items():
            examples = self._idle.epoch_examples(measurement.epochs)
            if examples is not None and self._kind.MORE_WORKERS:
                counts.setdefault(self.rows[name].workers, examples)
        if not counts:
            return
        (few, least), (many, most) = (choose(counts.items(), key=lambda item: item[1]) for choose in (min, max))
        if most > least:
            yield (
                f"An epoch has {format_number(least)} examples with {counted(few, 'worker')}, and "
                f"{format_number(most)} with {counted(many, 'worker')}: workers share the data set wrongly. "
                f"{self._kind.SPLIT}"
            )


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
