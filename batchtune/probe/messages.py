"""Writes a probe's messages: why it failed, and why its figures may be wrong or cost more than they must."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from batchtune.buckets.cautions import workload_unit_hint
from batchtune.errors import ProbeError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import Turns, error_in_turns
from batchtune.probe.oom import requested_bytes
from batchtune.probe.protocol import Ran
from batchtune.probe.search import IgnoresShape, TooLong
from batchtune.probe.settings import ProbeSettings
from batchtune.results import Device, Margin, Trial
from batchtune.shapes import BatchShape
from batchtune.trust import settings_differences, trust_warnings
from batchtune.units import counted, format_length, format_seconds, format_size

# A run under other conditions must not be continued, so these errors need a fresh start.
_START_OVER = "then start over with --force, or in another folder with --run"

# Where less than this part of the limit was in use, memory was free. An allocator may not find all of it in one piece.
_HALF_FREE = 0.5
_IN_ONE_PIECE = 0.95
# A margin of more than this part of the limit is worth a word; so are the first few shapes at which memory falls.
_LARGE_MARGIN = 0.02
_MOST_NAMED = 3
_IGNORES_SHAPE = (
    "Does make_batch() ignore its `shape`? It must return a batch of shape.batch_size examples, padded to shape.length."
)
_SMALL_STEP_FIRST = "A step with a small batch before training begins"
# It is harmless if an allocator empties its cache once after a larger shape, but not in one step of ten.
_MANY_RETRIES = 0.1


def workload_error(workload: str, ran: Ran) -> WorkloadError:
    """Return the error for a trial that failed with the workload's own error."""
    return WorkloadError(
        f"{workload} failed in its {ran.stage or 'step'}, with a batch of {ran.trial.shape}: {ran.trial.error}",
        ran.hint
        or "It did not run out of memory: the probe stops. Fix it and run the same command again; "
        "the trials so far are kept.",
        ran.traceback,
    )


def no_lack_of_memory(workload: str, trial: Trial) -> WorkloadError:
    """Return the error if even one example fails, but not for lack of memory."""
    longer = ", or allow more with --trial-timeout" if trial.outcome == "timeout" else ""
    hint = f"It did not run out of memory: the probe stops. Fix it{longer}; {_START_OVER}."
    return workload_error(workload, Ran(trial=trial, hint=hint))


def ignores_shape(lengths: Lengths, workload: str, equal: IgnoresShape) -> WorkloadError:
    """Return the error if batches of very different sizes take the same memory and time."""
    return WorkloadError(
        f"{workload}: memory and step time do not depend on the batch: {_equal(equal, lengths.unit)}",
        f"{_IGNORES_SHAPE} Fix it, {_START_OVER}.",
    )


def about_equal_batches(equal: IgnoresShape | None, unit: str | None) -> Iterator[str]:
    """Yield that an unfinished probe ran only batches of the same memory and time."""
    if equal is not None:
        yield f"Memory and step time do not depend on the batch so far: {_equal(equal, unit)}. {_IGNORES_SHAPE}"


def _equal(equal: IgnoresShape, unit: str | None) -> str:
    """Return `1 × 20 s took 2 GiB and 0.1 s and 16 × 20 s took 2 GiB and 0.1 s`."""
    batches = []
    for trial in (equal.smaller, equal.trial):
        shape = f"{trial.batch_size:,} × {format_length(trial.length, unit)}"
        seconds = format_seconds(trial.step_seconds or 0)
        batches.append(f"{shape} took {format_size(trial.peak_bytes or 0)} and {seconds}")
    return " and ".join(batches)


def out_of_time() -> ProbeError:
    """Return the error if the time limit ends the probe before any batch of the longest examples is known to fit."""
    return ProbeError(
        "the time of --minutes ended before the first trial",
        "Allow more. Building the workload counts, and so does the first trial's time.",
    )


def nothing_confirmed(turns: Turns) -> ProbeError:
    """Return the error if all batches that fit alone fail among others."""
    failed = turns.first_failed
    if turns.failures:
        failed = turns.failures[-1]
    message = "no batch that fits alone passed in turns with the others"
    if failed is not None:
        message += f": {failed.trial.shape} failed last, {error_in_turns(failed.trial)}"
    return ProbeError(
        message,
        f"Leave more memory free with --memory-fraction, or give more with --memory; {_START_OVER}.",
    )


def nothing_fits(lengths: Lengths, workload: str, device: Device, trial: Trial) -> ProbeError:
    """Return the error if one of the shortest examples runs out of memory."""
    shortest = format_length(lengths.shortest, lengths.unit)
    if (free := _memory_was_free(trial, device)) is not None:
        return ProbeError(
            f"a batch of one of the shortest example ({shortest}) {free}",
            "The error is not about this limit. Look for what raised it: the code itself, another device, a limit of "
            f"the system (`ulimit -v`, a container's), or one request for more than is free. Fix that, {_START_OVER}.",
        )
    unit = workload_unit_hint(lengths, workload)
    return ProbeError(
        f"the memory limit of {format_size(device.limit_bytes)} is too small: even a batch of one of the shortest "
        f"example ({shortest}) exceeds it ({_how(trial)})",
        f"{unit + ' Else give' if unit else 'Give'} more with --memory, or take a smaller model with --set; "
        f"{_START_OVER}.",
    )


def too_long(lengths: Lengths, workload: str, device: Device, found: TooLong) -> ProbeError:
    """Return the error if the longest examples run out of memory alone."""
    unit = lengths.unit
    fitting = found.fitting_length
    longer = found.too_long
    hint = workload_unit_hint(lengths, workload)
    return ProbeError(
        f"the longest example ({format_length(lengths.longest, unit)}) does not fit within "
        f"{format_size(device.limit_bytes)}, even alone: {longer:,} of {lengths.count:,} "
        f"{'example is' if longer == 1 else 'examples are'} longer than {format_length(fitting, unit)}, the longest "
        f"that fits ({_how(found.trial)})",
        f"{hint + ' Else leave' if hint else 'Leave'} them out with --max-length {fitting!r}, give more memory "
        f"with --memory, or take a smaller model (checkpointing, a lower precision) with --set; {_START_OVER}.",
    )


def longest_not_proven(lengths: Lengths, proven: float, device: Device, margin: Margin | None) -> ProbeError:
    """Return the error if no batch of the longest example leaves the margin free; `proven` is the longest that does."""
    unit = lengths.unit
    longer = lengths.count - lengths.histogram.count_up_to(proven)
    why = "some batch with it failed in turns with the others"
    if margin is not None:
        free = f"{format_size(margin.bytes)} of {format_size(device.limit_bytes)}"
        why = f"it leaves less than {free} free. {_kept(margin)}"
    return ProbeError(
        f"the longest example ({format_length(lengths.longest, unit)}) is not proven to fit, even alone: {why}",
        f"Leave out the {counted(longer, 'example')} longer than {format_length(proven, unit)} with --max-length "
        f"{proven!r}, give more memory with --memory, or take a smaller model with --set; {_START_OVER}.",
    )


def _kept(margin: Margin) -> str:
    """Return what the margin is for, as a sentence without its full stop."""
    if margin.first_step_bytes > margin.spread_bytes:
        return (
            f"The first step of a process needs {format_size(margin.first_step_bytes)} more than later ones with the "
            "same batch"
        )
    return f"Peaks of equal batches differ by up to {format_size(margin.spread_bytes)}"


def longest_does_not_fit(lengths: Lengths, workload: str, device: Device, trial: Trial, trials: int) -> str:
    """Return the warning before the longest length that fits is searched for, in at most so many trials."""
    longest = f"Warning: the longest example ({format_length(lengths.longest, lengths.unit)})"
    if (free := _memory_was_free(trial, device)) is not None:
        return f"{longest} {free}. Shorter ones are tried now."
    hint = workload_unit_hint(lengths, workload)
    return (
        f"{longest} does not fit within {format_size(device.limit_bytes)}, even alone, so the probe can't succeed like "
        "this. It goes on only to find how many examples are too long, in at most "
        f"{counted(trials, 'trial')} of one example each. To stop now, press Ctrl-C; leave long examples out with "
        "--max-length, give more memory with --memory, or take a smaller model with "
        f"--set.{' ' + hint if hint else ''}"
    )


def _memory_was_free(trial: Trial, device: Device) -> str | None:
    """Describe an out-of-memory error that came while the requested memory, if known, was free; None if it was not."""
    peak = trial.failed_peak_bytes
    asked = requested_bytes(trial.error or "")
    limit = device.limit_bytes
    if peak is None:
        return None
    if asked is None:
        was_free = peak < _HALF_FREE * limit
    else:
        was_free = peak + asked < _IN_ONE_PIECE * limit
    if not was_free:
        return None
    return (
        f"ended with an error that says that memory ran out, although memory was free: the peak was "
        f"{format_size(peak)}, the limit is {format_size(limit)} ({trial.error})"
    )


def _how(trial: Trial) -> str:
    """Return `the peak was 230 MiB, and 700 MiB more were asked for`, or the error's own words if that is unknown."""
    asked = requested_bytes(trial.error or "")
    if trial.failed_peak_bytes is None or asked is None:
        return trial.error or trial.outcome
    return f"the peak was {format_size(trial.failed_peak_bytes)}, and {format_size(asked)} more were asked for"


def about_devices(before: Device, now: Device, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield why the device's figures may be wrong; `before` is the device when the run began."""
    yield from trust_warnings(now, trials)
    if caught := sum(trial.caught for trial in trials):
        yield (
            f"The workload catches out-of-memory errors itself: in {caught} of {counted(len(trials), 'trial')} "
            "memory ran out and the step returned all the same, as if it had passed. Those batches count as too large. "
            "Training would skip them unseen: let the error get out of the step."
        )
    changed = {trial.parameters_changed for trial in trials}
    if False in changed and True not in changed:
        yield (
            "The workload's step changes no parameter: training, with backward() and optimizer.step(), needs more "
            "memory and time than what was measured. Make step() a whole training step, and probe again with --force"
        )
    for text in settings_differences(before, now):
        yield f"The run was continued under other settings: {text}"


def about_falls(pairs: Sequence[tuple[BatchShape, BatchShape]], unit: str | None) -> Iterator[str]:
    """Yield where memory falls: pairs of a shape that ran out of it and a larger one that passed."""
    for pair in pairs[:_MOST_NAMED]:
        smaller, larger = (_described(shape, unit) for shape in pair)
        yield (
            f"Memory does not grow with the batch everywhere: {smaller} ran out of it, twice, though {larger} "
            "passed. All batch sizes at that length and beyond stay below the one that failed."
        )


def _described(shape: BatchShape, unit: str | None) -> str:
    text = f"{shape.batch_size} × {format_length(shape.length, unit)}"
    if shape.target_length is not None:
        text += f" with targets up to {shape.target_length:g}"
    return text


def about_margin(margin: Margin | None, device: Device) -> Iterator[str]:
    """Yield the reason for a large margin."""
    if margin is None or margin.bytes <= _LARGE_MARGIN * device.limit_bytes:
        return
    share = f"{margin.bytes / device.limit_bytes:.1%} of the limit of {format_size(device.limit_bytes)} is left free"
    if margin.first_step_bytes > margin.spread_bytes:
        yield f"{_kept(margin)}: {share} for it. {_SMALL_STEP_FIRST} would make that room usable."
    else:
        yield (
            f"{_kept(margin)}: {share} for that. A workload whose memory does not depend on chance can have larger "
            "batches."
        )


def interrupted(path: Path) -> str:
    """Return the note on what an interrupted probe leaves."""
    return (
        f"{path} holds the largest batches that ran by now, marked as unfinished: none of them is proven, as they did "
        "not run in turns."
    )


def about_the_end(unfinished: bool, settings: ProbeSettings, at_stake: float | None) -> Iterator[str]:
    """Yield that the probe ended early, or which share of an epoch more lengths would save at most."""
    if unfinished:
        limit = "" if settings.minutes is None else f", at the latest after the {settings.minutes:g} min of --minutes"
        yield (
            f"The probe is unfinished: it ended before all lengths were measured{limit}. The same command continues it."
        )
    elif at_stake is not None:
        yield (
            f"More lengths would save up to {at_stake:.1%} of an epoch. Measure more with --max-lengths, and "
            "run the same command again."
        )


def about_turns(turns: Turns | None, confirmations: int) -> Iterator[str]:
    """Yield what went wrong in alternation, after so many confirmations."""
    if turns is None:
        return
    if turns.failures:
        failed = turns.failures[-1].trial
        yield (
            f"Confirmed {confirmations} times, and each time batches failed, {failed.shape} the last: "
            f"{error_in_turns(failed)}. What failed last is left out: smaller batches that passed take its place. "
            "Leave more memory free with --memory-fraction, and probe again with --force."
        )
    elif turns.first_failed is not None:
        yield (
            "The first step of a process needs more memory than later ones, and how much depends on the batch. After "
            f"{confirmations} confirmations {turns.first_failed.trial.shape} still ran out of memory in it and is left "
            f"out, but others may run out too. {_SMALL_STEP_FIRST} avoids that."
        )
    if turns.alloc_retries > _MANY_RETRIES * turns.steps:
        yield (
            f"In turns, the allocator emptied its cache {turns.alloc_retries} times in {turns.steps} steps: what one "
            "shape leaves behind does not fit the next, and each time takes time. Set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, in training too, or a lower --memory-fraction."
        )
