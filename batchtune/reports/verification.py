"""The part of a report on a verification: sentences, facts, tables and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.table import Fact, Table, failures_table
from batchtune.results import Row, StreamRow, Verification
from batchtune.trust import settings_differences
from batchtune.units import counted, format_number, format_seconds, format_size, with_full_stop

_OTHER_BATCHES = (
    "The verification ran {what} than the sweep recommends: those of an earlier sweep, or of an edited sampler.yaml. "
    "Train with what was verified, or run `batchtune sweep-buckets` and `batchtune verify` again."
)
# What differs, as `mismatch` names it → what to say and do.
MISMATCHES = {
    "lengths": "The verification used other lengths than the sweep, so it says nothing about these. Run `batchtune "
    "verify` again.",
    "stream": "The verification ran other batches of the stream than its sweep recommends: those of an earlier sweep, "
    "or of an edited stream.yaml. Train with what was verified, or run `batchtune sweep-stream` and `batchtune verify "
    "--stream` again.",
    "table": _OTHER_BATCHES.format(what="another bucket table"),
    "pools": _OTHER_BATCHES.format(what="other pools"),
}
_AGAIN = "Run `batchtune verify` again as it was probed, or probe again with --force."


def verification_sentences(verification: Verification) -> list[str]:
    """Say whether it holds and why, most important first, and if not, what to do instead."""
    if verification.holds:
        steps = counted(verification.steps, "shuffled step")
        if verification.of_stream:
            steps = f"{counted(verification.steps, 'step')} of the stream"
        return [f"Verified: {steps} without running out of memory; {_time(verification)}."]
    reasons = [with_full_stop(reason) for reason in verification.reasons] or ["No reason is given."]
    sentences = ["The verification does not hold.", *reasons]
    if verification.failures:
        sentences.append("Probe again with --force, or give more memory.")
    return sentences


def _time(verification: Verification) -> str:
    measured = verification.measured_epoch_seconds
    estimated = verification.estimated_epoch_seconds
    if measured is None:
        return "times were not measured"
    takes = f"an epoch takes {format_seconds(measured)} measured"
    if estimated is None or verification.time_ratio is None:
        return f"{takes}, and no estimate is known"
    ratio = f"{verification.time_ratio:.2f}"
    if verification.time_ratio_error is not None:
        ratio += f" ± {verification.time_ratio_error:.2f}"
    return f"{takes} against {format_seconds(estimated)} estimated ({ratio} times)"


def verification_facts(verification: Verification) -> Iterator[Fact]:
    """Yield names and values of what was run and what it showed."""
    kind = "shuffled ones"
    if verification.buffer_size is not None:
        kind = f"of the stream ({verification.algorithm} with a buffer of {format_number(verification.buffer_size)})"
    yield (
        "Verification",
        f"{counted(verification.worst_steps, 'step')} with the worst batches, then "
        f"{format_number(verification.steps)} of {format_number(verification.planned_steps)} {kind}; an epoch has "
        f"{format_number(verification.epoch_batches)}",
    )
    memory = list(_memory(verification))
    if memory:
        yield "Memory", ", ".join(memory)
    if verification.measured_epoch_seconds is not None:
        yield "Time", _time(verification)


def _memory(verification: Verification) -> Iterator[str]:
    growth = verification.rest_growth_bytes
    if verification.peak_bytes is not None:
        yield f"at most {format_size(verification.peak_bytes)} in use"
    if verification.reserved_bytes is not None:
        yield f"{format_size(verification.reserved_bytes)} held by the allocator"
    if growth is not None:
        yield f"between steps it grew by {format_size(growth)}" if growth > 0 else "between steps it did not grow"
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
    if verified is None:
        return None
    swept = results.stream if verified.of_stream else results.sweep
    if swept is None:
        return None
    if verified.lengths.fingerprint != swept.lengths.fingerprint:
        return "lengths"
    if verified.of_stream:
        assert results.stream is not None
        chosen = results.stream.recommended_row
        rows = results.stream.rows if chosen is None or chosen.by_speechbrain else [chosen]
        return None if any(_ran_stream_row(verified, row) for row in rows) else "stream"
    row = None if results.sweep is None else results.sweep.recommended_row
    if row is None or not _ran_table(verified, row):
        return "table"
    same_pools = row.pool_size == verified.pool_size and row.batch_overhead == verified.batch_overhead
    return None if same_pools else "pools"


def _ran_table(verified: Verification, row: Row | StreamRow) -> bool:
    return row.boundaries == verified.bucket_boundaries and row.batch_sizes == verified.bucket_batch_sizes


def _ran_stream_row(verified: Verification, row: StreamRow) -> bool:
    return (
        _ran_table(verified, row)
        and row.algorithm == verified.algorithm
        and row.buffer_size == verified.buffer_size
        and row.max_padding_ratio == verified.max_padding_ratio
    )


def verification_warnings(results: RunResults) -> Iterator[str]:
    """Yield the verification's own warnings, and how it differs from the rest of the run."""
    verified = results.verification
    probe = results.probe
    if verified is None:
        return
    for warning in verified.warnings:
        yield with_full_stop(warning)
    difference = mismatch(results)
    if difference is not None:
        yield MISMATCHES[difference]
    if probe is None:
        return
    little = f"one says little about the other. {_AGAIN}"
    if verified.workload != probe.workload:
        yield f"The verification ran the workload {verified.workload.words}, the probe {probe.workload.words}: {little}"
    if verified.device.name != probe.device.name:
        yield f"The verification ran on {verified.device.name}, the probe on {probe.device.name}: {little}"
    elif verified.device.limit_bytes != probe.device.limit_bytes:
        verified_limit = format_size(verified.device.limit_bytes)
        probed_limit = format_size(probe.device.limit_bytes)
        yield f"The verification had a memory limit of {verified_limit}, the probe of {probed_limit}. {_AGAIN}"
    yield from settings_differences(probe.device, verified.device)
