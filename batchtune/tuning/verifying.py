"""The verification from end to end: the recommended batches run for real, judged, and `verify.json` written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from batchtune.batching import epochs
from batchtune.cost import predict
from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.lengths import FloatArray, Lengths
from batchtune.probe.confirmation import Stepper
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    VERIFY_FILE,
    Probe,
    Proposal,
    Trial,
    Verification,
    WorkloadRecord,
    meta_of,
    write_result,
)
from batchtune.shapes import BatchShape
from batchtune.tuning import verify_rules as rules
from batchtune.tuning.estimates import estimated_epoch_seconds
from batchtune.tuning.run_folder import alone_in
from batchtune.tuning.sweep import Costs
from batchtune.tuning.sweeping import costs_of
from batchtune.tuning.verify_plan import Candidate, check_table, shuffled_batches, worst_batches
from batchtune.tuning.verify_proposal import Tried, propose
from batchtune.tuning.verify_steps import Clock, Done, OnProgress, Runner, VerifySettings, until_failure

# Shuffled steps with smaller sizes where the larger ones did not come to any: enough to see a leak.
_PROPOSAL_STEPS = 2 * rules.FEWEST_STEPS


def run_verify(
    lengths: Lengths,
    candidate: Candidate,
    settings: VerifySettings,
    workload: ProbeSettings,
    folder: Path,
    *,
    probe: Probe | None = None,
    limit_bytes: int | None = None,
    on_note: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Verification:
    """Runs the sampler's batches in a worker process and writes `verify.json`, whole or not at all.

    Args:
        lengths: The data set.
        candidate: The sampler.
        settings: How much to run.
        workload: The training step, its device and memory.
        folder: The run folder, held for this process alone while it runs.
        probe: What the estimates are taken from; None: there are none.
        limit_bytes: The memory limit that was probed; None: worked out from `workload`.
        on_note: Told, in a sentence, what the user should know while it happens.
        on_progress: Told before each step.

    Raises:
        ResultError: The table does not take all lengths, the probe was of another device, or the file can't be written.
        WorkloadError: The workload failed with something that is no lack of memory.
        ProbeError: The device can't be used.
    """
    check_table(lengths, candidate.table)
    with (
        alone_in(folder),
        Supervisor(
            structs.replace(workload, trial_timeout_seconds=settings.step_timeout_seconds), limit_bytes, on_note=on_note
        ) as supervisor,
    ):
        found = verify(
            supervisor,
            lengths,
            candidate,
            settings,
            WorkloadRecord(spec=workload.workload, options=workload.options),
            probe=probe,
            on_progress=on_progress,
        )
        write_result(folder / VERIFY_FILE, found)
    return found


def verify(
    stepper: Stepper,
    lengths: Lengths,
    candidate: Candidate,
    settings: VerifySettings,
    workload: WorkloadRecord,
    *,
    probe: Probe | None = None,
    warnings: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    clock: Clock = time.monotonic,
) -> Verification:
    """Runs the worst shapes, then shuffled batches, one step after the other in one worker, and judges them.

    The worst shapes are run once, the largest first, then once more in alternation; a step that fails does not keep
    the others from being tried. Where all pass, the shuffled batches follow, up to the first that fails. Times are
    taken from these alone: the worst shapes are their warm-up.

    Args:
        stepper: What runs the steps.
        lengths: The data set.
        candidate: The sampler; its table takes all lengths.
        settings: How much to run.
        workload: For the record, and for messages.
        probe: What the estimates are taken from; None: there are none.
        warnings: What is to be told besides.
        on_progress: Told before each step.
        clock: Seconds, for `minutes`.

    Raises:
        ResultError: The probe was of another device, or the sampler makes no batch.
        WorkloadError, ProbeError: As for `run_verify`.
    """
    device = stepper.start()
    if probe is not None and device.name != probe.device.name:
        raise ResultError(
            f"the run was measured on {probe.device.name}; this is {device.name}",
            "Verify on the device that was probed, or probe this one in another folder with --run.",
        )
    summary, lengths = lengths.summary(), candidate.padded(lengths)
    costs = costs_of(probe) if probe else Costs()
    if candidate.multiple_of is not None:
        costs = replace(costs, frontier=costs.continued_frontier)
    runner = Runner(stepper, workload.spec, device, on_progress, clock)
    runner.run_worst(worst_batches(lengths, candidate.table, _memory_model(probe)))
    runner.run_shuffled(shuffled_batches(lengths, candidate, settings.seed), settings)
    judged = _Judgement.of(runner, lengths, candidate, settings, costs)
    proposal = None
    if runner.failures and not judged.leaks:  # what still grows would stop any size
        try:
            proposal = _proposal(runner, lengths, candidate, settings, probe, costs)
        except _Leaks as leaks:
            judged.reasons.insert(0, rules.leak_reason(leaks.rest))
        except (ProbeError, WorkloadError) as error:  # what was found out so far must not be lost
            judged.warnings.append(f"Smaller sizes could not be tried: {error.message}")
        else:
            judged.reasons.extend([rules.SINGLE_FAILS] if proposal is None else [])
    return Verification(
        meta=meta_of(Verification),
        lengths=summary,
        workload=workload,
        device=device,
        settings={**settings.recorded(), "multiple_of": candidate.multiple_of},
        bucket_boundaries=candidate.table.boundaries.tolist(),
        bucket_batch_sizes=candidate.table.batch_sizes.tolist(),
        max_batch_length=candidate.max_batch_length,
        worst_steps=len(runner.worst),
        steps=sum(done.stepped.outcome == "ok" for done in runner.shuffled),
        planned_steps=runner.planned_steps,
        epoch_batches=_epoch_batches(lengths, candidate),
        failures=runner.failures,
        alloc_retries=runner.alloc_retries,
        peak_bytes=runner.most("peak_bytes"),
        reserved_bytes=runner.most("reserved_bytes"),
        rest_growth_bytes=_whole(judged.rest),
        reserved_growth_bytes=_whole(judged.reserved),
        estimated_epoch_seconds=judged.timing.estimated_epoch_seconds,
        measured_epoch_seconds=judged.timing.measured_epoch_seconds,
        time_ratio=judged.timing.ratio,
        time_ratio_spread=judged.timing.spread,
        holds=not judged.reasons,
        reasons=judged.reasons,
        warnings=[*warnings, *judged.warnings],
        proposal=proposal,
    )


class _Leaks(Exception):
    """Memory in use between steps creeps."""

    def __init__(self, rest: rules.Growth) -> None:
        super().__init__()
        self.rest = rest


def _proposal(
    failed: Runner,
    lengths: Lengths,
    candidate: Candidate,
    settings: VerifySettings,
    probe: Probe | None,
    costs: Costs,
) -> Proposal | None:
    """Smaller sizes, run as the ones that failed were: in a fresh worker, and for at least as many steps.

    Raises:
        _Leaks: Memory creeps, so that nothing can be said of any size.
    """
    planned = _PROPOSAL_STEPS if failed.planned_steps is None else min(_PROPOSAL_STEPS, failed.planned_steps)
    steps = max(len(failed.shuffled), planned)

    def run(smaller: Candidate) -> Tried:
        failed.stepper.start()
        runner = Runner(
            failed.stepper, failed.workload, failed.device, failed.on_progress, failed.clock, for_proposal=True
        )
        runner.run_worst(worst_batches(lengths, smaller.table, _memory_model(probe)))
        again = replace(settings, steps=steps, minutes=None, epoch=False)
        runner.run_shuffled(shuffled_batches(lengths, smaller, settings.seed), again)
        rest = runner.rest_growth()
        if rest is not None and rules.leaks(rest, runner.device.limit_bytes):
            raise _Leaks(rest)
        return Tried(frozenset(failure.bucket for failure in runner.failures), len(runner.worst) + len(runner.shuffled))

    return propose(lengths, candidate, {failure.bucket for failure in failed.failures}, run, costs.frontier)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """What the steps mean."""

    rest: rules.Growth | None
    reserved: rules.Growth | None
    timing: rules.Timing
    leaks: bool
    reasons: list[str]
    warnings: list[str]

    @classmethod
    def of(
        cls, runner: Runner, lengths: Lengths, candidate: Candidate, settings: VerifySettings, costs: Costs
    ) -> _Judgement:
        """Judges all steps that were run."""
        rest, shuffled = runner.rest_growth(), until_failure(runner.shuffled)
        reserved = rules.growth_of([done.stepped.reserved_bytes for done in shuffled])
        unused = rules.growth_of([_unused_bytes(done.stepped) for done in shuffled])
        timing = _timing(runner.shuffled, lengths, candidate, costs)
        limit = runner.device.limit_bytes
        reasons = rules.failure_reasons(
            runner.failures, candidate.table.boundaries.tolist(), lengths.unit, costs.proven_by
        )
        leaks = rules.leaks(rest, limit)
        if rest is not None and leaks:
            reasons.insert(0, rules.leak_reason(rest))
        if unused is not None and rules.cache_creeps(unused, limit):
            reasons.append(rules.cache_reason(unused))
        if not runner.failures and not timing.within(settings.time_tolerance):
            reasons.append(rules.time_reason(timing, settings.time_tolerance))
        return cls(rest, reserved, timing, leaks, reasons, list(_told(runner, rest, costs)))


def _unused_bytes(stepped: Trial) -> int | None:
    """What the allocator held besides what stays in use between steps; None where it does not tell."""
    if stepped.reserved_bytes is None:
        return None
    return stepped.reserved_bytes - (stepped.rest_bytes or 0)


def _told(runner: Runner, rest: rules.Growth | None, costs: Costs) -> Iterator[str]:
    """What is worth a word, but no reason to fail."""
    if runner.alloc_retries:
        yield rules.retry_warning(runner.alloc_retries)
    if rest is not None and rules.settles(rest, runner.device.limit_bytes):
        yield rules.settling_warning(rest)
    if runner.failures:
        return
    if rest is None:
        known = any(done.stepped.rest_bytes is not None for done in runner.shuffled)
        yield (
            f"Whether memory creeps is not known: that takes {rules.FEWEST_STEPS} steps. Give more with --steps"
            if known
            else "Whether memory creeps is not known: this system does not tell how much is in use"
        )
    if costs.step_seconds is None:
        yield (
            "The time of an epoch was not held against an estimate, as no step times are known: `batchtune probe-oom` "
            "measures them"
        )


def _timing(shuffled: list[Done], lengths: Lengths, candidate: Candidate, costs: Costs) -> rules.Timing:
    timed = [(done.planned.shape, done.stepped.step_seconds) for done in shuffled if done.stepped.step_seconds]
    estimated = _estimated_seconds([shape for shape, _ in timed], costs)
    epoch = _estimated_epoch_seconds(lengths, candidate, costs)
    seconds = [seconds for _, seconds in timed if seconds is not None]
    return rules.timing_of(seconds, estimated, epoch, _epoch_batches(lengths, candidate))


def _estimated_seconds(shapes: list[BatchShape], costs: Costs) -> FloatArray | None:
    if costs.step_seconds is None or not shapes:
        return None
    sizes = np.array([shape.batch_size for shape in shapes], dtype=np.float64)
    longest = np.array([shape.length for shape in shapes])
    targets = [shape.target_length for shape in shapes if shape.target_length is not None]
    if not targets:
        return np.asarray(costs.step_seconds(sizes, longest), dtype=np.float64)
    return np.asarray(costs.step_seconds(sizes, longest, np.array(targets)), dtype=np.float64)


def _estimated_epoch_seconds(lengths: Lengths, candidate: Candidate, costs: Costs) -> float | None:
    """As `sweep.json` has it for its rows: the expectation over shuffles."""
    if costs.step_seconds is None:
        return None
    return estimated_epoch_seconds(lengths, candidate.table, costs.step_seconds, drop_last=candidate.drop_last)


def _epoch_batches(lengths: Lengths, candidate: Candidate) -> int:
    counts = candidate.table.counts(lengths.histogram)
    return epochs.count(counts, candidate.table.batch_sizes, epochs.Dealing(drop_last=candidate.drop_last))


def _memory_model(probe: Probe | None) -> Callable[[BatchShape], float] | None:
    """What a shape needs, in bytes, by the probe's fit; None without one."""
    model = probe.models.peak_bytes if probe else None
    if model is None:
        return None
    return lambda shape: float(predict(model, shape.batch_size, shape.length, shape.target_length))


def _whole(growth: rules.Growth | None) -> int | None:
    return None if growth is None else round(growth.total_bytes)
