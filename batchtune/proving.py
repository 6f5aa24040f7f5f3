"""Proves the recommended table: runs it in shuffled training, rules out what fails, and tunes again until it holds.

On CUDA's native allocator a batch that passes alone may run out of memory after another one, and a smaller one may do
so more often. So what fails is ruled out, the probe and the sweep go on, and all batches of the new table run again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from batchtune.errors import ProbeError
from batchtune.exports.run_configs import (
    render_sampler_yaml,
    sampler_config,
    write_config,
)
from batchtune.lengths import Lengths
from batchtune.probe.bounds import is_covered
from batchtune.probe.flow import PROBE_SHARE
from batchtune.reports import RunResults
from batchtune.reports.measured import mismatch
from batchtune.results import (
    PROBE_FILE,
    SAMPLER_FILE,
    SWEEP_FILE,
    TRIALS_FILE,
    VERIFY_FILE,
    BatchShape,
    PackedConfig,
    Probe,
    Proof,
    SamplerConfig,
    Sweep,
    Trial,
    Verification,
    VerifyFailure,
    read_if_written,
    write_result,
)
from batchtune.run_folder import alone_in, append_trial, read_trials
from batchtune.units import counted, format_length
from batchtune.verify.packed_plan import PackedPlan
from batchtune.verify.plan import (
    Plan,
    Subject,
    VerifyPlan,
    VerifySettings,
    subject_of,
)
from batchtune.verify.rules import TIME_ENDED, WENT, WHERE

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
        """Probe and prove within these minutes, from `started` on the monotonic clock. Raises as these do."""
        prover = self
        probe_minutes = None
        if minutes is not None:
            prover = replace(self, deadline=started + 60 * minutes)
            probe_minutes = minutes * PROBE_SHARE
        began = time.monotonic()
        probed = self.probe(probe_minutes, False)
        return replace(prover, probed_seconds=time.monotonic() - began).prove(probed)

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
        reason = f"a batch of {shape} {WENT[failure.outcome]} {WHERE[failure.phase]}"
    elif verification.unfinished:
        reason = f"{TIME_ENDED[0].lower()}{TIME_ENDED[1:]}"
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
    """Journal the failure of a table as one of the batch at the limit that was to contain it."""
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
    written = render_sampler_yaml(sampler_config(swept, probe))
    if (folder / SAMPLER_FILE).read_text(encoding="utf-8") == written:
        record(folder, swept, proof_of(verification))
