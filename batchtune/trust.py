"""Whether measured figures can be trusted: what else went on at the device, as sentences that end with what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchtune.results import Device, DeviceProcess, Trial
from batchtune.units import counted, format_size

# A process that holds less computes nothing: a CUDA context alone takes more. It is the desktop's or a monitor's.
_IDLE_BYTES = 64 << 20

# Clocks differ by a few steps at any time. Beyond this, two trials did not run on the same machine, so to speak.
_CLOCK_RANGE = 0.1

# The interquartile range of a trial's steps, as a share of their median, and in which share of the trials it is
# too much. One trial in four may be disturbed: the median of many is still good.
_LARGE_SPREAD = 0.15
_DISTURBED_SHARE = 0.25

_PROCESSES_NAMED = 3

# So many processors less than a step's threads would use make its times useless; every machine does a little beside.
_TAKEN_PROCESSORS = 0.25

# A model of step times that misses what it was fitted to by more than this factor, on average, estimates nothing.
WORST_TIME_ERROR = 1.0


def trust_warnings(device: Device, trials: Sequence[Trial]) -> list[str]:
    """Why the figures of a probe may be wrong, each with its remedy; none where nothing was seen.

    Args:
        device: As it was when the probe began, and its limit.
        trials: All that was measured on it.
    """
    return [
        *_about_others(device),
        *_about_memory(device, trials),
        *_about_processors(device, trials),
        *_about_clocks(trials),
        *_about_times(trials),
        *settings_warnings(device.settings),
    ]


def busy_with(processes: Sequence[DeviceProcess] | None) -> str | None:
    """`2 other processes (4711 with 3.2 GiB, 815)`; None where none of them matters."""
    busy = [one for one in processes or () if one.used_bytes is None or one.used_bytes >= _IDLE_BYTES]
    if not busy:
        return None
    busy.sort(key=lambda one: -(one.used_bytes or 0))
    named = [
        f"{one.pid}" if one.used_bytes is None else f"{one.pid} with {format_size(one.used_bytes)}"
        for one in busy[:_PROCESSES_NAMED]
    ]
    if len(busy) > _PROCESSES_NAMED:
        named.append("...")
    return f"{_other_processes(len(busy))} ({', '.join(named)})"


def settings_warnings(settings: Mapping[str, Any]) -> list[str]:
    """Settings that distort what is measured, each with its remedy.

    Args:
        settings: `Device.settings`, or the environment's part of it.
    """
    warnings = []
    if str(settings.get("CUDA_LAUNCH_BLOCKING", "0")) not in ("", "0"):
        warnings.append(
            "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before, and steps take longer than without "
            "it. Unset it for the probe, unless training has it too."
        )
    # torch reads it so: any value at all turns the cache off.
    if settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        warnings.append(
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: the allocator keeps no cache, and both memory and times differ "
            "from training's without it. Unset it."
        )
    if settings.get("cudnn_benchmark") is True:
        warnings.append(
            "torch.backends.cudnn.benchmark is on: cuDNN tries its algorithms anew for every batch shape, and the "
            "first step with each takes time that the estimates leave out. Turn it off, here and in training: batches "
            "of different lengths have many shapes."
        )
    return warnings


def settings_differences(before: Device, now: Device) -> list[str]:
    """What differs between two measurements in settings that decide memory and time, as sentences.

    Args:
        before: The device as it was measured first.
        now: As it was measured later.
    """
    names = (("PyTorch", before.torch, now.torch), ("The driver", before.driver, now.driver))
    changed = [_changed(name, old, new) for name, old, new in names if old != new and None not in (old, new)]
    # One that says less was written by an older batchtune: nothing is known of it.
    if before.settings and now.settings:
        for name in sorted({*before.settings, *now.settings}):
            old, new = before.settings.get(name), now.settings.get(name)
            if old != new:
                changed.append(_changed(name, old, new))
    elif before.allocator != now.allocator:
        changed.append(_changed("The allocator", before.allocator, now.allocator))
    return changed


def _changed(name: str, old: Any, new: Any) -> str:
    return (
        f"{name} was {_worded(old)}, and {_worded(new)} later: memory and times may differ. "
        "Measure both anew with the settings that training has."
    )


def _worded(value: Any) -> str:
    if value is None:
        return "not set"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _about_others(device: Device) -> Iterator[str]:
    if device.kind == "cpu":
        if device.processes:
            yield (
                f"Another probe (process {device.processes[0].pid}) used the CPU when this one began: step times are "
                "not to be trusted; batch sizes are. Wait for it with --wait, and measure again with --force."
            )
        return
    if device.processes is None:
        who = _other_processes(device.other_processes) if device.other_processes else None
    else:
        who = busy_with(device.processes)
    if who is not None:
        yield (
            f"Also on the device: {who}. The limit is what they left, and times may be too long. Stop them and probe "
            "again with --force, or probe another device with --device."
        )


def _about_memory(device: Device, trials: Sequence[Trial]) -> Iterator[str]:
    if device.kind == "cpu":
        if device.free_bytes is not None and device.limit_bytes > device.free_bytes:
            yield (
                f"The limit is {format_size(device.limit_bytes)}, but only {format_size(device.free_bytes)} of memory "
                "were free when the probe began: the system may have swapped, or may end such a process. Give a limit "
                "with --memory that is free."
            )
        return
    outside = [trial.outside_bytes for trial in trials if trial.outside_bytes is not None]
    if not outside or device.free_bytes is None:
        return
    missing = device.limit_bytes + device.reserve_bytes + device.ddp_bytes + max(outside) - device.free_bytes
    if missing > 0 and (device.outside_bytes is None or max(outside) > device.outside_bytes):
        yield (
            f"Memory outside PyTorch's allocator (CUDA's context, the libraries' workspaces) grew to "
            f"{format_size(max(outside))} during the probe: with the limit it is {format_size(missing)} more than the "
            f"device had free. Leave more with --reserve {_at_least(missing + device.reserve_bytes)}, and --force."
        )


def _about_processors(device: Device, trials: Sequence[Trial]) -> Iterator[str]:
    """Where other programs take processors that the steps would use; known on the CPU alone."""
    told = [trial.other_processors for trial in trials if trial.outcome == "ok" and trial.other_processors is not None]
    others = sum(told) / len(told) if told else device.other_processors
    if others is None or device.processors is None or device.processes:  # which are told already
        return
    threads = device.settings.get("threads", device.processors)
    if others + threads > device.processors + _TAKEN_PROCESSORS:
        when = "while steps were timed" if told else "while the workload was built"
        yield (
            f"Other programs took {others:.1f} of {counted(device.processors, 'processor')} {when}: step times are too "
            "long and not to be trusted; batch sizes are. Stop them, and measure again with --force."
        )


def _about_clocks(trials: Sequence[Trial]) -> Iterator[str]:
    timed = [trial for trial in trials if trial.outcome == "ok" and trial.throttle_reasons is not None]
    held_down = [trial for trial in timed if trial.throttle_reasons]
    if held_down:
        reasons = Counter(reason for trial in held_down for reason in trial.throttle_reasons or ())
        named = ", ".join(f"{reason} in {count}" for reason, count in reasons.most_common())
        yield (
            f"The GPU's clock was held down while steps were timed, in {len(held_down)} of "
            f"{counted(len(timed), 'trial')} ({named}): times hold for training only if it is held down alike. See to "
            "its cooling and power limit, or take the times as rough."
        )
    clocks = [trial.sm_clock_mhz for trial in trials if trial.outcome == "ok" and trial.sm_clock_mhz]
    if clocks and max(clocks) - min(clocks) > _CLOCK_RANGE * max(clocks):
        yield (
            f"The GPU's clock varied from {min(clocks):,} to {max(clocks):,} MHz between trials: their times don't "
            "compare well. Lock the clock for the probe (nvidia-smi --lock-gpu-clocks), or take the times as rough."
        )


def _about_times(trials: Sequence[Trial]) -> Iterator[str]:
    # Of steps that take long only one is timed: such a trial counts, but shows no spread.
    timed = [trial for trial in trials if trial.outcome == "ok" and trial.step_seconds]
    large = [trial for trial in timed if (trial.step_seconds_spread or 0.0) > _LARGE_SPREAD * (trial.step_seconds or 0)]
    if len(large) > _DISTURBED_SHARE * len(timed):
        yield (
            f"The times of a trial's steps differ by more than {_LARGE_SPREAD:.0%} of their median in {len(large)} of "
            f"the {counted(len(timed), 'trial')} that passed: take step times as rough. Probe again on a machine that "
            "does nothing else."
        )


def _other_processes(count: int) -> str:
    return f"{count} other process" if count == 1 else f"{count} other processes"


def _at_least(size_bytes: int) -> str:
    """A size for the command line that is not smaller: whole MiB, rounded up."""
    return f"{-(-size_bytes >> 20)}MiB"
