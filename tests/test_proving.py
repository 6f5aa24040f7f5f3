"""The proof of a recommended table, and what is done where it fails, on a made device whose cache fragments."""

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from made_trials import ran
from memory_laws import LAWS, LIMIT_BYTES, LawDevice
from msgspec import structs
from packed_laws import PackedDevice

from batchtune.buckets.sweep import run_sweep
from batchtune.configs import read_any_sampler_yaml, read_sampler_yaml
from batchtune.errors import ProbeError
from batchtune.exports.run_configs import write_config
from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.settings import ProbeSettings
from batchtune.reports import load_run, render
from batchtune.reports.gate import RuleInputs, exit_code, judge, parse_rules
from batchtune.results import (
    BatchShape,
    SweepSettings,
    write_result,
)
from batchtune.run_folder import read_trials
from batchtune.verify import Prover, mark_proven, verify
from batchtune.verify.plan import VerifyPlan, VerifySettings

LENGTHS = Lengths.of(np.random.default_rng(0).integers(4, 41, 1500))
SETTINGS = ProbeSettings(
    workload="made.py:Made", options={}, num_lengths=4, max_lengths=4
)


class FragmentedDevice(LawDevice):
    """After a step on an emptied cache, another shape has less than the limit; turns show it only if asked to.

    Attributes:
        usable: The share of the limit that it has.
        shown_in_turns: Whether steps after any other step have no more.
        released: How many steps ran on an emptied cache.
    """

    def __init__(self, law, lengths, *, usable=1.0, shown_in_turns=False):
        super().__init__(law, lengths)
        self.device = structs.replace(self.device, kind="cuda", allocator="native")
        self.usable = usable
        self.shown_in_turns = shown_in_turns
        self.released = 0
        self._was_emptied = False

    def step(self, shape, others=(), *, release=False, **how):
        self.released += release
        was_emptied = self._was_emptied
        self._was_emptied = release or self.shown_in_turns
        if was_emptied and self.bytes(shape) > self.usable * LIMIT_BYTES:
            return ran(shape, "oom", error="CUDA out of memory", worker=self.worker)
        return super().step(shape, others, release=release, **how)


class FragmentedRows(FragmentedDevice, PackedDevice):
    """The same for packed batches."""


def prover(device, folder, **changes):
    """The steps of `tune`, on a made device."""
    sweep_settings = SweepSettings(strategies=("optimal", "linear"), num_buckets=(3, 4))
    given = {"on_note": lambda text: None, **changes}

    def probe(minutes, goes_on):
        return run_probe(
            LENGTHS,
            structs.replace(SETTINGS, minutes=minutes),
            folder,
            sweep_settings=sweep_settings,
            hooks=ProbeHooks(
                measurer=device, on_note=given["on_note"], goes_on=goes_on
            ),
        )

    def sweep(refuted):
        swept = run_sweep(LENGTHS, sweep_settings, folder, refuted=refuted)
        write_config(swept, folder)
        return swept

    def run(plan, subject, deadline):
        return verify(
            device,
            plan,
            SETTINGS.subject,
            on_progress=lambda progress: None,
            deadline=deadline,
        )

    return Prover(
        folder=folder,
        lengths=LENGTHS,
        asked={},
        probe=probe,
        sweep=sweep,
        run=run,
        **given,
    )


def proven(device, folder, **changes):
    steps = prover(device, folder, **changes)
    return steps.prove(steps.probe(None, False))


made = partial(FragmentedDevice, LAWS["linear"], LENGTHS)


def plan_of(folder, **settings):
    return VerifyPlan(
        lengths=LENGTHS,
        config=read_sampler_yaml(folder / "sampler.yaml"),
        settings=VerifySettings(**settings),
    )


def fails_the_gate(folder, field="unproven"):
    inputs = RuleInputs(results=load_run(folder))
    return exit_code(judge(parse_rules([f"{field} > 0"]), inputs)) != 0


def said_of(folder):
    return " ".join(render("terminal", load_run(folder)).split())


def test_a_table_that_runs_is_proven(tmp_path):
    device = made()
    swept, _ = proven(device, tmp_path)
    proof = swept.proof
    assert proof.holds
    assert (proof.tables, proof.ooms, swept.unproven) == (1, 0, 0)
    assert proof.pairs > 0 and proof.steps > 12
    assert proof.processes == device.worker - 2 > 1  # the probe's own, and its turns'
    assert not fails_the_gate(tmp_path)
    evidence = read_sampler_yaml(tmp_path / "sampler.yaml").evidence
    assert (evidence.unproven, evidence.proof) == (0, proof)
    ran = f"{proof.steps} shuffled batches and {proof.pairs} pairs in 3 processes"
    assert ran in said_of(tmp_path)


def test_a_token_budget_is_proven_and_lowered_where_it_fails(tmp_path):
    device = FragmentedRows(LAWS["linear"], LENGTHS, usable=0.9)
    device.memory = lambda shape: 1e6 * shape.tokens
    notes = []
    swept, verification = proven(device, tmp_path, on_note=notes.append)
    proof = swept.proof
    budget = swept.packed.max_tokens
    assert verification is None  # packed micro-batches are proven, and not verified
    assert proof.holds and proof.tables > 1
    assert (
        0.75 * LIMIT_BYTES
        < device.bytes(BatchShape.packed([40] * (budget // 40)))
        <= 0.9 * LIMIT_BYTES
    )
    assert any("tokens ran out of memory after another shape" in note for note in notes)
    assert proof.steps > 12 and swept.unproven == 0
    evidence = read_any_sampler_yaml(tmp_path / "sampler.yaml").evidence
    assert (evidence.unproven, evidence.proof) == (0, proof)
    assert f"; {proof.tables - 1} earlier table" in said_of(tmp_path)
    failed = structs.replace(proof, reason="the time ended")
    for other, fails in ((proof, False), (failed, True), (None, False)):
        write_result(tmp_path / "sweep.json", structs.replace(swept, proof=other))
        assert fails_the_gate(tmp_path, "packed.unproven") == fails
    assert "not yet proven in shuffled training: `batchtune tune`" in said_of(tmp_path)


def test_what_fails_is_lowered_and_all_is_proven_again(tmp_path):
    device = made(usable=0.93)
    notes = []
    swept, verification = proven(device, tmp_path, on_note=notes.append)
    assert [note for note in notes if "earlier run" in note] == []
    proof = swept.proof
    row = swept.recommended_row
    assert proof.holds and proof.tables > 1
    assert verification.bucket_batch_sizes == row.batch_sizes
    assert all(
        device.bytes(batch.shape) <= 0.93 * LIMIT_BYTES
        for batch in plan_of(tmp_path).worst_batches
    )
    trials = read_trials(tmp_path / "trials.jsonl")
    ruled_out = [trial for trial in trials if trial.confirmation]
    assert len(ruled_out) == proof.tables - 1  # the first failure refutes a table
    margin = load_run(tmp_path).probe.margin
    assert margin.fragments_bytes == int(0.075 * (proof.tables - 1) * LIMIT_BYTES)
    assert all("in shuffled training" in str(trial.error) for trial in ruled_out)
    assert trials[ruled_out[0].index :] == ruled_out  # smaller tables take no trials


def test_what_a_verification_refuted_is_ruled_out(tmp_path):
    proven(made(), tmp_path)
    narrow = made(usable=0.9, shown_in_turns=True)
    plan = plan_of(tmp_path, steps=12)
    failed = verify(narrow, plan, SETTINGS.subject, on_progress=lambda progress: None)
    write_result(tmp_path / "verify.json", failed)
    mark_proven(tmp_path, failed)
    proof = proven(made(), tmp_path)[0].proof
    assert failed.failures and proof.holds and proof.tables == 2
    assert read_trials(tmp_path / "trials.jsonl")[-1].shuffled


def test_what_fails_in_turns_lowers_all_without_further_trials(tmp_path):
    swept, _ = proven(made(usable=0.88, shown_in_turns=True), tmp_path)
    assert swept.proof.holds and swept.proof.tables == 1
    trials = read_trials(tmp_path / "trials.jsonl")
    failed = [trial for trial in trials if trial.outcome == "oom" and trial.shuffled]
    assert len(failed) == 2 and trials[-2:] == failed
    assert all("interleaved" in trial.error for trial in failed)
    assert load_run(tmp_path).probe.margin.fragments_bytes == int(0.15 * LIMIT_BYTES)


def test_where_nothing_holds_other_rows_are_tried(tmp_path):
    swept, _ = proven(made(usable=0.0), tmp_path)
    assert not swept.proof.holds
    assert swept.unproven == swept.recommended_row.sizes_in_use
    assert any(row.unproven for row in swept.rows)
    assert fails_the_gate(tmp_path)
    evidence = read_sampler_yaml(tmp_path / "sampler.yaml").evidence
    assert evidence.unproven == swept.unproven


def test_tables_have_twice_the_time_of_the_probe_with_its_starts(tmp_path, monkeypatch):
    clock = [0.0]
    made_time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("batchtune.verify.time", made_time)
    steps = prover(made(), tmp_path)
    deadlines = []

    def probe(minutes, goes_on):
        clock[0] += 400
        return steps.probe(minutes, goes_on)

    def run(plan, subject, deadline):
        deadlines.append(deadline)
        return steps.run(plan, subject, float("inf"))

    replace(steps, probe=probe, run=run).tune(0.0, None)
    assert deadlines == [1200.0]


def test_without_time_it_is_written_and_unproven(tmp_path):
    swept, verification = proven(made(), tmp_path, deadline=time.monotonic() - 1)
    assert verification is None
    assert swept.proof.reason == "no time was left to run it"
    assert fails_the_gate(tmp_path)


def test_a_proof_is_kept_while_the_sweep_is_the_same(tmp_path):
    swept, _ = proven(made(), tmp_path)
    written = (tmp_path / "sampler.yaml").read_bytes()
    again, verification = proven(made(usable=0.0), tmp_path)
    assert verification is None
    assert again == swept
    assert (tmp_path / "sampler.yaml").read_bytes() == written


def test_memory_that_others_have_taken_rules_nothing_out(tmp_path):
    class Filled(FragmentedDevice):
        def start(self):
            if self.released:
                raise ProbeError("only 1 GiB of the device are free now")
            return super().start()

    with pytest.raises(ProbeError, match="are free now"):
        proven(Filled(LAWS["linear"], LENGTHS, usable=0.93), tmp_path)
    trials = read_trials(tmp_path / "trials.jsonl")
    assert not any(trial.confirmation for trial in trials)


@pytest.mark.parametrize("edited", [False, True])
def test_verify_marks_what_it_ran_unless_the_config_was_edited(tmp_path, edited):
    steps = prover(made(), tmp_path)
    probe = steps.probe(None, False)
    steps.sweep(frozenset())
    assert fails_the_gate(tmp_path)
    path = tmp_path / "sampler.yaml"
    plan = replace(plan_of(tmp_path, steps=20), probe=probe)
    if edited:
        path.write_text(path.read_text() + "# mine\n")
    before = path.read_bytes()
    mark_proven(tmp_path, steps.run(plan, steps._subject(probe), float("inf")))
    assert fails_the_gate(tmp_path) == edited
    assert (path.read_bytes() == before) == edited
