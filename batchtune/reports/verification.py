"""What a report says of a verification: sentences, facts, tables, and what to look after."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.table import TIMES, UNKNOWN, Column, Table
from batchtune.reports.words import with_full_stop
from batchtune.results import Probe, Proposal, Sweep, Verification, WorkloadRecord
from batchtune.trust import settings_differences
from batchtune.units import counted, format_length, format_number, format_seconds, format_size

_MAX_FAILURES = 10
_MAX_NAMED = 3
_AGAIN = "Run `batchtune verify` again as it was probed, or probe anew with --force."
_OUTCOMES = {"oom": "out of memory"}


def verification_sentences(verification: Verification) -> list[str]:
    """Whether it holds and why, most important first, with what to do instead where it does not."""
    if verification.holds:
        steps = f"{format_number(verification.steps)} shuffled {_plural(verification.steps, 'step')}"
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
    return [("Verification", run), *_memory_fact(verification), *_time_fact(verification)]


def verification_tables(verification: Verification) -> list[Table]:
    """What failed, and what is proposed instead; none where all passed."""
    return [*_failures_table(verification), *proposal_table(verification)]


def verification_warnings(results: RunResults) -> Iterator[str]:
    """What a verification said besides, and what it does not speak for in this run."""
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
    """Boundary, batch size and proposed batch size of the buckets that differ."""
    rows = zip(
        verification.bucket_boundaries, verification.bucket_batch_sizes, proposal.bucket_batch_sizes, strict=True
    )
    return [(boundary, old, new) for boundary, old, new in rows if old != new]


def _memory_fact(verification: Verification) -> list[tuple[str, str]]:
    words = []
    if verification.peak_bytes is not None:
        words.append(f"at most {format_size(verification.peak_bytes)} in use")
    if verification.reserved_bytes is not None:
        words.append(f"{format_size(verification.reserved_bytes)} held by the allocator")
    if verification.rest_growth_bytes is not None:
        words.append(f"between steps {_grew(verification.rest_growth_bytes)}")
    if verification.alloc_retries:
        words.append(f"the allocator's cache was emptied {counted(verification.alloc_retries, 'time')}")
    return [("Memory", ", ".join(words))] if words else []


def _grew(growth_bytes: int) -> str:
    if growth_bytes > 0:
        return f"it grew by {format_size(growth_bytes)}"
    return "it did not grow"


def _time_fact(verification: Verification) -> list[tuple[str, str]]:
    if verification.measured_epoch_seconds is None:
        return []
    spread = ""
    if verification.time_ratio_spread is not None:
        spread = f"; from step to step the ratio spreads by {verification.time_ratio_spread:.2f}"
    return [("Time", f"{_time(verification)}{spread}")]


def _failures_table(verification: Verification) -> Iterator[Table]:
    failures = verification.failures
    if not failures:
        return
    unit = verification.lengths.unit
    rows = tuple(
        (
            f"{format_number(failure.batch_size)} {TIMES} {format_length(failure.length, unit)}",
            str(failure.bucket + 1),
            _OUTCOMES.get(failure.outcome, failure.outcome),
            failure.error or UNKNOWN,
        )
        for failure in failures[:_MAX_FAILURES]
    )
    left_out = f"{len(rows)} of {len(failures)} shown; all are in verify.json."
    yield Table(
        title="Batches that failed in the verification",
        columns=(
            Column("batch shape", numeric=False),
            Column("bucket"),
            Column("outcome", numeric=False),
            Column("message", numeric=False, wraps=True),
        ),
        rows=rows,
        notes=(left_out,) if len(rows) < len(failures) else (),
    )


def proposal_table(verification: Verification) -> Iterator[Table]:
    """The batch sizes that differ in what is proposed instead; none where nothing is, or it failed too."""
    proposal = verification.proposal
    if proposal is None or not proposal.verified:
        return
    rows = tuple(
        (format_length(boundary, verification.lengths.unit), format_number(old), format_number(new))
        for boundary, old, new in _lowered(verification, proposal)
    )
    yield Table(
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
            "The verification is of other lengths than the sweep: it says nothing of these. "
            "Run `batchtune verify` again."
        )
        return
    row = sweep.recommended_row
    if row is None or (row.boundaries, row.batch_sizes) != (
        verification.bucket_boundaries,
        verification.bucket_batch_sizes,
    ):
        yield (
            "The verification is of another bucket table than the sweep recommends: of an earlier sweep's, or of a "
            "sampler.yaml that was edited. Take that table for training, or run `batchtune sweep-buckets` and "
            "`batchtune verify` again."
        )


def _other_conditions(verification: Verification, probe: Probe) -> Iterator[str]:
    if verification.workload != probe.workload:
        yield (
            f"The verification ran the workload {_workload(verification.workload)}, the probe "
            f"{_workload(probe.workload)}: one says little of the other. {_AGAIN}"
        )
    if verification.device.name != probe.device.name:
        yield (
            f"The verification ran on {verification.device.name}, the probe on {probe.device.name}: one says little of "
            f"the other. {_AGAIN}"
        )
    elif verification.device.limit_bytes != probe.device.limit_bytes:
        yield (
            f"The verification had a memory limit of {format_size(verification.device.limit_bytes)}, the probe of "
            f"{format_size(probe.device.limit_bytes)}. {_AGAIN}"
        )
    yield from settings_differences(probe.device, verification.device)


def _workload(workload: WorkloadRecord) -> str:
    options = "".join(f" {key}={value}" for key, value in workload.options.items())
    return f"{workload.spec}{options}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
