"""The part of a report on a verification: sentences, facts, tables and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.table import Table, failures_table
from batchtune.results import Verification
from batchtune.trust import settings_differences
from batchtune.units import counted, format_number, format_seconds, format_size, with_full_stop

_MISMATCHES = {
    "lengths": "The verification used other lengths than the sweep, so it says nothing about these. Run `batchtune "
    "verify` again.",
    "stream": "The verification ran other batches of the stream than its sweep recommends: those of an earlier sweep, "
    "or of an edited stream.yaml. Train with what was verified, or run `batchtune sweep-stream` and `batchtune verify "
    "--stream` again.",
    **dict.fromkeys(
        ("table", "pools"),
        "The verification ran {what} than the sweep recommends: those of an earlier sweep, or of an edited "
        "sampler.yaml. Train with what was verified, or run `batchtune sweep-buckets` and `batchtune verify` again.",
    ),
}
_AGAIN = "Run `batchtune verify` again as it was probed, or probe again with --force."


def verification_sentences(verification: Verification) -> list[str]:
    """Say whether it holds and why, most important first, and if not, what to do instead."""
    if verification.holds:
        of_stream = verification.of_stream
        steps = f"{counted(verification.steps, 'step' if of_stream else 'shuffled step')}{' of the stream' * of_stream}"
        return [f"Verified: {steps} without running out of memory; {_time(verification)}."]
    reasons = [with_full_stop(reason) for reason in verification.reasons] or ["No reason is given."]
    sentences = ["The verification does not hold.", *reasons]
    if verification.failures:
        sentences.append("Probe again with --force, or give more memory.")
    return sentences


def _time(verification: Verification) -> str:
    measured, estimated = verification.measured_epoch_seconds, verification.estimated_epoch_seconds
    if measured is None:
        return "times were not measured"
    takes = f"an epoch takes {format_seconds(measured)} measured"
    if estimated is None or verification.time_ratio is None:
        return f"{takes}, and no estimate is known"
    ratio = f"{verification.time_ratio:.2f}"
    if verification.time_ratio_error is not None:
        ratio += f" ± {verification.time_ratio_error:.2f}"
    return f"{takes} against {format_seconds(estimated)} estimated ({ratio} times)"


def verification_facts(verification: Verification) -> list[tuple[str, str]]:
    """Return names and values of what was run and what it showed."""
    kind = "shuffled ones"
    if verification.buffer_size is not None:
        kind = f"of the stream ({verification.algorithm} with a buffer of {format_number(verification.buffer_size)})"
    run = (
        f"{counted(verification.worst_steps, 'step')} with the worst batches, then "
        f"{format_number(verification.steps)} of {format_number(verification.planned_steps)} {kind}; an epoch has "
        f"{format_number(verification.epoch_batches)}"
    )
    facts = [("Verification", run)]
    if memory := ", ".join(_memory(verification)):
        facts.append(("Memory", memory))
    if verification.measured_epoch_seconds is not None:
        facts.append(("Time", _time(verification)))
    return facts


def _memory(verification: Verification) -> Iterator[str]:
    growth = verification.rest_growth_bytes
    if verification.peak_bytes is not None:
        yield f"at most {format_size(verification.peak_bytes)} in use"
    if verification.reserved_bytes is not None:
        yield f"{format_size(verification.reserved_bytes)} held by the allocator"
    if growth is not None:
        yield "between steps " + (f"it grew by {format_size(growth)}" if growth > 0 else "it did not grow")
    if verification.alloc_retries:
        yield f"the allocator's cache was emptied {counted(verification.alloc_retries, 'time')}"


def verification_tables(verification: Verification) -> list[Table]:
    """Lay out the batches that failed; nothing if all passed."""
    title = "Batches that failed in the verification"
    return failures_table(title, verification.failures, verification.lengths.unit, "verify.json")


def mismatch(results: RunResults) -> str | None:
    """Return how the verification's batches differ from the recommended ones: by their `lengths`, `stream`, ...

    Any row that `stream.yaml` can hold will do if the recommended one is SpeechBrain's, which it can't. None if they
    agree, or if nothing is known of one of them.
    """
    verified = results.verification
    swept = results.stream if verified is not None and verified.of_stream else results.sweep
    if verified is None or swept is None:
        return None
    if verified.lengths.fingerprint != swept.lengths.fingerprint:
        return "lengths"
    table = verified.bucket_boundaries, verified.bucket_batch_sizes
    if results.stream is not None and verified.of_stream:
        chosen = results.stream.recommended_row
        rows = results.stream.rows if chosen is None or chosen.by_speechbrain else [chosen]
        ran = table, verified.algorithm, verified.buffer_size, verified.max_padding_ratio
        known = [((r.boundaries, r.batch_sizes), r.algorithm, r.buffer_size, r.max_padding_ratio) for r in rows]
        return None if ran in known else "stream"
    row = None if results.sweep is None else results.sweep.recommended_row
    if row is None or (row.boundaries, row.batch_sizes) != table:
        return "table"
    pools = verified.pool_size, verified.batch_overhead
    return None if (row.pool_size, row.batch_overhead) == pools else "pools"


def verification_warnings(results: RunResults) -> Iterator[str]:
    """Yield the verification's own warnings, and how it differs from the rest of the run."""
    verified, probe = results.verification, results.probe
    if verified is None:
        return
    yield from map(with_full_stop, verified.warnings)
    if (differs := mismatch(results)) is not None:
        what = "another bucket table" if verified.pool_size is None else "other pools"
        yield _MISMATCHES[differs].format(what=what)
    if probe is None:
        return
    little = f"one says little about the other. {_AGAIN}"
    if verified.workload != probe.workload:
        yield f"The verification ran the workload {verified.workload.words}, the probe {probe.workload.words}: {little}"
    if verified.device.name != probe.device.name:
        yield f"The verification ran on {verified.device.name}, the probe on {probe.device.name}: {little}"
    elif verified.device.limit_bytes != probe.device.limit_bytes:
        theirs, ours = format_size(verified.device.limit_bytes), format_size(probe.device.limit_bytes)
        yield f"The verification had a memory limit of {theirs}, the probe of {ours}. {_AGAIN}"
    yield from settings_differences(probe.device, verified.device)
