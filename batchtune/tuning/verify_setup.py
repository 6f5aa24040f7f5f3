"""What a verification runs on: what was probed, but for what the user says. No file may name code that is run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchtune.errors import ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import PROBE_FILE, RUN_FILE, LengthsSummary, Probe, ProbedWith, Run, WorkloadRecord, read_result
from batchtune.tuning.run_folder import other_lengths, workload_sha256
from batchtune.units import format_length, format_size
from batchtune.workloads import is_builtin, with_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user says of the workload; None: as it was probed.

    Attributes:
        workload, options: As in `ProbeSettings`. Where they are not given, only a built-in is taken from the record.
        device, memory_bytes, memory_fraction, reserve_bytes, ddp: As in `ProbeSettings`.
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
    """Return what was probed, but for what the user wants else.

    Raises:
        UsageError: The user has to name the workload or its options, or a value is out of range.
    """
    before = _probed(probe) if probe else None
    workload = _workload(before, wanted, folder)
    settings = _settings(lengths, before, wanted, workload)
    if probe is None or before is None:
        return Subject(settings=settings, limit_bytes=None, notes=())
    same_limit = all(
        getattr(settings, name) == getattr(before, name)
        for name in ("memory_bytes", "memory_fraction", "reserve_bytes", "ddp")
    )
    limit = probe.device.limit_bytes if same_limit else None
    return Subject(settings=settings, limit_bytes=limit, notes=tuple(_notes(probe, settings, limit, folder)))


def _probed(probe: Probe) -> ProbeSettings:
    """Return the settings that the probe was run with; what an older one does not say is as it was then."""
    recorded = msgspec.convert(probe.settings, ProbedWith)
    return ProbeSettings(
        workload=probe.workload.spec, options=probe.workload.options, **msgspec.structs.asdict(recorded)
    )


def _workload(before: ProbeSettings | None, wanted: Wanted, folder: Path) -> WorkloadRecord:
    """Return the workload to run, named by the user; a built-in and its options may come from the record.

    Anything else in the record could be made to run any code, and so could options of it, such as a file to load.

    Raises:
        UsageError: The user has to name the workload, or the options that it was probed with.
    """
    spec = wanted.workload
    if spec is None:
        if before is None:
            raise UsageError(
                f"which training step to verify is not known: {folder} holds no {PROBE_FILE}",
                "Name it with --workload, such as --workload train.py:MyStep: the one that you will train.",
            )
        spec = before.workload
        if not is_builtin(spec):
            raise UsageError(
                f"{folder / PROBE_FILE} says that {shlex.quote(spec)} was probed, and batchtune runs no code that "
                "only a file names",
                "If that is your training step, name it yourself: "
                f"--workload {shlex.quote(spec)}{_as_flags(wanted.options or before.options)}",
            )
    if wanted.options is not None:
        return WorkloadRecord(spec=spec, options=wanted.options)
    if before is None or spec != before.workload or not before.options:
        return WorkloadRecord(spec=spec, options={})
    if not is_builtin(spec):
        raise UsageError(
            f"{folder / PROBE_FILE} says that {spec} was probed with options, and batchtune passes none to your code "
            "that only a file names",
            f"Name them yourself:{_as_flags(before.options)}",
        )
    return WorkloadRecord(spec=spec, options=before.options)


def _as_flags(options: Mapping[str, Any]) -> str:
    """Return options as they are given on the command line, quoted for the shell: ` --set layers=12`."""
    return "".join(f" --set {shlex.quote(f'{key}={_word(value)}')}" for key, value in options.items())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def _settings(
    lengths: Lengths, before: ProbeSettings | None, wanted: Wanted, workload: WorkloadRecord
) -> ProbeSettings:
    options = with_unit(workload.spec, workload.options, lengths.unit)
    asked = before or ProbeSettings(workload=workload.spec, options={})
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
    return msgspec.structs.replace(asked, workload=workload.spec, options=options, **changes)


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
