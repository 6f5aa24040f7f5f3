"""What a reader looks up rather than reads: the environment and every trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.reports.page import Fact, clean_facts
from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, Column, Table, cell, format_shape, make_table, shown_of, spread
from batchtune.results import Device, Probe
from batchtune.units import counted, format_number, format_seconds, format_size

# Enough for any search; the page's size is bounded by it.
_MOST_TRIALS = 1000


def environment(results: RunResults) -> list[tuple[str, tuple[Fact, ...]]]:
    """Return lists of names and values, each with its title: the device, the settings, what wrote the files."""
    probe, sweep, verification = results.probe, results.sweep, results.verification
    groups: dict[str, list[Fact]] = {}
    files = {"data fingerprint": results.lengths.fingerprint}
    if probe is not None:
        groups["Device"] = list(_device_facts(probe.device))
        groups["Settings of the device"] = _settings(probe.device.settings)
        groups["Workload"] = [("spec", probe.workload.spec), *_settings(probe.workload.options)]
        groups["Probe"] = [*_settings(probe.settings), *_check_facts(probe)]
        files["probe.json"] = f"batchtune {probe.meta.batchtune}"
    if sweep is not None:
        groups["Sweep"] = _settings(sweep.settings)
        groups["Current settings"] = _settings(sweep.current_settings or {})
        files["sweep.json"] = f"batchtune {sweep.meta.batchtune}"
    if verification is not None:
        groups["Verification"] = _settings(verification.settings)
        files["verify.json"] = f"batchtune {verification.meta.batchtune}"
    groups["Files"] = list(files.items())
    return [(title, clean_facts(facts)) for title, facts in groups.items() if facts]


def trial_log(probe: Probe) -> Table | None:
    """Return every trial, in order; None without any."""
    if not probe.trials:
        return None
    shown, unit = spread(probe.trials, _MOST_TRIALS), probe.lengths.unit
    has_targets = any(trial.target_length is not None for trial in shown)
    columns = (
        Column("trial"),
        Column("batch shape", numeric=False),
        Column("target length") if has_targets else None,
        Column("outcome", numeric=False),
        Column("step time"),
        Column("peak memory"),
        Column("held"),
        Column("took"),
        Column("message", numeric=False, wraps=True),
    )
    rows = []
    for trial in shown:
        seconds, distance = trial.step_seconds, trial.step_seconds_spread
        either_side = f" ± {format_seconds(distance / 2)}" if seconds is not None and distance is not None else ""
        rows.append(
            (
                str(trial.index),
                format_shape(trial.batch_size, trial.length, unit),
                cell(trial.target_length, format_number),
                f"{trial.outcome} (in alternation)" if trial.confirmation else trial.outcome,
                cell(seconds, format_seconds) + either_side,
                cell(trial.peak_bytes, format_size),
                cell(trial.reserved_bytes, format_size),
                format_seconds(trial.elapsed_seconds),
                trial.error or ", ".join(trial.throttle_reasons or ()) or UNKNOWN,
            )
        )
    return make_table("Every trial", columns, rows, shown_of(len(shown), len(probe.trials), "", "probe.json"))


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
    yield from ((name, _value(value)) for name, value in {**texts, **flags}.items() if value is not None)
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


def _settings(settings: Mapping[str, Any]) -> list[Fact]:
    return [(name, _value(value)) for name, value in settings.items()]


def _value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)
