"""Tunes a data loader: measures each setting once, the best ones in turns, and writes `loader.json`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import replace

from batchtune.epochs.cost_model import needs_targets
from batchtune.epochs.measured_costs import costs_of
from batchtune.errors import LoaderError, ResultError
from batchtune.lengths import FloatArray
from batchtune.loaders import LoaderKind, kind_of, read_tuning
from batchtune.loaders.runner import (
    COMPARED_SECONDS,
    LoaderRunner,
    LoaderSettings,
    Measurement,
    swept_axes,
)
from batchtune.loaders.worker import Take, Taken
from batchtune.results import (
    BUSY_IDLE,
    LOADER_FILE,
    PROBE_FILE,
    SWEEP_FILE,
    Arguments,
    Demand,
    LengthsSummary,
    LoaderRow,
    LoaderTuning,
    Probe,
    Reproduced,
    Sweep,
    meta_of,
    read_if_written,
    write_result,
)
from batchtune.run_folder import alone_in
from batchtune.units import counted, format_percent, format_seconds

# Evaluates the measurements of a loader: the row of each setting, which one to recommend, and why.

EQUAL = 0.02
"""Rates and idle shares that differ by less are equal; rates may differ by the spread of the trials, up to 10%."""
_MOST_EQUAL = 0.1
# Processors kept busy beyond which the machine, not the number of workers, limits the rate.
_BUSY = 0.9
# Other programs that take a larger share of the processors disturb the measurement.
_OTHERS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How long the step computes with batches.

    Attributes:
        source, per, device_name: As in `Demand`.
        seconds_of: Examples and longest lengths of batches → seconds of each step.
        lengths: The data that the run is about; None for a number that the user gave.
    """

    source: Literal["probe", "step-ms"]
    per: Literal["shape", "example", "batch"]
    seconds_of: Callable[[FloatArray, FloatArray], FloatArray]
    device_name: str | None = None
    lengths: LengthsSummary | None = None

    def of(self, epochs: Iterable[Taken]) -> list[float]:
        """Return the seconds of a step with each delivered batch; one whose examples are unknown counts as one."""
        seconds = []
        for taken in epochs:
            examples = np.nan_to_num(
                _column(batch.examples for batch in taken.batches), nan=1.0
            )
            seconds += self.seconds_of(
                examples, _column(batch.length for batch in taken.batches)
            ).tolist()
        return seconds

    def demand(self, epochs: Iterable[Taken]) -> Demand:
        """Return the step's demand for the batches that were delivered, at least one."""
        return Demand(
            source=self.source,
            per=self.per,
            step_seconds=float(np.mean(self.of(epochs))),
            device_name=self.device_name,
        )


def steps_of_run(folder: Path, step_ms: float | None, *, exact: bool) -> Steps | None:
    """Return the step times that the user gave, or those of a run folder's probe; None without any.

    `exact`: the lengths of batches are known, in the unit of the run. Without them, or if the times depend on targets,
    a step takes as long for each example as in the recommended epoch of the run's sweep.

    Raises:
        ResultError: A file of the run can't be read.
    """
    if step_ms is not None:
        return Steps(
            source="step-ms",
            per="batch",
            seconds_of=lambda examples, _: 0 * examples + step_ms / 1000,
        )
    probe = read_if_written(folder / PROBE_FILE, Probe)
    if probe is None:
        return None
    costs = costs_of(probe)
    model = probe.models.step_seconds
    if costs.step_seconds is None or model is None:
        return None
    steps = Steps(
        source="probe",
        per="shape",
        seconds_of=costs.step_seconds,
        device_name=costs.device_name,
        lengths=probe.lengths,
    )
    if exact and not needs_targets(model):
        return steps
    sweep = read_if_written(folder / SWEEP_FILE, Sweep)
    row = None if sweep is None else sweep.recommended_row
    if sweep is None or row is None or row.estimated_epoch_seconds is None:
        return None
    per_example = row.estimated_epoch_seconds / sweep.lengths.count
    return dataclasses.replace(
        steps, per="example", seconds_of=lambda examples, _: examples * per_example
    )


def row_of(kind: LoaderKind, measurements: Sequence[Measurement]) -> LoaderRow:
    """Return the row of a setting, without what depends on the step: medians over its measurements."""
    last = measurements[-1]
    workers = kind.workers(last.arguments)
    if last.outcome != "ok":
        return LoaderRow(
            arguments=last.arguments,
            workers=workers,
            outcome=last.outcome,
            error=last.error,
        )
    epochs = list(
        itertools.chain.from_iterable(
            measurement.epochs for measurement in measurements
        )
    )
    delivered = list(itertools.chain.from_iterable(taken.batches for taken in epochs))
    rates = np.array([_rates(measurement, workers) for measurement in measurements])
    batches, examples, length = np.median(rates, axis=0)
    waits = (
        list(itertools.chain.from_iterable(taken.waits[1:] for taken in epochs))
        or epochs[0].waits
    )
    processors = sum(taken.cpu_seconds for taken in epochs) / sum(
        taken.seconds for taken in epochs
    )
    return LoaderRow(
        arguments=last.arguments,
        workers=workers,
        outcome="ok",
        trials=len(measurements),
        batches=len(delivered),
        examples=sum(batch.examples or 0 for batch in delivered),
        examples_per_second=_known(examples),
        batches_per_second=float(batches),
        length_per_second=_known(length),
        examples_per_second_spread=_known(np.ptp(rates[:, 1]) / examples),
        first_batch_seconds=float(np.median([taken.waits[0] for taken in epochs])),
        wait_p50_seconds=float(np.quantile(waits, 0.5)),
        wait_p99_seconds=float(np.quantile(waits, 0.99)),
        processors=processors,
        other_processors=max(0.0, last.busy_processors - processors),
        memory_bytes=last.memory_bytes or None,
        worker_bytes=last.worker_bytes or None,
        shared_bytes=last.shared_bytes,
        batch_bytes=max(batch.size_bytes for batch in delivered),
    )


def idle_share(measurement: Measurement, workers: int) -> float:
    """Return the share of the time that the consumer waited, without the start of each epoch."""
    *_, waits, steps = _totals(measurement, workers)
    return float(waits / (waits + steps))


def epoch_size(epochs: Iterable[Taken]) -> tuple[int | None, int | None]:
    """Return the batches and examples of an epoch that came to its end; None: not known."""
    for taken in epochs:
        if taken.complete:
            examples = [
                batch.examples for batch in taken.batches if batch.examples is not None
            ]
            if len(examples) == len(taken.batches):
                return len(examples), sum(examples)
            return len(taken.batches), None
    return None, None


def epoch_seconds(
    row: LoaderRow, batches: int | None, demand: Demand | None
) -> float | None:
    """Return the time of an epoch: its steps and measured waits, or the loader's own time without step times."""
    if (
        batches is None
        or row.batches_per_second is None
        or row.first_batch_seconds is None
    ):
        return None
    if demand is None:
        return row.first_batch_seconds + (batches - 1) / row.batches_per_second
    if row.gpu_idle is None:
        return None
    return row.first_batch_seconds + batches * demand.step_seconds / max(
        1e-9, 1 - row.gpu_idle
    )


def _rates(measurement: Measurement, workers: int) -> FloatArray:
    """Return batches, examples and length per second, the start of each epoch apart; NaN: not known."""
    totals = _totals(measurement, workers)
    rates: FloatArray = totals[:3] / totals[3:].sum()
    return rates


def _totals(measurement: Measurement, workers: int) -> FloatArray:
    """Return batches, examples, length, seconds of waits and of steps; NaN: not known.

    Each epoch counts from the first batch that follows those of its start: all workers begin their first ones at once.
    """
    totals = np.zeros(5)
    for taken in measurement.epochs:
        first = min(max(1, workers), len(taken.waits) // 2)
        figures = [
            (1, batch.examples, batch.total_length, wait, step)
            for batch, wait, step in zip(
                taken.batches, taken.waits, taken.steps, strict=True
            )
        ]
        totals += np.array(figures[first:], dtype=np.float64).sum(axis=0)
    return totals


def _column(figures: Iterable[float | None]) -> FloatArray:
    """Return figures as an array; NaN: not known."""
    return np.array(list(figures), dtype=np.float64)


def _known(figure: float) -> float | None:
    """Return a figure; None for NaN."""
    return None if math.isnan(figure) else float(figure)


def ranked(rows: Sequence[LoaderRow], demand: Demand | None) -> list[LoaderRow]:
    """Return rows that work, the best first: those equal to the best by their number of workers, then the others.

    `rows` are in the order of their settings, the cheapest first, in which equal ones stay. With a `demand`, the best
    is the one with which the step waits least; a row whose idle share was not measured is assumed to wait only as long
    as its throughput implies. Without it, the best is the fastest.
    """
    equal = equal_to_best(rows, demand)

    def rank(row: LoaderRow) -> tuple[bool, float]:
        if row.name in equal:
            return False, row.workers
        return True, _slowness(row, rows[0], demand)

    return sorted(rows, key=rank)


def equal_to_best(rows: Sequence[LoaderRow], demand: Demand | None) -> set[str]:
    """Return the names of the rows that are within the error of the best, this one included; nothing without rows."""
    fastest = max(rows, key=lambda row: row.rate, default=None)
    if fastest is None:
        return set()
    tolerance = EQUAL
    if demand is None:
        tolerance = max(
            EQUAL, min(_MOST_EQUAL, fastest.examples_per_second_spread or 0.0)
        )
    slowness = {row.name: _slowness(row, fastest, demand) for row in rows}
    return {
        name
        for name, slow in slowness.items()
        if slow <= min(slowness.values()) + tolerance
    }


def _slowness(row: LoaderRow, reference: LoaderRow, demand: Demand | None) -> float:
    """Return the share of time that the step waits; without a step, how much slower the row is than another."""
    if demand is None:
        return 1 - row.rate / reference.rate
    if row.gpu_idle is not None:
        return row.gpu_idle
    batch_seconds = 1 / (row.batches_per_second or 1e-9)
    if not row.workers:  # the step waits while the batch is made
        return batch_seconds / (batch_seconds + demand.step_seconds)
    return max(0.0, 1 - demand.step_seconds / batch_seconds)


def reason_for(tuning: LoaderTuning) -> str:
    """Explain in a sentence or two why the recommended row is the best, or why no row is recommended."""
    row = tuning.recommended_row
    workers = kind_of(tuning.kind).WORKERS_ARE
    if row is None:
        reason = f"Nothing is recommended: {counted(len(tuning.rows), 'setting')} measured, and none works."
    elif tuning.demand is None or row.gpu_idle is None:
        equal = sum(other.equal_to_best is True for other in tuning.rows) - 1
        reason = f"{row.name} delivers {row.rate_words}, the most that was measured."
        if equal > 0:
            reason += f" Within the error of it: {counted(equal, 'other setting')}, with no fewer {workers}."
    else:
        step = format_seconds(tuning.demand.step_seconds)
        waits = format_percent(row.gpu_idle)
        reason = f"With {row.name}, a step of {step} waits for {waits} of the time, and no setting does better."
        if tuning.is_bottleneck:
            reason = f"The loader is the bottleneck. {reason}"
    if tuning.interrupted:
        return f"Interrupted after {counted(len(tuning.rows), 'setting')}. {reason}"
    return reason


def warnings_for(tuning: LoaderTuning, processors: int) -> Iterator[str]:
    """Yield what the user should know of the recommended row; `processors` are those of one rank."""
    row = tuning.recommended_row
    if row is None:
        return
    other_processors = row.other_processors or 0.0
    if other_processors > _OTHERS * processors:
        yield (
            f"Other programs kept {other_processors:.1f} processors busy: rates are too low, and waits too long. "
            "Measure on an idle machine."
        )
    if row.gpu_idle is None or row.gpu_idle <= BUSY_IDLE:
        return
    kind = kind_of(tuning.kind)
    busy = (row.processors or 0.0) + other_processors
    if busy >= _BUSY * processors:
        if tuning.is_bottleneck:
            yield (
                f"All {counted(processors, 'processor')} are busy: more {kind.WORKERS_ARE} don't help. Make each "
                "example cheaper (decode less, prepare data before training), or train on a machine with more "
                "processors."
            )
    elif row.workers and row.workers >= max(other.workers for other in tuning.rows):
        yield (
            f"The processors are not all busy ({busy:.1f} of {processors}): try more {kind.WORKERS_ARE}, for example "
            f"--sweep {kind.WORKERS}={row.workers},{2 * row.workers}."
        )


# How many settings are measured in turns.
_FINALISTS = 3
# How long a consumer is run that computes as long as the step takes.
_PACED_BATCHES = 150
_PACED_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """The progress of a tuning: the present task, in words that the setting continues, and how many settings are done.

    `seconds` is the longest that the task may take, if known.
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
        compared = set()
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
            rows.append(
                replace(
                    row,
                    equal_to_best=is_equal,
                    estimated_epoch_seconds=epoch_seconds(row, batches, demand),
                )
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
