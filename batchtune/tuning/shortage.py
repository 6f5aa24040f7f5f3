"""What the user is told where even one example does not fit."""

from __future__ import annotations

from batchtune.errors import ProbeError
from batchtune.lengths import Lengths
from batchtune.probe.oom import requested_bytes
from batchtune.probe.search import TooLong
from batchtune.results import Device, Trial
from batchtune.tuning.unit_hints import workload_unit_hint
from batchtune.units import counted, format_length, format_size

# What was measured under other conditions must not be continued, so these ends need a folder of their own.
START_OVER = "then start over with --force, or in another folder with --run"

# Where less than this part of the limit was in use, memory was free. An allocator may not find all of it in one piece.
_HALF_FREE = 0.5
_IN_ONE_PIECE = 0.95


def nothing_fits(lengths: Lengths, workload: str, device: Device, trial: Trial) -> ProbeError:
    """The error where one of the shortest examples runs out of memory.

    Args:
        lengths: The data set.
        workload: Its spec.
        device: With the limit.
        trial: The one that showed it.
    """
    shortest = format_length(lengths.shortest, lengths.unit)
    limit = format_size(device.limit_bytes)
    if _memory_was_free(trial, device.limit_bytes):
        return ProbeError(
            f"a batch of one of the shortest example ({shortest}) ended with an error that says that memory ran out, "
            f"although memory was free: {_peak(trial)}, the limit is {limit} ({trial.error})",
            "The error is not about this limit. Look for what raised it: the code itself, another device, a limit of "
            "the system (`ulimit -v`, a container's), or one request for more than is free. Fix that, "
            f"{START_OVER}.",
        )
    unit = workload_unit_hint(lengths, workload)
    return ProbeError(
        f"the memory limit of {limit} is too small: even a batch of one of the shortest example ({shortest}) exceeds "
        f"it ({_how(trial)})",
        f"{unit + ' Else give' if unit else 'Give'} more with --memory, or take a smaller model with --set; "
        f"{START_OVER}.",
    )


def too_long(lengths: Lengths, workload: str, device: Device, found: TooLong) -> ProbeError:
    """The error where the longest examples run out of memory alone.

    Args:
        lengths: The data set.
        workload: Its spec.
        device: With the limit.
        found: The longest length that fits, and how many examples are longer.
    """
    unit, fitting, longer = lengths.unit, found.fitting_length, found.too_long
    hint = workload_unit_hint(lengths, workload)
    are = "example is" if longer == 1 else "examples are"
    return ProbeError(
        f"the longest example ({format_length(lengths.longest, unit)}) does not fit within "
        f"{format_size(device.limit_bytes)}, even alone: {longer:,} of {lengths.count:,} {are} longer than "
        f"{format_length(fitting, unit)}, the longest that fits ({_how(found.trial)})",
        f"{hint + ' Else leave' if hint else 'Leave'} them out with --max-length {fitting!r}, give more memory "
        f"with --memory, or take a smaller model (checkpointing, a lower precision) with --set; {START_OVER}.",
    )


def longest_does_not_fit(lengths: Lengths, workload: str, device: Device, trial: Trial, trials: int) -> str:
    """What is told at once, before the longest length that fits is known.

    Args:
        lengths: The data set.
        workload: Its spec.
        device: With the limit.
        trial: The one that showed it.
        trials: How many more it may take to know.
    """
    longest = format_length(lengths.longest, lengths.unit)
    if _memory_was_free(trial, device.limit_bytes):
        return (
            f"Warning: the longest example ({longest}) ended with an error that says that memory ran out, although "
            f"memory was free: {_peak(trial)}, the limit is {format_size(device.limit_bytes)} ({trial.error}). Shorter "
            "ones are tried now."
        )
    hint = workload_unit_hint(lengths, workload)
    return (
        f"Warning: the longest example ({longest}) does not fit within {format_size(device.limit_bytes)}, even alone, "
        "so the probe can't succeed like this. It goes on only to find how many examples are too long, in at most "
        f"{counted(trials, 'trial')} of one example each. To stop now, press Ctrl-C; leave long examples out with "
        "--max-length, give more memory with --memory, or take a smaller model with "
        f"--set.{' ' + hint if hint else ''}"
    )


def _memory_was_free(trial: Trial, limit_bytes: int) -> bool:
    """Whether the error came although what was asked for, if it says how much, was there."""
    peak = trial.failed_peak_bytes
    if peak is None:
        return False
    asked = requested_bytes(trial.error or "")
    return peak < _HALF_FREE * limit_bytes if asked is None else peak + asked < _IN_ONE_PIECE * limit_bytes


def _how(trial: Trial) -> str:
    """`the peak was 230 MiB, and 700 MiB more were asked for`, or the error's own words where that is not known."""
    asked = requested_bytes(trial.error or "")
    if trial.failed_peak_bytes is None or asked is None:
        return trial.error or trial.outcome
    return f"{_peak(trial)}, and {format_size(asked)} more were asked for"


def _peak(trial: Trial) -> str:
    return f"the peak was {format_size(trial.failed_peak_bytes or 0)}"
