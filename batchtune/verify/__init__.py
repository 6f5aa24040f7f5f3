"""Runs the recommended batches for real: from a plan to judged steps and `verify.json`, or to a table's proof."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from batchtune.allocators import EXPANDABLE, NATIVE
from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.exports.run_configs import (
    own_config,
    sampler_config,
    write_config,
)
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import alternating, in_steps
from batchtune.probe.failures import message_verdict
from batchtune.probe.flow import PROBE_SHARE
from batchtune.probe.messages import failed_in
from batchtune.probe.nodes import Nodes
from batchtune.probe.outcomes import IN_PART, is_covered
from batchtune.probe.requests import Measurer, Ran, RecordedStep, Replay
from batchtune.probe.settings import refuse_other_allocator
from batchtune.probe.supervisor import measurer_for
from batchtune.reports import RunResults
from batchtune.reports.measured import mismatch
from batchtune.results import (
    PROBE_FILE,
    SAMPLER_FILE,
    SWEEP_FILE,
    TRIALS_FILE,
    VERIFY_FILE,
    BatchShape,
    Device,
    PackedConfig,
    Probe,
    Proof,
    SamplerConfig,
    Sweep,
    Trial,
    Verification,
    VerifyFailure,
    VerifyPhase,
    WorkloadRecord,
    read_if_written,
    write_result,
)
from batchtune.run_folder import alone_in, append_trial, read_trials
from batchtune.units import counted, format_length
from batchtune.verify.plan import (
    FEWEST_STEPS,
    TIME_ENDED,
    WENT,
    WHERE,
    DoneSteps,
    PackedPlan,
    Plan,
    PlannedBatch,
    Subject,
    VerifyPlan,
    VerifySettings,
    judge,
    subject_of,
)

# Shuffled batches run in this many more processes if starting one takes at most this share of the time of the steps
# so far; in a brief plan, if its time is enough for that. On a GPU one more always proves a table: what the allocator
# holds differs from process to process.
_MOST_RESTARTS = 2
_START_SHARE = 0.5
# Most processes that run out of memory do so in the first 32 steps.
_STEPS_AFTER_A_RESTART = 64
_FAULTS = ("crash", "timeout")
# On CUDA's native allocator a table of a checkpointed transformer-lm large in 80 GiB passed in two processes, and 2 of
# 5 others ran out of memory in their first steps. So recorded steps are replayed in other orders.
_FEWEST_RECORDED = 3
_MOST_RECORDED = 60
_FEWEST_REPLAY_SECONDS = 10.0
_MOST_REPLAY_SECONDS = 300.0


class VerifyProgress(NamedTuple):
    """The progress of a verification, before each step.

    Attributes:
        done, total: Steps of this phase, of shuffled ones in this process.
        process: Number of the process, from 1.
    """

    phase: VerifyPhase
    shape: BatchShape
    done: int
    total: int
    device: Device
    process: int = 1


OnVerifyProgress = Callable[[VerifyProgress], None]


def run_verify(
    plan: Plan,
    subject: Subject,
    deadline: float = math.inf,
    *,
    folder: Path,
    on_note: Callable[[str], None],
    on_progress: OnVerifyProgress,
    nodes: Nodes | None = None,
) -> Verification:
    """Run the sampler's batches in worker processes and write `verify.json`, unless the plan is a brief one.

    Ends at the deadline on the monotonic clock. Calls `on_note` with a sentence for the user, `on_progress` before each
    step. Raises ResultError if the probe was of another device or the file can't be written, WorkloadError if the
    workload failed for another reason than memory, ProbeError if the device can't be used, or if something else has
    taken its memory.
    """
    settings = structs.replace(
        subject.settings, trial_timeout_seconds=plan.settings.step_timeout_seconds
    )
    measurer = measurer_for(
        settings,
        subject.limit_bytes,
        lengths=plan.lengths,
        on_note=on_note,
        nodes=nodes,
    )
    with alone_in(folder), measurer:
        verification = verify(
            measurer,
            plan,
            settings.subject,
            on_progress=on_progress,
            deadline=deadline,
        )
        if not plan.settings.brief:
            write_result(folder / VERIFY_FILE, verification)
    return verification


def verify(
    stepper: Measurer,
    plan: Plan,
    workload: WorkloadRecord,
    *,
    on_progress: OnVerifyProgress,
    deadline: float = math.inf,
) -> Verification:
    """Run the planned batches, one step after the other, until the deadline on the monotonic clock; and judge them.

    The worst shapes are run once, the largest first, then once more in alternation; a step that
    fails does not keep the others from being tried. If all pass, shuffled batches follow, up to the
    first that fails. Only the shuffled batches are timed: the worst shapes are their warm-up. Then
    the shuffled batches' requests to a GPU's allocator are replayed in other orders. Where the
    allocator fragments, pairs of shapes follow, each on an emptied cache. If all passed, other
    shuffled batches run in further processes: training starts in a fresh one. A brief plan runs the
    worst shapes among the shuffled ones, and ends with the first failure; its shuffled batches end
    once they take longer than its settings say. Raises as `run_verify` does.
    """
    started = time.monotonic()
    device = stepper.start()
    start_seconds = time.monotonic() - started
    if plan.probe is not None and device.name != plan.probe.device.name:
        raise ResultError(
            f"the run was measured on {plan.probe.device.name}; this is {device.name}",
            "Verify on the device that was probed, or probe this one in another folder with --run.",
        )
    refuse_other_allocator("the table", plan.config.evidence.allocator, device)
    runner = _Runner(plan, stepper, workload.spec, device, on_progress, deadline)
    if plan.settings.brief:
        runner.enough_at = time.monotonic() + 2 * plan.settings.seconds
    runner.run(start_seconds)
    return judge(runner.done, plan, workload, device)


@dataclass(slots=True)
class _Runner:
    """Runs a verification's steps one after the other, and keeps their trials in `done`."""

    plan: Plan
    stepper: Measurer
    workload: str
    device: Device
    on_progress: OnVerifyProgress
    deadline: float
    enough_at: float = math.inf  # shuffled batches then end, once the fewest have run
    fewest_steps: int = FEWEST_STEPS
    done: DoneSteps = field(default_factory=DoneSteps)
    release: bool = False
    last_step: list[PlannedBatch] = field(default_factory=list)
    recorded: list[tuple[list[PlannedBatch], RecordedStep | None]] = field(
        default_factory=list
    )

    def run(self, start_seconds: float) -> None:
        """Run all phases; a process takes `start_seconds` to start."""
        done = self.done
        if not self.plan.settings.brief:
            self._run_worst()
        planned = self.plan.planned_steps
        if not done.failures:
            largest = self._largest_of_each_bucket()
            self.fewest_steps += len(largest)
            whole = planned - len(largest) % self.device.accumulation
            shuffled = itertools.islice(self.plan.shuffled_batches(), whole)
            self._run(
                "shuffled",
                itertools.chain(largest, shuffled),
                done.shuffled,
                len(largest) + whole,
            )
        if not done.failures:
            self._replay()
        if self.device.fragments and not self._is_refuted:
            self._run_pairs()
        for restart in range(1, _MOST_RESTARTS + 1):
            if done.failures or done.unfinished or not self._may_restart(start_seconds):
                break
            self.stepper.start()
            self.release = False
            steps = min(planned, _STEPS_AFTER_A_RESTART)
            done.processes += 1
            restarted: list[Trial] = []
            self._run(
                "shuffled",
                itertools.islice(self.plan.shuffled_batches(restart), steps),
                restarted,
                steps,
            )
            done.restarted += restarted
        if done.failures and self.device.kind == "cuda":
            self.stepper.start()  # or an error, if something else has taken the memory: then no shape is to blame

    @property
    def _is_refuted(self) -> bool:
        """Whether no further failure matters: a brief plan only asks whether all batches fit."""
        return self.plan.settings.brief and bool(self.done.failures)

    def _may_restart(self, start_seconds: float) -> bool:
        """Return whether another process is worth the time of its start."""
        if self.device.fragments and not self.done.restarted:
            return True
        if not self.plan.settings.brief:
            return start_seconds <= _START_SHARE * self.done.seconds
        ends = self.enough_at
        if self.device.kind == "cuda" and not self.done.restarted:
            ends = self.deadline
        return time.monotonic() + start_seconds < ends

    def _run_worst(self) -> None:
        """Run the worst shapes, then those that passed in alternation."""
        done = self.done
        worst = self.plan.worst_batches
        self._run("worst", worst, done.worst, 2 * len(worst))
        passed = [
            batch
            for batch, trial in zip(worst, done.worst, strict=False)
            if trial.outcome == "ok"
        ]
        self._run("worst", alternating(passed), done.worst, len(worst) + len(passed))

    def _largest_of_each_bucket(self) -> list[PlannedBatch]:
        """Return what a brief plan runs first on a GPU: some buckets have one batch in an epoch.

        In random order, and then slightly shorter ones: where shapes repeat, blocks fit, but those of others may not.
        """
        if not self.plan.settings.brief or self.device.kind != "cuda":
            return []
        chosen = random.Random(self.plan.seed)
        worst = self.plan.worst_batches
        shorter = self.plan.slightly_shorter
        batches = [
            *chosen.sample(worst, len(worst)),
            *chosen.sample(shorter, len(shorter)),
        ]
        return batches[: _MOST_RECORDED - FEWEST_STEPS]

    def _replay(self) -> None:
        """Replay what the recorded steps asked of a GPU's allocator, in other orders, until one runs out of memory."""
        steps = [step for _, step in self.recorded if step is not None]
        # A step that could not be recorded leaves unknown what later ones free.
        if len(steps) < max(_FEWEST_RECORDED, len(self.recorded)):
            return
        progress = VerifyProgress(
            phase="replayed",
            shape=self.recorded[0][0][0].shape,
            done=0,
            total=len(self.recorded),
            device=self.device,
        )
        self.on_progress(progress)
        limit_bytes = self.device.limit_bytes
        if self.device.allocator == EXPANDABLE:
            limit_bytes -= int(IN_PART * limit_bytes)
        request = Replay(
            limit_bytes=limit_bytes,
            steps=steps,
            seconds=max(_FEWEST_REPLAY_SECONDS, self.plan.settings.seconds),
            most_seconds=min(_MOST_REPLAY_SECONDS, self.deadline - time.monotonic()),
            seed=self.plan.seed,
        )
        replayed = self.stepper.replay(request)
        if replayed is None:
            return
        self.done.replayed = replayed.steps
        self.done.replayed_processes = replayed.processes
        if replayed.failed is not None:
            # Of several batches of a step, the largest needs the most.
            step, _ = self.recorded[replayed.failed]
            largest = max(step, key=lambda batch: batch.shape.padded_length)
            failed = Trial.of(largest.shape, "oom", error=replayed.error)
            self._fail("replayed", replayed.steps, largest.bucket, failed)

    def _run_pairs(self) -> None:
        """Run the sequences, but none with a shape that has failed in one."""
        done = self.done
        sequences = self.plan.sequences
        total = sum(map(len, sequences))
        done.planned_pairs = total - len(sequences)
        failed = {failure.shape for failure in done.failures}
        for sequence in sequences:
            if self._is_refuted:
                return
            if any(batch.shape in failed for batch in sequence):
                continue
            self.release = True
            before = len(done.pairs)
            self._run("pairs", sequence, done.pairs, total)
            ran = done.pairs[before:]
            failed |= {trial.shape for trial in ran if trial.outcome != "ok"}
            passed = sum(trial.outcome == "ok" for trial in ran)
            # A step of more batches than the sequence has repeats it.
            done.passed_pairs += max(0, min(passed, len(sequence)) - 1)

    def _run(
        self,
        phase: VerifyPhase,
        batches: Iterable[PlannedBatch],
        trials: list[Trial],
        total: int,
    ) -> None:
        """Run a phase; `trials` are those of its steps so far. A failure ends all but the worst ones."""
        batches_per_step = 1  # where each is timed, a step trains on equal ones
        if self.plan.settings.brief:
            batches_per_step = self.device.accumulation
        for step in in_steps(batches, batches_per_step):
            if time.monotonic() > self.deadline:
                self.done.unfinished = True
                return
            has_enough = phase == "shuffled" and len(trials) >= self.fewest_steps
            if has_enough and time.monotonic() > self.enough_at:
                return
            shapes = [planned.shape for planned in step]
            progress = VerifyProgress(
                phase=phase,
                shape=shapes[0],
                done=len(trials),
                total=total,
                device=self.device,
                process=self.done.processes,
            )
            self.on_progress(progress)
            recording = self._records(phase)
            ran = self._take_step(shapes, recording=recording)
            trial = ran.trial
            if recording:
                self.recorded.append((step, ran.recorded))
            self.release = trial.outcome != "ok"  # a failure may leave the cache full
            if trial.outcome == "ok":
                trials += trial.of_each(shapes)
                self.last_step = step
                continue
            trials.append(trial)
            shape = trial.shape
            possible = [*self.last_step, *step]  # a loop may have held one of them
            is_of = (batch for batch in possible if batch.shape == shape)
            bucket = next(is_of, step[0]).bucket
            self._fail(phase, len(trials) - 1, bucket, trial)
            if phase != "worst":
                return

    def _fail(self, phase: VerifyPhase, step: int, bucket: int, trial: Trial) -> None:
        failure = VerifyFailure(
            phase=phase,
            step=step,
            bucket=bucket,
            batch_size=trial.batch_size,
            length=trial.length,
            target_length=trial.target_length,
            outcome=trial.outcome,
            error=trial.error,
        )
        self.done.failures.append(failure)

    def _records(self, phase: VerifyPhase) -> bool:
        """Return whether to record what a step asks of torch's allocator, on rank 0.

        Of several ranks, the first two steps are left out: DDP makes its buckets in them.
        """
        done = self.done
        begun = len(done.worst) + len(done.shuffled)
        return (
            self.device.allocator in (NATIVE, EXPANDABLE)
            and (self.device.world_size == 1 or begun >= 2 * self.device.accumulation)
            and phase in ("worst", "shuffled")
            and done.processes == 1
            and len(self.recorded) < _MOST_RECORDED
        )

    def _take_step(self, shapes: Sequence[BatchShape], *, recording: bool) -> Ran:
        """Run one step of these batches; a crash or a hang counts only if it comes again, with one of them alone.

        What may be an OOM in disguise counts as one only if a smaller batch then passes.
        """
        ran = self.stepper.step(
            shapes[0], shapes[1:], release=self.release, recording=recording
        )
        if ran.trial.outcome in _FAULTS:
            for alone in shapes:
                ran = self.stepper.step(alone)
                if ran.trial.outcome != "ok":
                    break
        trial = ran.trial
        shape = trial.shape
        is_error = trial.outcome == "error"
        if trial.outcome == "oom" and message_verdict(trial.error or "") == "disguised":
            smaller = replace(shape, batch_size=max(1, shape.batch_size // 2))
            is_error = (
                smaller == shape
                or self.stepper.step(smaller, release=True).trial.outcome != "ok"
            )
        if not is_error:
            return ran
        raise WorkloadError(
            failed_in(self.workload, ran),
            f"It did not run out of memory: the verification stops, and no {VERIFY_FILE} is written. "
            "Fix it and run the same command again.",
            ran.traceback,
        )


# Proves the recommended table: runs it in shuffled training, rules out what fails, and tunes again until it holds.
#
# On CUDA's native allocator a batch that passes alone may run out of memory after another one, and a smaller one may do
# so more often. So what fails is ruled out, the probe and the sweep go on, and all batches of the new table run again.

# A proof may take this share of the time that the probe took. Where the allocator fragments it may take more: fewer
# steps prove little there.
SHARE_OF_THE_PROBE = 1 / 3
_FEWEST_SECONDS = 1.0
_FEWEST_SECONDS_OF_PAIRS = 30.0
# All tables together may take this many times as long as the probe, and always ten minutes.
_ALL_TABLES = 2.0
_ALL_TABLES_SECONDS = 600.0
# How many tables with smaller batches are tried, and then how many other rows.
_MOST_SMALLER = 6
_MOST_OTHERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """The steps of a tuning, which proving repeats.

    Attributes:
        asked: The fields of `ProbeSettings` that the user gave.
        probe: Probes for at most that many minutes (None: no limit); whether it goes on from one of this tuning.
        sweep: Sweeps, and writes `sweep.json` and `sampler.yaml`; rows with these names do not count as proven.
        run: Runs a plan until a deadline on the monotonic clock.
        verify: How to verify; None: only prove.
        deadline: When all must end, on the monotonic clock; None: when it is done.
        probed_seconds: How long the probe took with all starts of the workload, which take long for a script.
    """

    folder: Path
    lengths: Lengths
    asked: Mapping[str, Any]
    probe: Callable[[float | None, bool], Probe]
    sweep: Callable[[frozenset[str]], Sweep]
    run: Callable[[Plan, Subject, float], Verification]
    on_note: Callable[[str], None]
    verify: VerifySettings | None = None
    deadline: float | None = None
    probed_seconds: float = 0.0

    def tune(
        self, started: float, minutes: float | None
    ) -> tuple[Sweep, Verification | None]:
        """Probe and prove within these minutes, from `started` on the monotonic clock. Raises as both do."""
        deadline = self.deadline
        probe_minutes = None
        if minutes is not None:
            deadline = started + 60 * minutes
            probe_minutes = minutes * PROBE_SHARE
        began = time.monotonic()
        probed = self.probe(probe_minutes, False)
        spent = time.monotonic() - began
        return replace(self, deadline=deadline, probed_seconds=spent).prove(probed)

    def prove(self, probe: Probe) -> tuple[Sweep, Verification | None]:
        """Return the sweep with its proof, and the last verification; None if no batches were run, or packed ones.

        Packed micro-batches are only proven. Raises as `run_verify` does.
        """
        swept = self.sweep(frozenset())
        times = [trial.elapsed_seconds for trial in probe.trials]
        spent = max(self.probed_seconds, math.fsum(times))
        ends = time.monotonic() + max(_ALL_TABLES_SECONDS, _ALL_TABLES * spent)
        if self.deadline is not None:
            ends = self.deadline
        settings = self.verify
        if settings is None or swept.packed is not None:
            settings = proof_settings(probe, spent)
        refuted: set[str] = set()
        verification = None
        for table in itertools.count(1):
            packing = swept.packed
            row = swept.recommended_row
            if packing is None and row is None:
                break
            if packing is not None and packing.max_tokens > (
                packing.proven_tokens or 0
            ):
                break  # the probe has run no batches as large
            if self.verify is None and swept.proof is not None and swept.proof.holds:
                break  # by an earlier command
            if time.monotonic() > ends or table > _MOST_SMALLER + _MOST_OTHERS:
                reason = "no time was left to run it"
                if table > 1:
                    reason += f", after {counted(table - 1, 'table')} had failed"
                limit = probe.device.limit_bytes
                proof = Proof(tables=table, limit_bytes=limit, reason=reason)
                swept = record(self.folder, swept, proof)
                break
            verification = None
            if table == 1:
                verification = self._refutation(swept, probe)
            if verification is None:
                plan = self._plan(sampler_config(swept, probe), settings, probe)
                verification = self.run(plan, self._subject(probe), ends)
            proof = proof_of(verification, table)
            swept = record(self.folder, swept, proof)
            if proof.holds or verification.unfinished:
                break
            self.on_note(f"Not proven: {proof.reason}.")
            smaller = None
            if table <= _MOST_SMALLER:
                smaller = self._with_smaller_batches(probe, verification)
            if smaller is None:
                if packing is not None or row is None:
                    break  # all packers have the same budget
                refuted.add(row.name)
            probe = smaller or probe
            swept = self.sweep(frozenset(refuted))
        if swept.packed is not None:
            verification = None
        return swept, verification

    def _plan(
        self,
        config: SamplerConfig | PackedConfig,
        settings: VerifySettings,
        probe: Probe,
    ) -> Plan:
        if isinstance(config, PackedConfig):
            return PackedPlan(
                lengths=self.lengths, config=config, settings=settings, probe=probe
            )
        return VerifyPlan(
            lengths=self.lengths, config=config, settings=settings, probe=probe
        )

    def _subject(self, probe: Probe) -> Subject:
        """Return what was probed, as the user named it: the record may hide parts of a command."""
        probed = probe.workload
        options = {**probed.options, **self.asked.get("options", {})}
        named = {"workload": probed.spec, **self.asked, "options": options}
        return subject_of(self.lengths, probe, named, self.folder)

    def _refutation(self, swept: Sweep, probe: Probe) -> Verification | None:
        """Return the verification, by an earlier command, in which the recommended table has failed at this limit."""
        if swept.proof is None:
            return None
        verified = read_if_written(self.folder / VERIFY_FILE, Verification)
        run = RunResults(name=self.folder.name, sweep=swept, verification=verified)
        if (
            verified is None
            or not verified.failures
            or verified.device.limit_bytes != probe.device.limit_bytes
            or mismatch(run) is not None
        ):
            return None
        return verified

    def _with_smaller_batches(
        self, probe: Probe, verification: Verification
    ) -> Probe | None:
        """Rule out what failed, and make all batches smaller; None if none is left then."""
        rule_out(self.folder, probe, verification.failures[0])
        minutes = None
        if self.deadline is not None:
            minutes = max(0.0, self.deadline - time.monotonic()) / 60 + 1e-9
        try:
            return self.probe(minutes, True)
        except ProbeError as error:
            self.on_note(f"No smaller batches are proven: {error.message}.")
            return None


def proof_settings(probe: Probe, spent_seconds: float) -> VerifySettings:
    """Return how much to run to prove the batches that a probe has found in that time."""
    seconds = max(_FEWEST_SECONDS, SHARE_OF_THE_PROBE * spent_seconds)
    if probe.device.fragments:
        seconds = max(_FEWEST_SECONDS_OF_PAIRS, seconds)
    return VerifySettings(brief=True, seconds=seconds / 2)


def record(folder: Path, swept: Sweep, proof: Proof) -> Sweep:
    """Write a proof of the recommended row into `sweep.json` and `sampler.yaml`; return the sweep with it."""
    proven = structs.replace(swept, proof=proof)
    write_result(folder / SWEEP_FILE, proven)
    write_config(proven, folder)
    return proven


def proof_of(verification: Verification, tables: int = 1) -> Proof:
    """Return what the verification of the last of these tables proves."""
    reason = None
    if verification.failures:
        failure = verification.failures[0]
        shape = f"{failure.batch_size:,} × {format_length(failure.length, verification.lengths.unit)}"
        if not verification.bucket_boundaries:
            shape = f"at most {verification.max_batch_length:,.0f} tokens"
        went = WENT[failure.outcome]
        reason = f"a batch of {shape} {went} {WHERE[failure.phase]}"
    elif verification.unfinished:
        reason = TIME_ENDED.replace("The", "the")
    return Proof(
        steps=verification.steps + verification.restarted_steps,
        pairs=verification.pairs,
        processes=verification.processes,
        replayed_steps=verification.replayed_steps,
        replayed_processes=verification.replayed_processes,
        ooms=sum(failure.outcome == "oom" for failure in verification.failures),
        tables=tables,
        highest_reserved_bytes=verification.reserved_bytes,
        alloc_retries=verification.alloc_retries,
        limit_bytes=verification.device.limit_bytes,
        reason=reason,
    )


def rule_out(folder: Path, probe: Probe, failure: VerifyFailure) -> None:
    """Journal a table's failure as a failure of the batch at the limit that should have contained it."""
    with alone_in(folder):
        path = folder / TRIALS_FILE
        trial = Trial.of(
            _containing(probe, failure.shape),
            failure.outcome,
            index=len(read_trials(path)),
            error=f"in shuffled training, as {failure.shape}: {failure.error or failure.outcome}",
            confirmation=True,
            shuffled=True,
        )
        append_trial(path, trial)


def _containing(probe: Probe, shape: BatchShape) -> BatchShape:
    """Return the smallest batch at the limit that is this one or contains it; this one without such a batch.

    Of packed batches, those that prove the budget are equally large.
    """
    if probe.packed is not None:
        return probe.trials[probe.packed.proofs[0]].shape
    points = (*probe.frontier, *probe.joint_frontier)
    covering = [point.shape for point in points if is_covered(shape, [point.shape])]
    return min(covering, key=lambda other: other.padded_length, default=shape)


def mark_proven(folder: Path, verification: Verification) -> None:
    """Record what a verification proves, if it ran the recommended batches, and `sampler.yaml` is as it was written."""
    swept = read_if_written(folder / SWEEP_FILE, Sweep)
    if swept is None:
        return
    run = RunResults(name=folder.name, sweep=swept, verification=verification)
    if (
        swept.recommended is None
        or swept.packed is not None
        or mismatch(run) is not None
    ):
        return
    probe = read_if_written(folder / PROBE_FILE, Probe)
    written = (folder / SAMPLER_FILE).read_text(encoding="utf-8")
    if written == own_config(swept, probe):
        record(folder, swept, proof_of(verification))
