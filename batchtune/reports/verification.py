"""What a report says of a verification: sentences, facts, tables, and what to look after."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, Column, Table, format_shape, shown_of
from batchtune.results import Probe, Proposal, Sweep, Verification
from batchtune.trust import settings_differences
from batchtune.units import counted, format_length, format_number, format_seconds, format_size, with_full_stop

_MAX_FAILURES = 10
_MAX_NAMED = 3
_AGAIN = "Run `batchtune verify` again as it was probed, or probe anew with --force."
_OUTCOMES = {"oom": "out of memory"}


def verification_sentences(verification: Verification) -> list[str]:
    """Say whether it holds and why, most important first, with what to do instead where it does not."""
    if verification.holds:
        steps = f"{format_number(verification.steps)} shuffled {'step' if verification.steps == 1 else 'steps'}"
        return [f"Verified: {steps} without running out of memory; {_time(verification)}."]
    reasons = [with_full_stop(reason) for reason in verification.reasons] or ["No reason is given."]
    reasons.insert(0, "The verification does not hold.")
    if verification.proposal is not None:
        reasons.append(_proposal_sentence(verification, verification.proposal))
    return reasons


def verification_facts(verification: Verification) -> list[tuple[str, str]]:
    """Name and value of what was run and what it showed."""
    planned = "" if verification.planned_steps is None else f" of {format_number(verification.planned_steps)}"
    run = (
        f"{counted(verification.worst_steps, 'step')} with the worst batches, then "
        f"{format_number(verification.steps)}{planned} shuffled ones; an epoch has "
        f"{format_number(verification.epoch_batches)}"
    )
    facts = [("Verification", run)]
    if memory := _memory(verification):
        facts.append(("Memory", memory))
    if verification.measured_epoch_seconds is not None:
        spread = verification.time_ratio_spread
        between = "" if spread is None else f"; from step to step the ratio spreads by {spread:.2f}"
        facts.append(("Time", f"{_time(verification)}{between}"))
    return facts


def verification_tables(verification: Verification) -> list[Table]:
    """Lay out what failed, and what is proposed instead; nothing if all passed."""
    found = (_failures_table(verification), proposal_table(verification))
    return [table for table in found if table is not None]


def verification_warnings(results: RunResults) -> Iterator[str]:
    """Yield the verification's own warnings, and what in this run it says nothing about."""
    verification = results.verification
    if verification is None:
        return
    yield from (with_full_stop(text) for text in verification.warnings)
    if results.sweep is not None:
        yield from _other_table(verification, results.sweep)
    if results.probe is not None:
        yield from _other_conditions(verification, results.probe)


def _time(verification: Verification) -> str:
    measured, estimated = verification.measured_epoch_seconds, verification.estimated_epoch_seconds
    if measured is None:
        return "times were not measured"
    takes = f"an epoch takes {format_seconds(measured)} measured"
    if estimated is None or verification.time_ratio is None:
        return f"{takes}, and no estimate is known"
    return f"{takes} against {format_seconds(estimated)} estimated ({verification.time_ratio:.2f} times)"


def _proposal_sentence(verification: Verification, proposal: Proposal) -> str:
    unit = verification.lengths.unit
    lowered = _lowered(verification, proposal)
    named = [
        f"{new:,} instead of {old:,} (up to {format_length(boundary, unit)})"
        for boundary, old, new in lowered[:_MAX_NAMED]
    ]
    if len(lowered) > _MAX_NAMED:
        named.append(f"{len(lowered) - _MAX_NAMED} more in the table")
    sizes = ", ".join(named) or "as they are"
    elsewhere = ""
    if proposal.max_batch_length < verification.max_batch_length:
        limit = format_length(proposal.max_batch_length, unit)
        elsewhere = f"; for samplers that work them out, max_batch_length = {limit}"
    if not proposal.verified:
        return (
            f"No safe sizes were found: the smallest that were tried ({sizes}) failed too. "
            "Probe anew with --force, or give more memory."
        )
    return (
        f"The next smaller safe batch sizes, which passed {counted(proposal.steps, 'step')} in a fresh process: "
        f"{sizes}{elsewhere}."
    )


def _lowered(verification: Verification, proposal: Proposal) -> list[tuple[float, int, int]]:
    """Return boundary, batch size and proposed batch size of the buckets that differ."""
    rows = zip(
        verification.bucket_boundaries, verification.bucket_batch_sizes, proposal.bucket_batch_sizes, strict=True
    )
    return [(boundary, old, new) for boundary, old, new in rows if old != new]


def _memory(verification: Verification) -> str:
    words = []
    if verification.peak_bytes is not None:
        words.append(f"at most {format_size(verification.peak_bytes)} in use")
    if verification.reserved_bytes is not None:
        words.append(f"{format_size(verification.reserved_bytes)} held by the allocator")
    growth = verification.rest_growth_bytes
    if growth is not None:
        words.append("between steps " + (f"it grew by {format_size(growth)}" if growth > 0 else "it did not grow"))
    if verification.alloc_retries:
        words.append(f"the allocator's cache was emptied {counted(verification.alloc_retries, 'time')}")
    return ", ".join(words)


def _failures_table(verification: Verification) -> Table | None:
    failures = verification.failures
    rows = tuple(
        (
            format_shape(failure.batch_size, failure.length, verification.lengths.unit),
            str(failure.bucket + 1),
            _OUTCOMES.get(failure.outcome, failure.outcome),
            failure.error or UNKNOWN,
        )
        for failure in failures[:_MAX_FAILURES]
    )
    if not failures:
        return None
    return Table(
        title="Batches that failed in the verification",
        columns=(
            Column("batch shape", numeric=False),
            Column("bucket"),
            Column("outcome", numeric=False),
            Column("message", numeric=False, wraps=True),
        ),
        rows=rows,
        notes=shown_of(len(rows), len(failures), "", "verify.json"),
    )


def proposal_table(verification: Verification) -> Table | None:
    """Lay out the batch sizes that are safe instead; None where none are proposed, or they failed too."""
    proposal = verification.proposal
    if proposal is None or not proposal.verified:
        return None
    rows = tuple(
        (format_length(boundary, verification.lengths.unit), format_number(old), format_number(new))
        for boundary, old, new in _lowered(verification, proposal)
    )
    return Table(
        title="Batch sizes that are safe instead",
        columns=(Column("up to"), Column("batch size"), Column("safe")),
        rows=rows,
        notes=(
            "The other buckets stay as they are. Set them as bucket_batch_sizes in sampler.yaml, the largest of all as "
            "max_batch_size.",
        ),
    )


def _other_table(verification: Verification, sweep: Sweep) -> Iterator[str]:
    if verification.lengths.fingerprint != sweep.lengths.fingerprint:
        yield (
            "The verification used other lengths than the sweep, so it says nothing about these. "
            "Run `batchtune verify` again."
        )
        return
    row = sweep.recommended_row
    if row is None or (row.boundaries, row.batch_sizes) != (
        verification.bucket_boundaries,
        verification.bucket_batch_sizes,
    ):
        yield (
            "The verification ran another bucket table than the sweep recommends: that of an earlier sweep, or of an "
            "edited sampler.yaml. Use that table for training, or run `batchtune sweep-buckets` and "
            "`batchtune verify` again."
        )


def _other_conditions(verification: Verification, probe: Probe) -> Iterator[str]:
    if verification.workload != probe.workload:
        yield (
            f"The verification ran the workload {verification.workload.words}, the probe "
            f"{probe.workload.words}: one says little about the other. {_AGAIN}"
        )
    if verification.device.name != probe.device.name:
        yield (
            f"The verification ran on {verification.device.name}, the probe on {probe.device.name}: one says little "
            f"about the other. {_AGAIN}"
        )
    elif verification.device.limit_bytes != probe.device.limit_bytes:
        yield (
            f"The verification had a memory limit of {format_size(verification.device.limit_bytes)}, the probe of "
            f"{format_size(probe.device.limit_bytes)}. {_AGAIN}"
        )
    yield from settings_differences(probe.device, verification.device)
