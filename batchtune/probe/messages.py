"""What a probe tells its caller: its progress and the time left, why it failed, and why its figures may be wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchtune.allocators import NATIVE
from batchtune.buckets.advice import workload_unit_hint
from batchtune.errors import ProbeError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import Turns, error_in_turns
from batchtune.probe.nodes import Nodes
from batchtune.probe.outcomes import Peaks
from batchtune.probe.requests import Measurer, Ran
from batchtune.probe.settings import ProbeSettings, workload_sha256
from batchtune.results import BatchShape, Device, Margin, Run, Trial
from batchtune.trust import settings_differences, trust_warnings
from batchtune.units import (
    counted,
    format_length,
    format_seconds,
    format_size,
    parse_size,
)

# A run under other conditions must not be continued, so these errors need a fresh start.
_START_OVER = "then start over with --force, or in another folder with --run"
_GIVE_MORE = "give more memory with --memory, or take a smaller model (checkpointing, a lower precision) with --set"
# A margin of more than this part of the limit is worth a word.
_LARGE_MARGIN = 0.02
# It is harmless if an allocator empties its cache once after a larger shape, but not in one step of ten.
_MANY_RETRIES = 0.1

# What an error asked for, such as `Tried to allocate 20.00 MiB`.
_ASKED_FOR = re.compile(r"(?:Tried|Unable) to allocate ([\d.]+ [KMGT]iB)")
_ASKED_FOR_BYTES = re.compile(r"tried to allocate (\d+) bytes")
# If an error does not say it, memory was free where the peak is below this part of the limit; otherwise where both
# together are below the other part: what is left may be in pieces.
_HALF_FREE = 0.5
_IN_ONE_PIECE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """The progress of a probe: before and after each trial, and before each step of the confirmation.

    Attributes:
        trial: The outcome of the shape; None before it is known.
        done, total: Lengths whose largest batch is known, and all of them; steps while confirming.
        seconds_left: A guess, from the time that trials took so far, without lengths that may be added, but with the
            caller's proof; None at the beginning.
        confirming: Whether the shapes at the limit are run in turns.
        shortening: Whether the longest example does not fit, and the longest that does is searched for.
    """

    shape: BatchShape
    trial: Trial | None
    done: int
    total: int
    seconds_left: float | None
    device: Device
    confirming: bool = False
    shortening: bool = False

    def __str__(self) -> str:
        return f"{self.done} of {self.total} done, running {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHooks:
    """A caller's hooks; `measurer` takes the place of worker processes on the device that the settings name.

    `nodes` are the other machines with ranks, if any. `goes_on`: the caller itself has probed before, in the same
    folder. `proof_share`: the caller proves the result afterwards, in this share of the probe's time.
    """

    on_progress: Callable[[ProbeProgress], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda text: None
    measurer: Measurer | None = None
    nodes: Nodes | None = None
    goes_on: bool = False
    proof_share: float = 0.0


class NothingFits(ProbeError):
    """Even one example of the shortest length does not fit, as a trial shows."""

    def __init__(
        self, lengths: Lengths, workload: str, limit_bytes: int, trial: Trial
    ) -> None:
        self.trial = trial
        shortest = format_length(lengths.shortest, lengths.unit)
        although = _although_free(trial, limit_bytes)
        if although:
            super().__init__(
                f"a batch of one of the shortest example ({shortest}) ended with an error that says that memory ran out"
                f"{although} ({trial.error})",
                "The error is not about this limit. Look for what raised it: your code, another device or process, a "
                f"limit of the system (`ulimit -v`, a container's). Fix that, {_START_OVER}.",
            )
            return
        super().__init__(
            f"the memory limit of {format_size(limit_bytes)} is too small: even a batch of one of the shortest "
            f"example ({shortest}) exceeds it ({trial.error or trial.outcome}){_needed(trial, limit_bytes)}",
            f"{_unit_hint(lengths, workload)}{_GIVE_MORE.capitalize()}; {_START_OVER}.",
        )


def _needed(trial: Trial, limit_bytes: int) -> str:
    """Return a sentence on how much a batch needed when it failed, as far as that is known; else nothing."""
    held = trial.failed_peak_bytes
    if held is None:
        return ""
    asked = _ASKED_FOR.search(trial.error or "")
    asked_bytes = _ASKED_FOR_BYTES.search(trial.error or "")
    if asked is not None:
        held += parse_size(asked[1])
    elif asked_bytes is not None:
        held += int(asked_bytes[1])
    return (
        f". It needs more than {format_size(max(held, limit_bytes))}, as far as it came"
    )


def _although_free(trial: Trial, limit_bytes: int) -> str:
    """Return the end of a sentence if what the error asked for was free, by the peak before it; else nothing."""
    peak_bytes = trial.failed_peak_bytes
    if peak_bytes is None:
        return ""
    asked = _ASKED_FOR.search(trial.error or "")
    if asked is None:
        was_free = peak_bytes < _HALF_FREE * limit_bytes
    else:
        was_free = peak_bytes + parse_size(asked[1]) < _IN_ONE_PIECE * limit_bytes
    if not was_free:
        return ""
    return (
        f", although memory was free: the peak was {format_size(peak_bytes)}, the limit is "
        f"{format_size(limit_bytes)}"
    )


class TooLong(ProbeError):
    """The longest examples do not fit; `fitting_length` is the longest that does, `too_long` how many are longer."""

    def __init__(
        self,
        lengths: Lengths,
        workload: str,
        limit_bytes: int,
        trial: Trial,
        fitting_length: float,
    ) -> None:
        self.fitting_length = fitting_length
        self.too_long = lengths.count - lengths.histogram.count_up_to(fitting_length)
        or_cut = ""
        if trial.sequences is not None:
            or_cut = (
                f"cut them with --truncate {fitting_length:g} if your training does, "
            )
        super().__init__(
            f"the longest example ({format_length(lengths.longest, lengths.unit)}) does not fit within "
            f"{format_size(limit_bytes)}, even alone: {self.too_long:,} of {counted(lengths.count, 'example')} exceed "
            f"{format_length(fitting_length, lengths.unit)}, the longest that fits"
            f"{_although_free(trial, limit_bytes)} ({trial.error or trial.outcome})",
            f"{_unit_hint(lengths, workload)}Leave them out with --max-length {fitting_length!r}, "
            f"{or_cut}{_GIVE_MORE}; {_START_OVER}.",
        )


def least_budget_fails(lengths: Lengths, limit_bytes: int, trial: Trial) -> ProbeError:
    """Return the error if the longest sequence fits alone, but the same number of tokens in others does not."""
    why = trial.error or "it leaves too little free for the spread of its peaks"
    return ProbeError(
        f"no token budget fits within {format_size(limit_bytes)}: it must hold the longest sequence "
        f"({format_length(lengths.longest, lengths.unit)}), but {trial.shape} do not fit ({why})",
        f"Leave out long sequences with --max-length, or short ones with --min-length, {_GIVE_MORE}; "
        f"{_START_OVER}.",
    )


def pads_though(workload: str, trials: Iterable[Trial]) -> WorkloadError:
    """Return the error for a workload that claims to pack, but takes as much for short sequences as for long ones.

    The trials are of the longest sequence, of several that long, and of one with the shortest in
    place of the others.
    """
    took = [
        f"{trial.shape} took {format_size(trial.peak_bytes or 0)}" for trial in trials
    ]
    return WorkloadError(
        f"{workload} has packed = True, but its memory is that of padded batches: {took[0]}, {took[1]}, and "
        f"{took[2]}",
        "Does make_batch() pad? It must put the sequences of shape.sequences into one row, one after the other. If "
        f"your training pads, leave out packed = True; {_START_OVER}.",
    )


def single_fails(workload: str, trial: Trial) -> WorkloadError:
    """Return the error for a batch of one example that fails, but not for lack of memory."""
    return WorkloadError(
        failed_in(workload, Ran(trial=trial)),
        "It did not run out of memory: the probe stops. Fix it, or if it only takes long, allow more with "
        f"--trial-timeout; {_START_OVER}.",
    )


class IgnoresShape(WorkloadError):
    """Batches of very different sizes take the same memory and time."""

    def __init__(self, lengths: Lengths, workload: str, equal: Sequence[Trial]) -> None:
        batches = []
        for trial in equal:
            shape = str(trial.shape)
            if trial.sequences is None:
                length = format_length(trial.length, lengths.unit)
                shape = f"{trial.batch_size:,} × {length}"
            seconds = format_seconds(trial.step_seconds or 0)
            batches.append(
                f"{shape} took {format_size(trial.peak_bytes or 0)} and {seconds}"
            )
        makes = "return a batch of shape.batch_size examples, padded to shape.length"
        if equal[0].sequences is not None:
            makes = "put the sequences of shape.sequences into one row"
        super().__init__(
            f"{workload}: memory and step time do not depend on the batch: {' and '.join(batches)}",
            f"Does make_batch() ignore its `shape`? It must {makes}. Fix it, {_START_OVER}.",
        )


def workload_error(workload: str, ran: Ran) -> WorkloadError:
    """Return the error for a trial that failed with the workload's own error."""
    hint = "It did not run out of memory: the probe stops. Fix it and run the same command again; the trials so far "
    return WorkloadError(
        failed_in(workload, ran), ran.hint or f"{hint}are kept.", ran.traceback
    )


def failed_in(workload: str, ran: Ran) -> str:
    """Describe a failure of the workload."""
    return f"{workload} failed in its {ran.stage or 'step'}, with a batch of {ran.trial.shape}: {ran.trial.error}"


def _unit_hint(lengths: Lengths, workload: str) -> str:
    hint = workload_unit_hint(lengths, workload)
    if not hint:
        return ""
    return f"{hint} Otherwise: "


def nothing_confirmed(turns: Turns) -> ProbeError:
    """Return the error if all batches that fit alone fail among others."""
    message = "no batch that fits alone passed interleaved with the others"
    failed = _last_failure(turns)
    if failed is not None:
        message += f": {failed.shape} failed last, {error_in_turns(failed)}"
    return ProbeError(
        message,
        f"Leave more memory free with --memory-fraction, or give more with --memory; {_START_OVER}.",
    )


def _last_failure(turns: Turns) -> Trial | None:
    failed = [step for step in turns.steps if step.outcome == "oom"]
    failed += [ran.trial for ran in turns.failures]
    if not failed:
        return None
    return failed[-1]


def longest_not_proven(
    lengths: Lengths, proven: float, device: Device, peaks: Peaks
) -> ProbeError:
    """Return the error if no batch of the longest example leaves the margin free; `proven` is the longest that does."""
    longer = lengths.count - lengths.histogram.count_up_to(proven)
    why = "some batch with it failed interleaved with the others"
    if peaks.are_known:
        free = f"{format_size(peaks.margin.bytes)} of {format_size(device.limit_bytes)}"
        why = f"it leaves less than {free} free. {_reason(peaks.margin)}"
    return ProbeError(
        f"the longest example ({format_length(lengths.longest, lengths.unit)}) is not proven to fit, even alone: {why}",
        f"Leave out the {counted(longer, 'example')} longer than {format_length(proven, lengths.unit)} with "
        f"--max-length {proven!r}, {_GIVE_MORE}; {_START_OVER}.",
    )


def _reason(margin: Margin) -> str:
    """Return what the margin is for, as a sentence without its full stop."""
    if margin.first_step_bytes > margin.spread_bytes:
        first_step = format_size(margin.first_step_bytes)
        return f"The first step of a process needs up to {first_step} more than later ones with the same batch"
    return f"Peaks of equal batches differ by up to {format_size(margin.spread_bytes)}"


def longest_does_not_fit(lengths: Lengths, device: Device) -> str:
    """Return the warning before the longest length that fits is searched for."""
    return (
        f"Warning: the longest example ({format_length(lengths.longest, lengths.unit)}) does not fit within "
        f"{format_size(device.limit_bytes)}, even alone, so the probe can't succeed like this. It goes on only to find "
        f"how many examples are too long. To stop now, press Ctrl-C; leave long examples out with --max-length, "
        f"{_GIVE_MORE}."
    )


def interrupted(path: Path) -> str:
    """Describe what `probe.json` holds when a probe is interrupted."""
    return (
        f"{path} holds the largest batches that ran so far, marked as unfinished: none of them is proven, because they "
        "did not run interleaved."
    )


def about_changes(
    run: Run | None, trials: Sequence[Trial], settings: ProbeSettings
) -> Iterator[str]:
    """Warn of trials that measured another version of the workload's file."""
    if run is None or not trials:
        return
    if run.workload_sha256 != workload_sha256(settings):
        yield (
            f"The workload's file has changed since this run began, and {counted(len(trials), 'trial')} measured "
            "the old code. If the change affects memory or time, measure again with --force."
        )


def about_devices(
    before: Device, now: Device, trials: Sequence[Trial]
) -> Iterator[str]:
    """Yield why the device's figures may be wrong; `before` is the device when the run began."""
    yield from trust_warnings(now, trials)
    caught = sum(trial.caught for trial in trials)
    if caught:
        yield (
            f"The workload catches out-of-memory errors itself: in {caught} of {counted(len(trials), 'trial')} "
            "memory ran out, but the step still returned, as if it had passed. Those batches count as too large. "
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


def about_falls(falls: Sequence[tuple[BatchShape, BatchShape]]) -> Iterator[str]:
    """Yield where memory falls: pairs of a shape that ran out of it and a larger one that passed."""
    for smaller, larger in falls[:1]:
        yield (
            f"Memory does not grow with the batch everywhere: {smaller} ran out of it, twice, though {larger} passed "
            f"({counted(len(falls), 'such pair')}). All batch sizes at that length and beyond stay below the one that "
            "failed."
        )


def about_margin(margin: Margin | None, device: Device) -> Iterator[str]:
    """Yield the reason for a large margin."""
    if margin is not None and margin.fragments_bytes:
        advice = ""
        if device.fragments:
            advice = (
                ", for what CUDA's native allocator can't use. PYTORCH_ALLOC_CONF=expandable_segments:True, in "
                "training too, makes that room usable"
            )
        yield (
            f"Larger batches ran out of memory after others: {format_size(margin.fragments_bytes)} are left free, "
            f"{margin.fragments_bytes / device.limit_bytes:.1%} of the limit{advice}"
        )
    elif margin is not None and margin.bytes > _LARGE_MARGIN * device.limit_bytes:
        yield (
            f"{_reason(margin)}: {margin.bytes / device.limit_bytes:.1%} of the limit of "
            f"{format_size(device.limit_bytes)} is left free for that. A workload whose memory does not depend on "
            "chance, and a step with a small batch before training begins, make that room usable."
        )


def about_masks(needs_a_mask: bool) -> Iterator[str]:
    """Warn that a packed workload's memory grows with the square of the row."""
    if needs_a_mask:
        yield (
            "Memory grows with the square of all tokens of a batch, as with a mask over the whole row. Attention "
            "within each sequence (varlen, cu_seqlens) needs none, and fits larger batches."
        )


def about_the_end(
    unfinished: bool, settings: ProbeSettings, at_stake: float | None
) -> Iterator[str]:
    """Warn that the probe ended early, or of the largest share of an epoch that more lengths would save."""
    if unfinished:
        limit = ""
        if settings.minutes is not None:
            limit = f", at the latest after {settings.minutes:g} min (by --minutes)"
        yield (
            f"The probe is unfinished: it ended before all lengths were measured{limit}. The same command continues it."
        )
    elif at_stake is not None:
        yield (
            f"More lengths would save up to {at_stake:.1%} of an epoch. Measure more with --max-lengths, and "
            "run the same command again."
        )


def about_equal_batches(equal: IgnoresShape | None) -> Iterator[str]:
    """Warn that an unfinished probe ran only batches of the same memory and time."""
    if equal is not None:
        yield f"{equal.message}. {equal.hint}"


def about_turns(turns: Turns | None, device: Device) -> Iterator[str]:
    """Yield what went wrong in the last turns."""
    if turns is None:
        return
    failed = _last_failure(turns)
    if failed is not None:
        yield (
            f"Batches failed in each confirmation, {failed.shape} in the last one: {error_in_turns(failed)}. That "
            "batch is left out: smaller ones that passed take its place. Leave more memory free with "
            "--memory-fraction, and probe again with --force."
        )
    steps = len(turns.passed)
    if turns.alloc_retries > _MANY_RETRIES * steps:
        remedy = "Probe again with a lower --memory-fraction"
        if device.allocator == NATIVE:
            remedy += ", or with --allocator expandable"
        yield (
            f"In interleaved steps, the allocator emptied its cache {turns.alloc_retries} times in {steps} steps: what "
            f"one shape leaves behind does not fit the next, and emptying takes time. {remedy}, and --force."
        )
