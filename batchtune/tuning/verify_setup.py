"""What a verification runs on: the run's own workload, device and memory, but for what the user says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.results import RUN_FILE, LengthsSummary, Probe, Run, WorkloadRecord, read_result
from batchtune.tuning.probe_settings import ProbeSettings
from batchtune.tuning.run_folder import other_lengths, workload_sha256
from batchtune.units import format_length, format_size
from batchtune.workloads import default_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user says of the workload; None: as it was probed.

    Attributes:
        workload, options, device, memory_bytes, memory_fraction, reserve_bytes, ddp: As in `ProbeSettings`.
        setup_timeout_seconds, wait_seconds: As there; None: as there by default.
    """

    workload: str | None = None
    options: dict[str, Any] | None = None
    device: str | None = None
    memory_bytes: int | None = None
    memory_fraction: float | None = None
    reserve_bytes: int | None = None
    ddp: bool | None = None
    setup_timeout_seconds: float | None = None
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is verified, and where.

    Attributes:
        settings: The training step, its device and memory.
        limit_bytes: The limit that was probed; None where it must be worked out from the settings.
        notes: Where this is not what was probed, as sentences.
    """

    settings: ProbeSettings
    limit_bytes: int | None
    notes: tuple[str, ...]


def check_lengths(lengths: Lengths, fingerprint: str, source: Path, theirs: LengthsSummary | None = None) -> None:
    """Raises ResultError where a result is of other lengths than these."""
    if fingerprint == lengths.fingerprint:
        return
    anew = "tune anew for these lengths in another folder with --run."
    if theirs is not None and theirs.fingerprint == fingerprint:
        other = other_lengths(lengths, theirs)
        same = other.remedy or "Give the same manifest with the same options. "
        raise ResultError(f"{source} is of {other.what}", f"{same}Or {anew}")
    raise ResultError(
        f"{source} is of other lengths than these ({lengths.count:,} up to "
        f"{format_length(lengths.longest, lengths.unit)})",
        "Give the same manifest with the same options (--length-key, --target-key, --length-scale, --min-length, "
        f"--max-length), or {anew}",
    )


def subject_of(lengths: Lengths, probe: Probe | None, wanted: Wanted, folder: Path) -> Subject:
    """The run's own workload, device and limit, but for what the user wants else.

    Raises:
        UsageError: No workload is known, or a value is out of range.
    """
    before = _probed(probe) if probe else None
    settings = _settings(lengths, before, wanted)
    if probe is None or before is None:
        return Subject(settings=settings, limit_bytes=None, notes=())
    same_limit = all(
        getattr(settings, name) == getattr(before, name)
        for name in ("memory_bytes", "memory_fraction", "reserve_bytes", "ddp")
    )
    limit = probe.device.limit_bytes if same_limit else None
    return Subject(settings=settings, limit_bytes=limit, notes=tuple(_notes(probe, settings, limit, folder)))


def _probed(probe: Probe) -> ProbeSettings:
    """The settings that the probe was run with; what an older one does not say is as it was then."""
    known = ("device", "memory_bytes", "memory_fraction", "seed", "reserve_bytes", "ddp")
    recorded = {name: probe.settings[name] for name in known if name in probe.settings}
    return ProbeSettings(workload=probe.workload.spec, options=probe.workload.options, **recorded)


def _settings(lengths: Lengths, before: ProbeSettings | None, wanted: Wanted) -> ProbeSettings:
    workload = wanted.workload or (before.workload if before else default_workload(lengths.unit))
    if workload is None:
        raise UsageError(
            "which training step to run is not known: the run folder holds no probe, and the lengths have no unit",
            "Name it with --workload.",
        )
    options = wanted.options
    if options is None:
        options = before.options if before and before.workload == workload else {}
    if workload == "builtin:conformer-ctc" and lengths.unit is not None:
        options = {"unit": lengths.unit, **options}
    settings = replace(before or ProbeSettings(workload=workload, options={}), workload=workload, options=options)
    changes = {
        name: value
        for name in (
            "device",
            "memory_bytes",
            "memory_fraction",
            "reserve_bytes",
            "ddp",
            "setup_timeout_seconds",
            "wait_seconds",
        )
        if (value := getattr(wanted, name)) is not None
    }
    return replace(settings, **changes)


def _notes(probe: Probe, settings: ProbeSettings, limit_bytes: int | None, folder: Path) -> Iterator[str]:
    now = WorkloadRecord(spec=settings.workload, options=settings.options)
    if now != probe.workload:
        yield (
            f"Warning: this verifies the workload {_described(now)}, but {_described(probe.workload)} was probed: "
            "batch sizes and times are the other's. Probe anew with --force where it is the one you train."
        )
    elif (folder / RUN_FILE).exists():
        was = read_result(folder / RUN_FILE, Run).workload_sha256
        now_is = workload_sha256(settings)
        if was is not None and now_is is None:
            yield (
                f"Warning: {settings.workload.rpartition(':')[0]} is not here. Run this in the folder in which the "
                "probe was run, or name the workload with --workload."
            )
        elif was != now_is:
            yield (
                f"Warning: {settings.workload.rpartition(':')[0]} has changed since it was probed. "
                "Where it does not hold, probe anew with --force."
            )
    if limit_bytes is None:
        yield (
            f"Warning: other memory was asked for than was probed (a limit of "
            f"{format_size(probe.device.limit_bytes)}): what is verified is that the batches fit into this."
        )


def _described(workload: WorkloadRecord) -> str:
    options = ", ".join(f"{key}={value}" for key, value in workload.options.items())
    return f"{workload.spec} ({options})" if options else workload.spec
