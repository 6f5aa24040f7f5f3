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
from batchtune.results import Device, Outcome, Probe, Trial
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

    def headline(self) -> str:
        """Say what fits, if nothing was swept."""
        return self._limit if self.is_main else ""

    def sentences(self) -> Iterator[str]:
        """As for every section."""
        yield from self.evidence()
        if not self.is_main:
            yield self._limit
        unit, frontier, confirmation = self.result.lengths.unit, self.result.frontier, self.result.confirmation
        if len(frontier) > 1:
            largest, longest = max(frontier, key=lambda point: point.batch_size), frontier[-1]
            fits, more = counted(longest.batch_size, "example"), format_number(largest.batch_size)
            ends = format_length(longest.length, unit), format_length(largest.length, unit)
            yield (
                f"A batch holds from {fits} of {ends[0]} to {more} of {ends[1]}."
                if largest.batch_size > longest.batch_size
                else f"A batch holds {fits}, whatever their length."
            )
        if any(point.target_length is not None for point in frontier):
            yield "Each length was measured with the longest target that occurs at or below it."
        if confirmation is not None and confirmation.shapes:
            shapes, steps = format_number(confirmation.shapes), format_number(confirmation.steps)
            which = (
                "The batch at the limit was" if confirmation.shapes == 1 else f"The {shapes} batches at the limit were"
            )
            again = f" after {counted(confirmation.given_up, 'larger one')} had failed" if confirmation.given_up else ""
            yield f"{which} run once more in turns, {steps} steps in {confirmation.workers} processes, and fit{again}."
        if self.is_main and not self.brief:
            yield "`batchtune sweep-buckets` finds the buckets that waste least with it."

    @property
    def _limit(self) -> str:
        limit = format_length(self.result.max_batch_length, self.result.lengths.unit)
        device = describe_device(self.result.device)
        if self.result.unfinished:
            return f"At least max_batch_length = {limit} fits, by an unfinished probe, measured on {device}."
        return f"max_batch_length = {limit} is the most that fits at every length, measured on {device}."

    def facts(self) -> Iterator[Fact]:
        """As for every section."""
        probe, device = self.result, self.result.device
        count = Counter(trial.outcome for trial in probe.trials)
        driver = f", driver {device.driver}" if device.driver else ""
        outcomes = ", ".join(f"{count[name]} {name}" for name in get_args(Outcome) if count[name])
        yield "Device", describe_device(device)
        yield "Software", f"torch {device.torch}{driver}, allocator {device.allocator}"
        yield "Workload", probe.workload.words
        yield "Trials", f"{len(probe.trials)}: {outcomes}" if outcomes else "0"
        fits = []
        for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
            if model is not None:
                most = "" if model.largest_error is None else f" ({format_percent(model.largest_error)} at most)"
                fits.append(f"{name} to within {format_percent(model.relative_error)}{most}")
        if fits:
            yield "Models", f"fit the trials: {', '.join(fits)}"
        if self.is_main:
            yield limit_fact(probe)

    def tables(self) -> Iterator[Table]:
        """Lay out the frontier, and the trials that failed."""
        if self.result.frontier:
            yield _frontier_table(self.result)
        title, unit = "Trials that failed, but not for lack of memory", self.result.lengths.unit
        yield from failures_table(title, self._failed_trials, unit, "probe.json")

    @property
    def _failed_trials(self) -> list[Trial]:
        return [trial for trial in self.result.trials if trial.outcome not in ("ok", "oom")]

    def urgent_warnings(self) -> Iterator[str]:
        """Yield the probe's own warnings, then what its frontier and its models leave in doubt."""
        probe, unit = self.result, self.result.lengths.unit
        if self.brief and (failed := self._failed_trials):
            trials = f"{counted(len(failed), 'trial')} failed, but not for lack of memory"
            yield f"{trials}: {failed[0].outcome}. --full shows the messages."
        yield from map(with_full_stop, probe.warnings)
        if probe.frontier and (end := probe.frontier[-1].length) < probe.lengths.max * (1 - 1e-9):
            longest = format_length(probe.lengths.max, unit)
            yield (
                f"The frontier ends at {format_length(end, unit)}, but the longest example has {longest}. Leave longer "
                "examples out with --max-length, or give the probe more memory."
            )
        for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
            error = 0.0 if model is None else model.relative_error
            misses = f"The model of {name} misses the trials by {format_percent(error)}"
            idle = "on a machine that does nothing else."
            if name == "step time" and error > WORST_TIME_ERROR:
                yield f"{misses}, so no times are estimated and tables are compared by batches. Probe again {idle}"
            elif error > _POOR_FIT:
                yield f"{misses}: take figures that build on it as rough, and probe again {idle}"

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
    yield from ((name, format_size(size)) for name, size in sizes.items() if size is not None)
    texts = {"driver": device.driver, "torch": device.torch, "allocator": device.allocator, "UUID": device.uuid}
    flags = {"part of a GPU (MIG)": device.mig, "ECC": device.ecc}
    yield from ((name, value_words(value)) for name, value in {**texts, **flags}.items() if value is not None)
    if device.other_processes is not None:
        used = [format_size(p.used_bytes) for p in device.processes or () if p.used_bytes is not None]
        yield "other processes", format_number(device.other_processes) + (f" ({', '.join(used)})" if used else "")


def _check_facts(probe: Probe) -> Iterator[Fact]:
    confirmation, margin = probe.confirmation, probe.margin
    if confirmation is not None:
        shapes, steps = counted(confirmation.shapes, "batch shape"), counted(confirmation.steps, "step")
        workers = "1 process" if confirmation.workers == 1 else f"{confirmation.workers} processes"
        yield "confirmed", f"{shapes} in {steps} in alternation, in {workers}; {confirmation.given_up} given up"
    if margin is not None:
        yield (
            "margin",
            f"{format_size(margin.bytes)}: equal batches differ by up to {format_size(margin.spread_bytes)} in "
            f"{counted(margin.repetitions, 'repetition')}, a process's first step by up to "
            f"{format_size(margin.first_step_bytes)}",
        )


def _frontier_table(probe: Probe) -> Table:
    shown, unit = spread(probe.frontier, _MAX_FRONTIER_POINTS), probe.lengths.unit
    rows = []
    for point in shown:
        closed_by: str = "data, not memory" if point.closed_by == "data" else point.closed_by
        if point.oom_batch_size is not None:
            closed_by += f" at {format_number(point.oom_batch_size)}"
        rows.append(
            {
                "length": format_length(point.length, unit),
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
    return make_table("Frontier: the largest batch, by length", rows, notes)


def trial_log(probe: Probe) -> Table | None:
    """Lay out every trial, in order; None without any."""
    if not probe.trials:
        return None
    shown, unit = spread(probe.trials, _MAX_TRIALS), probe.lengths.unit
    rows = []
    for trial in shown:
        seconds, distance = trial.step_seconds, trial.step_seconds_spread
        either_side = "" if distance is None else f" ± {format_seconds(distance / 2)}"
        rows.append(
            {
                "trial": str(trial.index),
                "batch shape": format_shape(trial.batch_size, trial.length, unit),
                "target length": known(trial.target_length, format_number),
                "outcome": f"{trial.outcome} (in alternation)" if trial.confirmation else trial.outcome,
                "step time": None if seconds is None else f"{format_seconds(seconds)}{either_side}",
                "peak memory": known(trial.peak_bytes, format_size),
                "held": known(trial.reserved_bytes, format_size),
                "took": format_seconds(trial.elapsed_seconds),
                "message": trial.error or ", ".join(trial.throttle_reasons or ()) or UNKNOWN,
            }
        )
    return make_table("Every trial", rows, shown_of(len(shown), len(probe.trials), "", "probe.json"))
