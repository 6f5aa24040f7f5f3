"""The part of a report on a verification: sentences, facts, tables and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.table import Table, failures_table, make_table
from batchtune.results import SAMPLER_FILE, STREAM_CONFIG_FILE, Verification
from batchtune.trust import settings_differences
from batchtune.units import counted, format_length, format_number, format_seconds, format_size, with_full_stop

_MAX_NAMED = 3
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
    return ["The verification does not hold.", *reasons, *_proposal(verification)]


def _proposal(verification: Verification) -> Iterator[str]:
    proposal, unit = verification.proposal, verification.lengths.unit
    if proposal is None:
        return
    lowered = _lowered(verification)
    named = [
        f"{new:,} instead of {old:,} (up to {format_length(boundary, unit)})"
        for boundary, old, new in lowered[:_MAX_NAMED]
    ]
    if len(lowered) > _MAX_NAMED:
        named.append(f"{len(lowered) - _MAX_NAMED} more in the table")
    sizes, elsewhere = ", ".join(named) or "as they are", ""
    if proposal.max_batch_length < verification.max_batch_length:
        limit = format_length(proposal.max_batch_length, unit)
        elsewhere = f"; for samplers that work them out, max_batch_length = {limit}"
    yield (
        f"The next smaller safe batch sizes, which passed {counted(proposal.steps, 'step')} in a fresh process: "
        f"{sizes}{elsewhere}."
        if proposal.verified
        else f"No safe sizes were found: the smallest that were tried ({sizes}) failed too. Probe again with --force, "
        "or give more memory."
    )


def _lowered(verification: Verification) -> list[tuple[float, int, int]]:
    """Return boundary, batch size and proposed batch size of the buckets that differ."""
    ends, sizes, proposal = verification.bucket_boundaries, verification.bucket_batch_sizes, verification.proposal
    proposed = proposal.bucket_batch_sizes if proposal is not None else sizes
    return [(end, old, new) for end, old, new in zip(ends, sizes, proposed, strict=True) if old != new]


def _time(verification: Verification) -> str:
    measured, estimated = verification.measured_epoch_seconds, verification.estimated_epoch_seconds
    if measured is None:
        return "times were not measured"
    takes = f"an epoch takes {format_seconds(measured)} measured"
    if estimated is None or verification.time_ratio is None:
        return f"{takes}, and no estimate is known"
    return f"{takes} against {format_seconds(estimated)} estimated ({verification.time_ratio:.2f} times)"


def verification_facts(verification: Verification) -> list[tuple[str, str]]:
    """Return names and values of what was run and what it showed."""
    kind = "shuffled ones"
    if verification.buffer_size is not None:
        kind = f"of the stream ({verification.algorithm} with a buffer of {format_number(verification.buffer_size)})"
    planned = "" if verification.planned_steps is None else f" of {format_number(verification.planned_steps)}"
    run = (
        f"{counted(verification.worst_steps, 'step')} with the worst batches, then "
        f"{format_number(verification.steps)}{planned} {kind}; an epoch has "
        f"{format_number(verification.epoch_batches)}"
    )
    facts = [("Verification", run)]
    if memory := ", ".join(_memory(verification)):
        facts.append(("Memory", memory))
    if verification.measured_epoch_seconds is not None:
        spread = verification.time_ratio_spread
        between = "" if spread is None else f"; from step to step the ratio spreads by {spread:.2f}"
        facts.append(("Time", f"{_time(verification)}{between}"))
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
    """Lay out the batches that failed and the proposed sizes; nothing if all passed."""
    title, unit = "Batches that failed in the verification", verification.lengths.unit
    failed = failures_table(title, verification.failures, unit, "verify.json")
    return failed + proposal_table(verification)


def proposal_table(verification: Verification) -> list[Table]:
    """Lay out the batch sizes that are safe instead; no table if none are proposed, or they failed too."""
    if verification.proposal is None or not verification.proposal.verified:
        return []
    unit = verification.lengths.unit
    rows = [
        {"up to": format_length(boundary, unit), "batch size": format_number(old), "safe": format_number(new)}
        for boundary, old, new in _lowered(verification)
    ]
    place = STREAM_CONFIG_FILE if verification.of_stream else f"{SAMPLER_FILE}, the largest of all as max_batch_size"
    note = f"The other buckets stay as they are. Set them as bucket_batch_sizes in {place}."
    return [make_table("Batch sizes that are safe instead", rows, [note])] if rows else []


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
