"""The settings of a probe, from the command line to the worker and to `run.json`, and the run that has the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from batchtune.allocators import EXPANDABLE, NATIVE, in_words, setting_for
from batchtune.errors import ResultError, UsageError, shortened
from batchtune.files import redacted_command, redacted_options
from batchtune.lengths import Lengths
from batchtune.probe.devices import DEVICE_FORMS, is_device
from batchtune.probe.devices.law import Coefficients, is_law
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    RUN_FILES,
    TRIALS_FILE,
    Device,
    Positive,
    ProbedWith,
    Run,
    Trial,
    WorkloadRecord,
    meta_of,
    read_result,
    write_result,
)
from batchtune.run_folder import (
    ANOTHER,
    clear_run,
    knows_anything,
    other_lengths,
    read_trials,
)
from batchtune.units import counted, format_size

# Recorded where several ranks are probed, or simulated; and trials hold whatever the largest budget is.
_RECORDED_IF_GIVEN = ("nproc_per_node", "nnodes", "simulate_world_size", "max_tokens")
_RECORDED = [
    name for name in ProbedWith.__struct_fields__ if name not in _RECORDED_IF_GIVEN
]


class ProbeSettings(ProbedWith, frozen=True, kw_only=True):
    """The workload, the device, and how closely to measure; `results.checked` checks the types and ranges.

    Raises UsageError for values that do not go together.

    Attributes:
        workload: `builtin:NAME`, `path/to/file.py:NAME` or `package.module:NAME`; with a command, the command as text.
        command: Words of a training script's command, which runs unchanged; None for a workload.
        scratch: Folder for what a script writes; None: a temporary one; `none`: it writes to the user's files.
        force: Whether to go on although a script's own batches and made ones differ in memory.
        minutes: Time limit, the confirmation included: the probe ends with the sizes proven by then. None: no limit.
        wait_seconds: How long to wait for another probe of the device to end; may be infinite.
    """

    workload: str
    options: dict[str, Any]
    command: list[str] | None = None
    scratch: str | None = None
    force: bool = False
    device: str = "auto"
    trial_timeout_seconds: Positive = 300.0
    setup_timeout_seconds: Positive = 600.0
    wait_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    minutes: Positive | None = None

    def __post_init__(self) -> None:
        if is_law(self.device):
            self._check_law()
        elif not is_device(self.device):
            raise UsageError(
                f"unknown device {shortened(self.device)}",
                f"Use --device {DEVICE_FORMS}.",
            )
        if self.max_lengths is not None and self.max_lengths < self.num_lengths:
            raise UsageError(
                f"--max-lengths must be no less than the {self.num_lengths} of --num-lengths, got {self.max_lengths}"
            )
        if self.has_ranks or self.simulate_world_size is not None:
            self._check_ranks()

    @property
    def has_ranks(self) -> bool:
        """Whether torchrun starts what is measured, in a process group: even a single rank is in one then."""
        return self.nproc_per_node is not None

    def _check_law(self) -> None:
        """Raise UsageError for a wrong coefficient, and for what runs whatever the device is."""
        Coefficients.parse(self.device)
        if self.command is not None:
            raise UsageError(
                "--device law:… computes what a step takes, but a training script is given",
                "Leave out one of them.",
            )
        if self.has_ranks or self.simulate_world_size is not None:
            raise UsageError("--device law:… has no ranks", "Leave out their number.")

    def _check_ranks(self) -> None:
        """Raise UsageError for what does not go together with ranks, be they real or simulated."""
        flag = f"--nproc-per-node {self.nproc_per_node}"
        if self.simulate_world_size is not None:
            flag = f"--simulate-world-size {self.simulate_world_size}"
            if self.has_ranks:
                raise UsageError(
                    f"{flag} has one process stand for all ranks, but --nproc-per-node starts them",
                    "Give one of them.",
                )
        if self.command is not None:
            raise UsageError(
                f"{flag} is for a workload, but a training script is measured",
                "A script's own command says how many ranks it has: -- torchrun --nproc-per-node 2 train.py. A model "
                "that its framework trains has one.",
            )
        if self.ddp:
            raise UsageError(
                f"--ddp keeps room for gradient buckets, but with {flag} all of them are really allocated",
                "Leave out --ddp.",
            )
        if self.has_ranks and ":" in self.device:
            raise UsageError(
                f"--device {self.device} names one device, but each rank has its own: that of its local rank",
                "Give --device cuda, and choose the GPUs with CUDA_VISIBLE_DEVICES=2,3.",
            )

    @property
    def subject(self) -> WorkloadRecord:
        """What is measured, as files record it: without secrets."""
        return WorkloadRecord(
            spec=self.workload,
            options=redacted_options(self.options),
            command=self.command and redacted_command(self.command),
        )

    @property
    def failures_are_dear(self) -> bool:
        """Whether a failed trial costs a start of the user's script, or of all ranks, which takes longer than some."""
        return self.command is not None or self.has_ranks

    def recorded(self) -> dict[str, Any]:
        """Return the settings that trials depend on, as `run.json` and `probe.json` carry them."""
        return {
            name: getattr(self, name)
            for name in ProbedWith.__struct_fields__
            if name in _RECORDED or getattr(self, name) is not None
        }


def _ranks(recorded: Mapping[str, Any]) -> str:
    """Say which ranks the settings of a run start or simulate."""
    if recorded.get("nproc_per_node") is not None:
        words = f"{counted(recorded['nproc_per_node'], 'rank')} a machine"
        nnodes = recorded.get("nnodes") or 1
        return words if nnodes == 1 else f"{words} on {nnodes} machines"
    if recorded.get("simulate_world_size") is not None:
        return f"{counted(recorded['simulate_world_size'], 'rank')} (simulated)"
    return "a process without ranks"


def refuse_other_allocator(what: str, measured: str | None, device: Device) -> None:
    """Raise ResultError if the device runs with another allocator than the one that `what` was measured with."""
    if measured is None or measured == device.allocator:
        return
    remedy = setting_for(measured, device.torch, os.environ)
    if measured in (NATIVE, EXPANDABLE):
        remedy = f"--allocator {measured}"
    raise ResultError(
        f"{what} was measured {in_words(measured)}, but this runs {in_words(device.allocator)}: what fits with one may "
        "not fit with the other",
        f"Go on with {remedy}, or measure again, in another folder with --run or with --force.",
    )


def workload_sha256(settings: ProbeSettings) -> str | None:
    """Return the hash of the workload's file, or of the first Python file in a command; None without one."""
    return file_sha256(settings.command or [settings.workload.rpartition(":")[0]])


def file_sha256(names: list[str]) -> str | None:
    """Return the hash of the first of these that names a Python file; None without one."""
    for path in map(Path, names):
        if path.suffix == ".py" and path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def begin_run(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    device: Device,
    *,
    force: bool,
) -> Run:
    """Write `run.json` of a new run, and return it; what the folder held goes, with `force` all of it.

    Call this only once the device is open and the workload built: a failure there must not cost an
    earlier run. Without `force` the folder may hold a run in which nothing passed.
    """
    clear_run(folder, RUN_FILES if force else (TRIALS_FILE,))
    run = Run(
        meta=meta_of(Run),
        lengths=lengths.summary(),
        workload=settings.subject,
        device=device,
        settings=settings.recorded(),
        workload_sha256=workload_sha256(settings),
    )
    write_result(folder / RUN_FILE, run)
    return run


def open_run(
    lengths: Lengths,
    settings: ProbeSettings,
    folder: Path,
    on_note: Callable[[str], None] | None = None,
) -> tuple[Run | None, list[Trial]]:
    """Return the run that the folder holds, if it can be continued, and its trials; `on_note` as for `read_trials`.

    A run in which nothing passed is only continued if it is the same: another one takes its place, and its own errors
    (a workload that is not there) come first.

    Raises ResultError if it is of other lengths, another workload or other settings, or if files are damaged.
    """
    path = folder / TRIALS_FILE
    if not (folder / RUN_FILE).exists():
        if path.exists() or (folder / PROBE_FILE).exists():
            raise ResultError(
                f"{folder} holds a probe, but no {RUN_FILE} that says of what", ANOTHER
            )
        return None, read_trials(path)  # a link is refused
    run = read_result(folder / RUN_FILE, Run)
    differences = []
    if run.lengths.fingerprint != lengths.fingerprint:
        differences.append(other_lengths(lengths, run.lengths))
    if run.workload != settings.subject:
        differences.append(f"the workload {run.workload.words}")
    for name in _RECORDED:
        value = getattr(settings, name)
        before = run.settings.get(name)
        # Trials hold, however many of them there are; and whatever led to the allocator that they were run with.
        if name in ("max_lengths", "allocator") or before == value:
            continue
        if name.endswith("_bytes"):
            before, value = (size and format_size(size) for size in (before, value))
        differences.append(f"{name} = {before}, now {value}")
    if settings.allocator not in ("auto", run.device.allocator or settings.allocator):
        differences.append(
            f"allocator = {run.device.allocator}, now {settings.allocator}"
        )
    ranks = _ranks(settings.recorded())
    if _ranks(run.settings) != ranks:
        differences.append(f"{_ranks(run.settings)}, now {ranks}")
    if differences and not knows_anything(folder):
        return None, []
    if differences:
        raise ResultError(
            f"{folder} holds a run of something else: {'; '.join(differences)}", ANOTHER
        )
    trials = read_trials(path, on_note)
    for trial in trials:
        if trial.length < lengths.shortest or (trial.target_length is None) != (
            not lengths.has_targets
        ):
            raise ResultError(
                f"{path}, line {trial.index + 1}: not a trial of these lengths: length "
                f"{trial.length:g}, target length {trial.target_length}",
                ANOTHER,
            )
    return run, trials
