"""The probe of packed batches on the CPU, under a real limit, as commands and from Python."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from cli.conftest import KNOWN, run_here
from msgspec.structs import replace

import batchtune
from batchtune.errors import WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.compositions import COMPOSITIONS, Compositions
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import PROBE_FILE, Probe, read_result

WORKLOADS = Path(__file__).parent / "packed_workload.py"
MIB = 1 << 20
LENGTHS = Lengths.of([5.0, 20.0, 60.0, 100.0, 400.0] * 80, unit="tokens")
SETTINGS = ProbeSettings(
    workload=f"{WORKLOADS}:Packed",
    options={},
    device="cpu",
    memory_bytes=400 * MIB,
    memory_fraction=1.0,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_nursery")]


def test_the_budget_is_what_a_brute_force_finds(tmp_path: Path) -> None:
    probe = run_probe(LENGTHS, SETTINGS, tmp_path)
    assert read_result(tmp_path / PROBE_FILE, Probe) == probe
    packed = probe.packed
    assert len(probe.trials) <= 18
    compositions = Compositions(LENGTHS, 0)

    @cache
    def holds(tokens: int) -> bool:
        shapes = [compositions.shape(name, tokens) for name in COMPOSITIONS]
        return all(
            supervisor.measure(shape, 0).trial.outcome == "ok" for shape in shapes
        )

    with Supervisor(SETTINGS) as supervisor:
        supervisor.start()
        assert holds(packed.max_tokens)
        assert not holds(int(packed.max_tokens * 1.02))
    assert packed.peak_bytes.token == pytest.approx(40_000, rel=0.1)


def test_a_workload_that_pads_is_told(tmp_path: Path) -> None:
    pads = replace(SETTINGS, workload=f"{WORKLOADS}:Pads", options={"a": 100_000.0})
    with pytest.raises(WorkloadError, match="memory is that of padded batches"):
        run_probe(LENGTHS, pads, tmp_path)


def test_commands_and_python_find_the_same_budget(tmp_path: Path) -> None:
    """And every report shows it, a rule holds it, and what would run padded batches refuses."""
    run = tmp_path / "run"
    manifest = tmp_path / "lengths.csv"
    lines = [str(int(length)) for length in LENGTHS.values]
    manifest.write_text("\n".join(["num_tokens", *lines]))
    probing = ("probe-oom", manifest, "--run", run, "--device", "cpu")
    ran = run_here(
        *(*probing, "--workload", f"{WORKLOADS}:Packed"),
        *("--memory", "420MiB", "--max-tokens", 1_000),
    )
    assert ran.returncode == 0, ran.stderr
    assert "tokens in" in ran.stderr
    assert "max_tokens = " in ran.stdout
    probe = read_result(run / PROBE_FILE, Probe)
    packed = probe.packed
    assert 400 <= packed.max_tokens <= 1_000
    assert probe.settings["max_tokens"] == 1_000
    assert len(packed.proofs) == len(COMPOSITIONS)

    ran = run_here("report", run, "--format", "json", "--full")
    assert json.loads(ran.stdout)["probe"]["packed"]["proofs"]
    for form in ("terminal", "markdown", "html"):
        ran = run_here("report", run, "--format", form, "--full")
        assert ran.returncode == 0, ran.stderr
        assert f"max_tokens = {packed.max_tokens:,}" in ran.stdout
        assert "Peak memory: " in ran.stdout
        assert "sum of squares" in " ".join(ran.stdout.split()) or form == "terminal"
    ran = run_here("report", run, "--fail-if", "probe.packed.max_tokens > 1")
    assert ran.returncode == 3
    ran = run_here("verify", run, manifest)
    assert ran.returncode == 1
    assert "is of packed batches, and verify runs padded ones only" in ran.stderr
    ran = run_here(*probing, "--workload", KNOWN, "--memory", "420MiB")
    assert ran.returncode == 1
    assert "holds a run of something else" in ran.stderr

    results = batchtune.probe(
        f"{WORKLOADS}:Packed",
        LENGTHS,
        run=run,
        device="cpu",
        memory_bytes=420 * MIB,
        max_tokens=1_000,
    )
    assert results.probe == probe
