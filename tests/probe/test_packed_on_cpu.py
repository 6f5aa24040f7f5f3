"""The probe of packed batches on the CPU, under a real limit, as commands and from Python."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from cli.conftest import run_here

import batchtune
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

on_the_cpu = pytest.mark.usefixtures("one_nursery")


@pytest.mark.process
@on_the_cpu
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


def test_commands_and_python_find_the_same_budget(tmp_path: Path) -> None:
    """And every report shows it, a rule holds it, and what would run padded batches refuses."""
    run = tmp_path / "run"
    manifest = tmp_path / "lengths.csv"
    lines = [str(int(length)) for length in LENGTHS.values]
    manifest.write_text("\n".join(["num_tokens", *lines]))
    law = "law:packed=1,constant=50MB,linear=300kB,limit=460MiB"
    probing = ("probe-oom", manifest, "--run", run, "--device", law)
    ran = run_here(*probing, "--max-tokens", 1_000)
    assert ran.returncode == 0, ran.stderr
    probe = read_result(run / PROBE_FILE, Probe)
    budget = f"max_tokens = {probe.packed.max_tokens:,}"
    assert 400 <= probe.packed.max_tokens <= 1_000
    assert budget in ran.stdout
    for form in ("terminal", "markdown", "html"):
        assert budget in run_here("report", run, "--format", form, "--full").stdout
    ran = run_here("report", run, "--fail-if", "probe.packed.max_tokens > 1")
    assert ran.returncode == 3
    ran = run_here("verify", run, manifest)
    assert "is of packed batches, and verify runs padded ones only" in ran.stderr
    ran = run_here(*probing[:-1], law.replace("packed=1,", ""))
    assert "holds a run of something else" in ran.stderr
    given = {"device": law, "max_tokens": 1_000}
    results = batchtune.probe("law", LENGTHS, run=run, **given)
    assert results.probe == probe
