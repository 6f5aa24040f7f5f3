"""Tunes a data loader: measures each setting once, the best ones in turns, and writes `loader.json`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from batchtune.errors import LoaderError, ResultError
from batchtune.loaders import kind_of, read_tuning
from batchtune.loaders.protocol import Take, Taken
from batchtune.loaders.recommend import (
    EQUAL,
    epoch_seconds,
    epoch_size,
    equal_to_best,
    idle_share,
    ranked,
    reason_for,
    row_of,
    steps_of_run,
    warnings_for,
)
from batchtune.loaders.runner import (
    COMPARED_SECONDS,
    LoaderRunner,
    LoaderSettings,
    Measurement,
    swept_axes,
)
from batchtune.results import (
    LOADER_FILE,
    Arguments,
    Demand,
    LoaderRow,
    LoaderTuning,
    Reproduced,
    meta_of,
    write_result,
)
from batchtune.run_folder import alone_in

# How many settings are measured in turns.
_FINALISTS = 3
# How long a consumer is run that computes as long as the step takes.
_PACED_BATCHES = 150
_PACED_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """The progress of a tuning: what it does, in words that the setting continues, and how many are done.

    `seconds` is how long what is done takes at most, where that is known.
    """

    doing: str
    arguments: Arguments = field(default_factory=dict)
    done: int = 0
    total: int = 1
    seconds: float | None = None


OnLoaderProgress = Callable[[LoaderProgress], None]


def run_loader_tuning(
    settings: LoaderSettings,
    folder: Path,
    *,
    force: bool = False,
    on_progress: OnLoaderProgress,
) -> LoaderTuning:
    """Tune the loader against the step of a run folder, and write `loader.json` there.

    Interrupted, it writes what it has measured so far.

    Raises:
        LoaderError: The target can't be imported or is not a loader, or every setting fails alike.
        OptionError: The target has no such option as one of `settings.options`, or needs another.
        ResultError: The folder holds the tuning of another loader, and `force` is not set; or can't be read or written.
        UsageError: `settings.sweep` names an unknown argument.
    """
    path = folder / LOADER_FILE
    if path.exists() and not force:
        tuned = read_tuning(path).target
        if tuned != settings.target_record:
            raise ResultError(
                f"{path} is of another loader: {tuned.words}",
                "Give another folder with --run, or --force to replace it.",
            )
    with alone_in(folder), closing(LoaderRunner(settings)) as runner:
        on_progress(LoaderProgress(doing="Building the loader"))
        tuner = Tuner(settings, runner, folder, on_progress)
        try:
            tuner.tune()
        except KeyboardInterrupt:
            if tuner.rows:
                write_result(path, tuner.result(interrupted=True))
            raise
        tuning = tuner.result()
        write_result(path, tuning)
    return tuning


class Tuner:
    """One tuning: the rows that are known, and the first measurement of each."""

    def __init__(
        self,
        settings: LoaderSettings,
        runner: LoaderRunner,
        folder: Path,
        on_progress: OnLoaderProgress,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._on_progress = on_progress
        self._opened = opened = runner.inspect()
        self._kind = kind_of(opened.kind)
        self._notes: list[str] = []
        self._steps = steps_of_run(folder, settings.step_ms, exact=opened.exact)
        if self._steps is None:
            self._notes.append(
                f"No step times are known: {folder} holds no probe and sweep with such times. Run `batchtune tune`, or "
                "give --step-ms, to see whether the step waits for batches."
            )
        self.rows: dict[str, LoaderRow] = {}
        self._measured: dict[str, Measurement] = {}
        self._repeats = False
        self._reproduced: Reproduced | None = None
        axes = self._kind.axes(
            len(settings.processors),
            accelerator=opened.device != "cpu",
            takes=frozenset(opened.takes),
        )
        self._arguments = self._kind.settings(
            swept_axes(self._kind, axes, settings.sweep, opened.takes)
        )

    def tune(self) -> None:
        """Measure all settings, then the best more closely, then what else was asked for."""
        for arguments in self._arguments:
            workers = self._kind.workers(arguments)
            if workers > 1 and not self._opened.dealt:
                self._on_progress(
                    LoaderProgress(
                        doing="Comparing the first batches of workers, with",
                        arguments=arguments,
                    )
                )
                self._repeats = self._runner.repeats(arguments, workers)
                break
        self._measure_all()
        self._compare_best()
        best = self._best()
        if self._settings.check_reproducible and best is not None:
            self._on_progress(
                LoaderProgress(
                    doing="Comparing two epochs of",
                    arguments=best.arguments,
                    seconds=2 * COMPARED_SECONDS,
                )
            )
            try:
                self._reproduced = self._runner.reproduced(best.arguments)
            except LoaderError as error:
                self._notes.append(f"Two epochs can't be compared: {error.message}.")

    def _measure_all(self) -> None:
        """Measure each setting once, as fast as its batches come."""
        total = len(self._arguments)
        for done, arguments in enumerate(self._arguments):
            self._on_progress(
                LoaderProgress(
                    doing="Measuring", arguments=arguments, done=done, total=total
                )
            )
            measurement = self._first_measurement(arguments)
            row = row_of(self._kind, [measurement])
            self.rows[row.name] = row
            if row.outcome == "ok":
                self._measured[row.name] = measurement

    def _first_measurement(self, arguments: Arguments) -> Measurement:
        """Measure a setting, unless its workers repeat each other, or find out that they do."""
        several = self._kind.workers(arguments) > 1
        if not (several and self._repeats):
            measurement = self._runner.measure(
                arguments, Take(seconds=self._settings.seconds)
            )
            if (
                not several
                or self._opened.dealt
                or not self._delivers_all_data(measurement)
            ):
                return measurement
        self._repeats = True
        error = f"{self._kind.WORKERS_ARE} repeat each other\n{self._kind.SPLIT}"
        return Measurement(arguments=arguments, outcome="repeats", error=error)

    def _delivers_all_data(self, measurement: Measurement) -> bool:
        """Return whether each of several workers delivers as many examples as one of another setting alone."""
        workers = self._kind.workers(measurement.arguments)
        _, examples = epoch_size(measurement.epochs)
        for other in self._measured.values():
            _, examples_alone = epoch_size(other.epochs)
            is_alone = self._kind.workers(other.arguments) < 2
            if (
                is_alone
                and examples_alone is not None
                and examples == workers * examples_alone
            ):
                return True
        return False

    def _compare_best(self) -> None:
        """Measure the best settings in turns, until the best of all is one of these.

        With step times, an untested setting is assumed to wait only as long as its throughput implies. Where receiving
        batches takes time, all of them wait longer. Stops when another round does not shorten the wait.
        """
        compared: set[str] = set()
        shortest = math.inf
        while True:
            finalists = []
            for row in ranked(self._working(), self._demand)[:_FINALISTS]:
                if row.name in compared:
                    break
                finalists.append(row)
            if not finalists:
                return
            self._measure_in_turns(finalists)
            compared |= {row.name for row in finalists}
            waits = [
                row.gpu_idle for row in self._working() if row.gpu_idle is not None
            ]
            if waits and min(waits) > shortest - EQUAL:
                return
            shortest = min(waits, default=math.inf)

    def _measure_in_turns(self, rows: Sequence[LoaderRow]) -> None:
        """Measure settings one after the other and again; with step times, as a step takes their batches."""
        measurements: dict[str, list[Measurement]] = {row.name: [] for row in rows}
        turns = list(rows) * self._settings.trials
        for done, row in enumerate(turns):
            earlier = measurements[row.name]
            if earlier and earlier[-1].outcome != "ok":
                continue
            self._on_progress(
                LoaderProgress(
                    doing="Taking batches as training does, with",
                    arguments=row.arguments,
                    done=done,
                    total=len(turns),
                )
            )
            earlier.append(self._runner.measure(row.arguments, self._request(row)))
        for name, measured in measurements.items():
            if measured:
                self.rows[name] = self._closer(self.rows[name], measured)

    def _request(self, row: LoaderRow) -> Take:
        """Return how a setting is measured each time when it is compared with others in turns."""
        seconds = self._settings.seconds
        if self._steps is None:
            return Take(seconds=seconds)
        steps = self._steps.of(self._measured[row.name].epochs)
        period = max(sum(steps) / len(steps), 1 / (row.batches_per_second or 1.0))
        seconds = min(_PACED_SECONDS, max(seconds, _PACED_BATCHES * period))
        return Take(seconds=seconds / self._settings.trials, steps=steps)

    def _closer(self, row: LoaderRow, measurements: Sequence[Measurement]) -> LoaderRow:
        """Return a row with what was measured in turns."""
        if self._steps is None or measurements[-1].outcome != "ok":
            return row_of(self._kind, measurements)
        idle = [idle_share(measurement, row.workers) for measurement in measurements]
        return replace(row, gpu_idle=statistics.median(idle))

    def _working(self) -> list[LoaderRow]:
        """Return the rows that work, the cheapest first."""
        return [row for row in self.rows.values() if row.outcome == "ok"]

    def _comparable(self) -> list[LoaderRow]:
        """Return the rows from which the best is chosen: those whose waits were measured, or without any all."""
        working = self._working()
        return [row for row in working if row.gpu_idle is not None] or working

    def _best(self) -> LoaderRow | None:
        return next(iter(ranked(self._comparable(), self._demand)), None)

    @property
    def _taken(self) -> list[Taken]:
        """The epochs of all settings that work."""
        return list(
            itertools.chain.from_iterable(
                measurement.epochs for measurement in self._measured.values()
            )
        )

    @property
    def _demand(self) -> Demand | None:
        if self._steps is None or not self._measured:
            return None
        return self._steps.demand(self._taken)

    def result(self, *, interrupted: bool = False) -> LoaderTuning:
        """Return the record of what is known now."""
        demand = self._demand
        taken = self._taken
        batches, examples = epoch_size(taken)
        batches = self._opened.batches or batches
        comparable = self._comparable()
        equal = equal_to_best(comparable, demand)
        best = self._best()
        rows = []
        for row in self.rows.values():
            is_equal = row.name in equal if row in comparable else None
            seconds = epoch_seconds(row, batches, demand)
            rows.append(
                replace(row, equal_to_best=is_equal, estimated_epoch_seconds=seconds)
            )
        tuning = LoaderTuning(
            meta=meta_of(LoaderTuning),
            lengths=None if self._steps is None else self._steps.lengths,
            target=self._settings.target_record,
            kind=self._opened.kind,
            settings=self._settings.record(),
            device_name=self._opened.device_name,
            batch=next((epoch.words for epoch in taken), None),
            epoch_batches=batches,
            epoch_examples=examples,
            demand=demand,
            rows=rows,
            recommended=None if best is None else list(self.rows).index(best.name),
            reason="",
            reproduced=self._reproduced,
            interrupted=interrupted,
            warnings=self._notes,
        )
        if self._repeats:  # the most important comes first
            workers = self._kind.WORKERS_ARE.capitalize()
            repeats = f"{workers} repeat each other: settings with several are left out. {self._kind.SPLIT}"
            tuning.warnings.insert(0, repeats)
        tuning.warnings.extend(warnings_for(tuning, len(self._settings.processors)))
        return replace(tuning, reason=reason_for(tuning))
