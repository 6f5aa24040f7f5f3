"""Reasons not to trust measured figures: other programs, settings and clocks; sentences that end with what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchtune.results import Device, DeviceProcess, Trial
from batchtune.units import counted, format_size, with_full_stop

# A process that holds less computes nothing, as a CUDA context alone takes more: a desktop or a monitor.
_CONTEXT_BYTES = 64 << 20
_LARGE_SPREAD = 0.15  # of the times of a trial's steps: interquartile range / median

WORST_TIME_ERROR = 1.0
"""A model of step times with a larger mean relative error estimates nothing."""
WORST_COMPARED_ERROR = 0.3
"""Times with a larger error say nothing about which batches are faster."""
WITHOUT_COMMUNICATION = (
    "Ranks were simulated by one process. Step times are without communication, so training takes longer. Measure them "
    "on real ranks with --nproc-per-node."
)


def trust_warnings(device: Device, trials: Sequence[Trial]) -> list[str]:
    """Return why the figures of a probe may be wrong, each with its remedy; `device` is as it was when it began."""
    warnings = list(_about_memory(device, trials))
    warnings += rough_times(device, trials)
    if device.simulated:
        warnings.append(WITHOUT_COMMUNICATION)
    if device.allocator_problem is not None:
        problem = with_full_stop(
            f"Memory was taken natively, as {device.allocator_problem}"
        )
        warnings.append(f"{problem} --allocator native does so without this warning.")
    return [*warnings, *recompile_warnings(trials), *settings_warnings(device.settings)]


def rough_times(device: Device, trials: Sequence[Trial]) -> list[str]:
    """Return why the measured step times are only rough: other programs, a slower clock or times that scatter."""
    passed = [trial for trial in trials if trial.outcome == "ok"]
    about = _about_gpu_times(device, passed)
    if device.processors is not None:
        about = _about_cpu_times(device, passed)
    return [*about, *_scatter(passed)]


def _scatter(passed: Sequence[Trial]) -> Iterator[str]:
    """Yield that the times of steps scatter, if they do in so many trials that the median of all is useless."""
    timed = [trial for trial in passed if trial.step_seconds]
    # If steps take long, only one is timed: such a trial counts, but shows no spread.
    scattered = sum(
        (trial.step_seconds_spread or 0.0) > _LARGE_SPREAD * (trial.step_seconds or 0.0)
        for trial in timed
    )
    if scattered > 0.25 * len(timed):
        yield (
            f"The times of a trial's steps differ by more than {_LARGE_SPREAD:.0%} of their median in {scattered} of "
            f"the {counted(len(timed), 'trial')} that passed: treat step times as rough. Probe again on a machine that "
            "does nothing else."
        )


def recompile_warnings(trials: Sequence[Trial]) -> list[str]:
    """Return that torch.compile gave up, if it did in some of these trials or steps."""
    uncompiled = sum(trial.at_recompile_limit for trial in trials)
    if not uncompiled:
        return []
    return [
        "torch.compile reached its recompile limit (torch._dynamo.config.recompile_limit): from then on, in "
        f"{uncompiled} of the {len(trials)} measurements, new batch shapes ran uncompiled, which takes more time and "
        "memory. Training meets it too. Compile with dynamic=True, or mark the dimensions that differ with "
        "torch._dynamo.mark_dynamic."
    ]


def busy_with(processes: Sequence[DeviceProcess] | None) -> str | None:
    """Return `2 other processes (4711 with 3.2 GiB, 815)`; None if none of them matters."""
    named = []
    for process in processes or ():
        if process.used_bytes is None:
            named.append(f"{process.pid}")
        elif process.used_bytes >= _CONTEXT_BYTES:
            named.append(f"{process.pid} with {format_size(process.used_bytes)}")
    return (
        f"{counted(len(named), 'other process')} ({', '.join(named)})"
        if named
        else None
    )


def settings_warnings(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings (of `Device.settings`) that distort measurements, each with its remedy."""
    warnings = []
    if str(settings.get("CUDA_LAUNCH_BLOCKING", "0")) not in ("", "0"):
        warnings.append(
            "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before, so steps take longer. Unset it for "
            "the probe, unless training has it too."
        )
    # For torch, any value at all turns the cache off.
    if settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        warnings.append(
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: PyTorch's allocator is off, and with it the memory limit. No probe "
            "on a GPU runs with it: unset it."
        )
    if settings.get("cudnn_benchmark") is True:
        warnings.append(
            "torch.backends.cudnn.benchmark is on: cuDNN tries its algorithms again for every batch shape, and the "
            "first step with each takes time that the estimates leave out. Turn it off, here and in training: batches "
            "of different lengths have many shapes."
        )
    return warnings


def settings_differences(before: Device, now: Device) -> list[str]:
    """Return the differences between two measurements in settings that affect memory and time, as sentences."""
    names = sorted({*before.settings, *now.settings})
    values = {
        name: (before.settings.get(name, "not set"), now.settings.get(name, "not set"))
        for name in names
    }
    if before.torch and now.torch:
        values["PyTorch"] = (before.torch, now.torch)
    if before.driver and now.driver:
        values["The driver"] = (before.driver, now.driver)
    values["The allocator's settings"] = (
        before.allocator_settings or "not set",
        now.allocator_settings or "not set",
    )
    return [
        f"{name} was {old}, and {new} later: memory and times may differ. Measure both again with the settings of your "
        "training."
        for name, (old, new) in values.items()
        if old != new
    ]


def _about_memory(device: Device, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield that less memory was left than the limit."""
    if device.free_bytes is None:
        return
    if device.processors is not None:
        if device.limit_bytes > device.free_bytes:
            yield (
                f"The limit is {format_size(device.limit_bytes)}, but only {format_size(device.free_bytes)} of memory "
                "were free when the probe began: the system may have swapped, or may kill such a process. Give a limit "
                "with --memory that is free."
            )
        return
    outside = max(
        (trial.outside_bytes for trial in trials if trial.outside_bytes is not None),
        default=None,
    )
    if outside is None:
        return
    missing = (
        device.limit_bytes
        + device.reserve_bytes
        + device.ddp_bytes
        + outside
        - device.free_bytes
    )
    if missing > 0 and (device.outside_bytes is None or outside > device.outside_bytes):
        reserve_mib = -(-(missing + device.reserve_bytes) >> 20)  # rounded up
        yield (
            f"Memory outside PyTorch's allocator (CUDA's context, the libraries' workspaces) grew to "
            f"{format_size(outside)} during the probe: with the limit it is {format_size(missing)} more than the "
            f"device had free. Leave more with --reserve {reserve_mib}MiB, and --force."
        )


def _about_cpu_times(device: Device, passed: Sequence[Trial]) -> Iterator[str]:
    """Yield that other programs computed on the same processors."""
    if device.processes:
        yield (
            f"Another probe (process {device.processes[0].pid}) used the CPU when this one began: don't trust the step "
            "times; the batch sizes are right. Wait for it with --wait, and measure again with --force."
        )
        return
    seen = [
        trial.other_processors for trial in passed if trial.other_processors is not None
    ]
    others = sum(seen) / len(seen) if seen else device.other_processors
    if others is None:
        return
    processors = device.processors or 0
    # Every machine does a little else.
    if others + device.settings.get("threads", processors) > processors + 0.25:
        when = "while steps were timed" if seen else "while the workload was built"
        yield (
            f"Other programs took {others:.1f} of {counted(processors, 'processor')} {when}: the step times are too "
            "long; the batch sizes are right. Stop them, and measure again with --force."
        )


def _about_gpu_times(device: Device, passed: Sequence[Trial]) -> Iterator[str]:
    """Yield that other programs used the device, or that its clock was held down."""
    who = busy_with(device.processes)
    if device.processes is None and device.other_processes:
        who = counted(device.other_processes, "other process")
    if who is not None:
        yield (
            f"Also on the device: {who}. The limit is what they left free, and times may be too long. Stop them and "
            "probe again with --force, or probe another device with --device."
        )
    reasons: Counter[str] = Counter()
    for trial in passed:
        reasons.update(trial.throttle_reasons or ())
    if reasons:
        named = ", ".join(
            f"{reason} in {count}" for reason, count in reasons.most_common()
        )
        yield (
            f"The GPU's clock was held down while steps were timed ({named} of {counted(len(passed), 'trial')}): the "
            "times hold only for training that is held down too. Check its cooling and power limit, or treat the times "
            "as rough."
        )
