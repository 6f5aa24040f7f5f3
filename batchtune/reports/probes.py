"""The section on a probe: what fits, how it was measured, and every trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from batchtune.reports.section import Section, limit_fact, settings_facts, value_words
from batchtune.reports.table import (
    UNKNOWN,
    Fact,
    Table,
    failures_table,
    format_shape,
    known,
    make_table,
    shown_of,
    spread,
)
from batchtune.results import CostModel, Device, Outcome, Probe, Trial
from batchtune.trust import WORST_TIME_ERROR
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

# A fit that misses its own measurements by more can't be trusted between them.
_POOR_FIT = 0.1
_MAX_FRONTIER_POINTS = 24
# Enough trials for any search; they bound the size of the HTML page.
_MAX_TRIALS = 1000


class ProbeSection(Section[Probe]):
    """The section on `probe.json`."""

    @property
    def leading_sentences(self) -> int:
        """As for every section; with a sweep, its limit is no news."""
        return 3 if self.is_main else 0

    def sentences(self) -> Iterator[str]:
        """Say what fits, and how that was confirmed."""
        probe = self.result
        unit = probe.lengths.unit
        yield self._limit
        if len(probe.frontier) > 1:
            largest = max(probe.frontier, key=lambda point: point.batch_size)
            longest = probe.frontier[-1]
            examples = counted(longest.batch_size, "example")
            if largest.batch_size > longest.batch_size:
                yield (
                    f"A batch holds from {examples} of {format_length(longest.length, unit)} to "
                    f"{format_number(largest.batch_size)} of {format_length(largest.length, unit)}."
                )
            else:
                yield f"A batch holds {examples}, whatever their length."
        if any(point.target_length is not None for point in probe.frontier):
            yield "Each length was measured with the longest target that occurs at or below it."
        yield from self._confirmation()
        if self.is_main:
            yield "`batchtune sweep-buckets` finds the buckets that waste the least with it."

    def _confirmation(self) -> Iterator[str]:
        confirmation = self.result.confirmation
        if confirmation is None or not confirmation.shapes:
            return
        batches = f"The {format_number(confirmation.shapes)} batches at the limit were"
        if confirmation.shapes == 1:
            batches = "The batch at the limit was"
        again = f" after {counted(confirmation.given_up, 'larger one')} had failed" if confirmation.given_up else ""
        yield (
            f"{batches} run once more in turns, {counted(confirmation.steps, 'step')} in "
            f"{counted(confirmation.workers, 'worker')}, and fit{again}."
        )

    @property
    def _limit(self) -> str:
        limit = format_length(self.result.max_batch_length, self.result.lengths.unit)
        device = describe_device(self.result.device)
        if self.result.unfinished:
            return f"At least max_batch_length = {limit} fits, by an unfinished probe, measured on {device}."
        return f"max_batch_length = {limit} is the most that fits at every length, measured on {device}."

    def facts(self) -> Iterator[Fact]:
        """As for every section."""
        probe = self.result
        device = probe.device
        driver = f", driver {device.driver}" if device.driver else ""
        count = Counter(trial.outcome for trial in probe.trials)
        outcomes = ", ".join(f"{count[name]} {name}" for name in get_args(Outcome) if count[name])
        yield "Device", describe_device(device)
        yield "Software", f"torch {device.torch}{driver}, allocator {device.allocator}"
        yield "Workload", probe.workload.words
        yield "Trials", f"{len(probe.trials)}: {outcomes}" if outcomes else "0"
        fits = []
        for name, model in _models(probe).items():
            fit = f"{name} to within {format_percent(model.relative_error)}"
            if model.largest_error is not None:
                fit += f" ({format_percent(model.largest_error)} at most)"
            fits.append(fit)
        if fits:
            yield "Models", f"fit the trials: {', '.join(fits)}"
        if self.is_main:
            yield limit_fact(probe)

    def tables(self) -> Iterator[Table]:
        """Lay out the frontier, and the trials that failed."""
        if self.result.frontier:
            yield _frontier_table(self.result)
        title = "Trials that failed, but not for lack of memory"
        unit = self.result.lengths.unit
        yield from failures_table(title, self._failed_trials, unit, "probe.json")

    @property
    def _failed_trials(self) -> list[Trial]:
        return [trial for trial in self.result.trials if trial.outcome not in ("ok", "oom")]

    def warnings(self) -> Iterator[str]:
        """Yield the probe's own warnings, then what its frontier and its models leave in doubt."""
        probe = self.result
        unit = probe.lengths.unit
        failed = self._failed_trials
        if failed:
            trials = f"{counted(len(failed), 'trial')} failed, but not for lack of memory"
            yield f"{trials} ({failed[0].outcome}): --full lists them with their messages."
        for warning in probe.warnings:
            yield with_full_stop(warning)
        if probe.frontier and probe.frontier[-1].length < probe.lengths.max * (1 - 1e-9):
            yield (
                f"The frontier ends at {format_length(probe.frontier[-1].length, unit)}, but the longest example has "
                f"{format_length(probe.lengths.max, unit)}. Leave longer examples out with --max-length, or give the "
                "probe more memory."
            )
        for name, model in _models(probe).items():
            error = model.relative_error
            misses = f"The model of {name} misses the trials by {format_percent(error)}"
            if name == "step time" and error > WORST_TIME_ERROR:
                yield (
                    f"{misses}, so no times are estimated and tables are compared by batches. Probe again on a machine "
                    "that does nothing else."
                )
            elif error > _POOR_FIT:
                yield (
                    f"{misses}: take figures that build on it as rough, and probe again on a machine that does nothing "
                    "else."
                )

    def steps(self) -> Iterator[Fact]:
        """As for every section."""
        if self.is_main:
            yield f"batchtune sweep-buckets MANIFEST{self.run.as_option}", "find the buckets that waste least"

    def settings(self) -> dict[str, list[Fact]]:
        """As for every section."""
        probe = self.result
        return {
            "Device": list(_device_facts(probe.device)),
            "Settings of the device": settings_facts(probe.device.settings),
            "Workload": [("spec", probe.workload.spec), *settings_facts(probe.workload.options)],
            "Probe": [*settings_facts(probe.settings), *_check_facts(probe)],
        }


def _models(probe: Probe) -> dict[str, CostModel]:
    """Return the fitted models by their names in sentences."""
    models = {"peak memory": probe.models.peak_bytes, "step time": probe.models.step_seconds}
    return {name: model for name, model in models.items() if model is not None}


def describe_device(device: Device) -> str:
    """Return the device and the limit that was enforced: `NVIDIA H200, limited to 126 GiB of 140 GiB`."""
    return f"{device.name}, limited to {format_size(device.limit_bytes)} of {format_size(device.total_bytes)}"


def _device_facts(device: Device) -> Iterator[Fact]:
    yield "name", f"{device.name} ({device.kind})"
    sizes = {
        "memory": device.total_bytes,
        "free before": device.free_bytes,
        "limit": device.limit_bytes,
        "outside the allocator": device.outside_bytes,
        "reserve": device.reserve_bytes or None,
        "kept for DistributedDataParallel": device.ddp_bytes or None,
    }
    for name, size in sizes.items():
        if size is not None:
            yield name, format_size(size)
    values = {
        "driver": device.driver,
        "torch": device.torch,
        "allocator": device.allocator,
        "UUID": device.uuid,
        "part of a GPU (MIG)": device.mig,
        "ECC": device.ecc,
    }
    for name, value in values.items():
        if value is not None:
            yield name, value_words(value)
    if device.other_processes is not None:
        processes = device.processes or []
        used = [format_size(process.used_bytes) for process in processes if process.used_bytes is not None]
        yield "other processes", format_number(device.other_processes) + (f" ({', '.join(used)})" if used else "")


def _check_facts(probe: Probe) -> Iterator[Fact]:
    confirmation = probe.confirmation
    margin = probe.margin
    if confirmation is not None:
        workers = "1 process" if confirmation.workers == 1 else f"{confirmation.workers} processes"
        yield (
            "confirmed",
            f"{counted(confirmation.shapes, 'batch shape')} in {counted(confirmation.steps, 'step')} in alternation, "
            f"in {workers}; {confirmation.given_up} given up",
        )
    if margin is not None:
        yield (
            "margin",
            f"{format_size(margin.bytes)}: equal batches differ by up to {format_size(margin.spread_bytes)} in "
            f"{counted(margin.repetitions, 'repetition')}, a process's first step by up to "
            f"{format_size(margin.first_step_bytes)}",
        )


def _frontier_table(probe: Probe) -> Table:
    shown = spread(probe.frontier, _MAX_FRONTIER_POINTS)
    rows = []
    for point in shown:
        closed_by: str = "data, not memory" if point.closed_by == "data" else point.closed_by
        if point.oom_batch_size is not None:
            closed_by += f" at {format_number(point.oom_batch_size)}"
        rows.append(
            {
                "length": format_length(point.length, probe.lengths.unit),
                "target length": known(point.target_length, format_number),
                "batch size": format_number(point.batch_size),
                "closed by": closed_by,
                "peak memory": known(point.peak_bytes, format_size),
                "step time": known(point.step_seconds, format_seconds),
                "trial": known(point.trial, str),
            }
        )
    notes = [*shown_of(len(shown), len(probe.frontier), " lengths", "probe.json")]
    if any(point.closed_by == "data" for point in shown):
        notes.append(
            "“Data, not memory”: no more examples are this short, or --max-batch-size allows no more. More may fit."
        )
    return make_table("Frontier: the largest batch, by length", rows, notes, names=["closed by"])


def trial_log(probe: Probe) -> Table | None:
    """Lay out every trial, in order; None without any."""
    if not probe.trials:
        return None
    shown = spread(probe.trials, _MAX_TRIALS)
    rows = []
    for trial in shown:
        step_time = known(trial.step_seconds, format_seconds)
        if step_time is not None and trial.step_seconds_spread is not None:
            step_time += f" ± {format_seconds(trial.step_seconds_spread / 2)}"
        rows.append(
            {
                "trial": str(trial.index),
                "batch shape": format_shape(trial.batch_size, trial.length, probe.lengths.unit),
                "target length": known(trial.target_length, format_number),
                "outcome": f"{trial.outcome} (in alternation)" if trial.confirmation else trial.outcome,
                "step time": step_time,
                "peak memory": known(trial.peak_bytes, format_size),
                "held": known(trial.reserved_bytes, format_size),
                "took": format_seconds(trial.elapsed_seconds),
                "message": trial.error or ", ".join(trial.throttle_reasons or ()) or UNKNOWN,
            }
        )
    notes = shown_of(len(shown), len(probe.trials), "", "probe.json")
    return make_table("Every trial", rows, notes, names=["batch shape", "outcome"], texts=["message"])
