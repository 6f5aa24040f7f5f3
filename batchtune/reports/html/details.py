"""What a reader looks up rather than reads: the environment and every trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.reports.page import Facts, clean_facts, clean_table
from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, Column, Table, cell, format_shape, shown_of, spread
from batchtune.results import Confirmation, Device, Margin, Probe, Trial
from batchtune.units import counted, format_number, format_seconds, format_size

# Enough for any search; the page's size is bounded by it.
_MOST_TRIALS = 1000


def environment(results: RunResults) -> list[tuple[str, Facts]]:
    """Return lists of names and values, each with its title: the device, the settings, what wrote the files."""
    probe, sweep, verification = results.probe, results.sweep, results.verification
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    if probe is not None:
        groups.append(("Device", list(_device_facts(probe.device))))
        groups.append(("Settings of the device", _settings(probe.device.settings)))
        groups.append(("Workload", [("spec", probe.workload.spec), *_settings(probe.workload.options)]))
        checks = [*_confirmation_facts(probe.confirmation), *_margin_facts(probe.margin)]
        groups.append(("Probe", _settings(probe.settings) + checks))
    if sweep is not None:
        groups.append(("Sweep", _settings(sweep.settings)))
        if sweep.current_settings is not None:
            groups.append(("Current settings", _settings(sweep.current_settings)))
    if verification is not None:
        groups.append(("Verification", _settings(verification.settings)))
    files = [("data fingerprint", results.lengths.fingerprint)]
    files += [
        (name, f"batchtune {result.meta.batchtune}")
        for name, result in (("probe.json", probe), ("sweep.json", sweep), ("verify.json", verification))
        if result is not None
    ]
    groups.append(("Files", files))
    return [(title, clean_facts(facts)) for title, facts in groups if facts]


def trial_log(probe: Probe) -> Table | None:
    """Return every trial, in order; None where there is none."""
    if not probe.trials:
        return None
    shown = spread(probe.trials, _MOST_TRIALS)
    has_targets = any(trial.target_length is not None for trial in shown)
    columns = [
        Column("trial"),
        Column("batch shape", numeric=False),
        *([Column("target length")] if has_targets else []),
        Column("outcome", numeric=False),
        Column("step time"),
        Column("peak memory"),
        Column("held"),
        Column("took"),
        Column("message", numeric=False, wraps=True),
    ]
    rows = tuple(tuple(_trial_row(trial, probe.lengths.unit, has_targets)) for trial in shown)
    notes = shown_of(len(shown), len(probe.trials), "", "probe.json")
    return clean_table(Table(title="Every trial", columns=tuple(columns), rows=rows, notes=notes))


def _trial_row(trial: Trial, unit: str | None, has_targets: bool) -> Iterator[str]:
    yield str(trial.index)
    yield format_shape(trial.batch_size, trial.length, unit)
    if has_targets:
        yield cell(trial.target_length, format_number)
    yield f"{trial.outcome} (in alternation)" if trial.confirmation else trial.outcome
    known = trial.step_seconds is not None and trial.step_seconds_spread is not None
    either_side = f" ± {format_seconds((trial.step_seconds_spread or 0) / 2)}" if known else ""
    yield cell(trial.step_seconds, format_seconds) + either_side
    yield cell(trial.peak_bytes, format_size)
    yield cell(trial.reserved_bytes, format_size)
    yield format_seconds(trial.elapsed_seconds)
    yield trial.error or ", ".join(trial.throttle_reasons or ()) or UNKNOWN


def _device_facts(device: Device) -> Iterator[tuple[str, str]]:
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
    yield from ((name, text) for name, text in texts.items() if text is not None)
    for name, is_so in (("part of a GPU (MIG)", device.mig), ("ECC", device.ecc)):
        if is_so is not None:
            yield name, "yes" if is_so else "no"
    if device.other_processes is not None:
        used = [format_size(p.used_bytes) for p in device.processes or () if p.used_bytes is not None]
        yield "other processes", format_number(device.other_processes) + (f" ({', '.join(used)})" if used else "")


def _confirmation_facts(confirmation: Confirmation | None) -> Iterator[tuple[str, str]]:
    if confirmation is not None:
        shapes, steps = counted(confirmation.shapes, "batch shape"), counted(confirmation.steps, "step")
        workers = "1 process" if confirmation.workers == 1 else f"{confirmation.workers} processes"
        yield "confirmed", f"{shapes} in {steps} in alternation, in {workers}; {confirmation.given_up} given up"


def _margin_facts(margin: Margin | None) -> Iterator[tuple[str, str]]:
    if margin is not None:
        yield (
            "margin",
            f"{format_size(margin.bytes)}: equal batches differ by up to {format_size(margin.spread_bytes)} in "
            f"{counted(margin.repetitions, 'repetition')}, a process's first step by up to "
            f"{format_size(margin.first_step_bytes)}",
        )


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _value(value)) for name, value in settings.items()]


def _value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    return str(value)
