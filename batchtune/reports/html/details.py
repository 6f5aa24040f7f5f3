"""What a reader looks up rather than reads: the environment and every trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchtune.reports.html.figure import thinned
from batchtune.reports.page import clean
from batchtune.reports.run import RunResults
from batchtune.reports.table import TIMES, UNKNOWN, Column, Table
from batchtune.results import Confirmation, Device, Margin, Probe, Trial
from batchtune.units import counted, format_length, format_number, format_seconds, format_size

# Enough for any search; the page's size is bounded by it.
_MOST_TRIALS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A titled list of names and values, all clean."""

    title: str
    facts: tuple[tuple[str, str], ...]


def environment(results: RunResults) -> list[Facts]:
    """The device, the settings of each step, and what wrote the files."""
    probe, sweep, verification = results.probe, results.sweep, results.verification
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    if probe is not None:
        groups.append(("Device", list(_device_facts(probe.device))))
        groups.append(("Settings of the device", _settings(probe.device.settings)))
        groups.append(("Workload", [("spec", probe.workload.spec), *_settings(probe.workload.options)]))
        groups.append(
            (
                "Probe",
                [*_settings(probe.settings), *_confirmation_facts(probe.confirmation), *_margin_facts(probe.margin)],
            )
        )
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
    return [
        Facts(title=title, facts=tuple((clean(name), clean(value)) for name, value in facts))
        for title, facts in groups
        if facts
    ]


def trial_log(probe: Probe) -> Table | None:
    """Every trial, in order; None where there is none."""
    if not probe.trials:
        return None
    shown = thinned(probe.trials, most=_MOST_TRIALS)
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
    left_out = f"{len(shown)} of {len(probe.trials)} shown; all are in probe.json."
    return Table(
        title="Every trial",
        columns=tuple(columns),
        rows=tuple(
            tuple(clean(cell) for cell in _trial_row(trial, probe.lengths.unit, has_targets)) for trial in shown
        ),
        notes=(left_out,) if len(shown) < len(probe.trials) else (),
    )


def _trial_row(trial: Trial, unit: str | None, has_targets: bool) -> Iterator[str]:
    yield str(trial.index)
    yield f"{format_number(trial.batch_size)} {TIMES} {format_length(trial.length, unit)}"
    if has_targets:
        yield UNKNOWN if trial.target_length is None else format_number(trial.target_length)
    yield f"{trial.outcome} (in alternation)" if trial.confirmation else trial.outcome
    if trial.step_seconds is None:
        yield UNKNOWN
    else:
        spread = "" if trial.step_seconds_spread is None else f" ± {format_seconds(trial.step_seconds_spread / 2)}"
        yield format_seconds(trial.step_seconds) + spread
    yield UNKNOWN if trial.peak_bytes is None else format_size(trial.peak_bytes)
    yield UNKNOWN if trial.reserved_bytes is None else format_size(trial.reserved_bytes)
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
