"""The probe of packed batches on the CPU, under a real limit, as commands and from Python."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from cli.conftest import run_here
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
TINY = {"size": "tiny", "dim": 32, "heads": 2, "layers": 1, "vocab": 512}

pytestmark = pytest.mark.usefixtures("one_nursery")


def test_the_budget_is_what_a_brute_force_finds(tmp_path: Path) -> None:
    probe = run_probe(LENGTHS, SETTINGS, tmp_path)
    assert read_result(tmp_path / PROBE_FILE, Probe) == probe
    packed = probe.packed
    assert packed is not None
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
    assert packed.peak_bytes is not None
    assert packed.peak_bytes.token == pytest.approx(40_000, rel=0.1)


def test_a_workload_that_pads_is_told(tmp_path: Path) -> None:
    pads = replace(SETTINGS, workload=f"{WORKLOADS}:Pads", options={"a": 100_000.0})
    with pytest.raises(WorkloadError, match="memory is that of padded batches"):
        run_probe(LENGTHS, pads, tmp_path)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run folder of the built-in, and its manifest."""
    folder = tmp_path_factory.mktemp("packed")
    manifest = folder / "lengths.csv"
    lines = [str(int(length)) for length in LENGTHS.values]
    manifest.write_text("\n".join(["num_tokens", *lines]))
    options = [f"--set={name}={value}" for name, value in TINY.items()]
    ran = run_here(
        *("probe-oom", manifest, "--run", folder / "run", "--device", "cpu"),
        *("--workload", "builtin:transformer-lm", "--set", "packed=true", *options),
        *("--memory", "420MiB", "--max-tokens", 4_000),
    )
    assert ran.returncode == 0, ran.stderr
    assert "tokens in" in ran.stderr
    assert "max_tokens = " in ran.stdout
    return folder / "run", manifest


@pytest.mark.slow
def test_a_command_finds_the_budget_of_the_built_in(tuned: tuple[Path, Path]) -> None:
    run, _ = tuned
    probe = read_result(run / PROBE_FILE, Probe)
    assert probe.packed is not None
    assert 400 <= probe.packed.max_tokens <= 4_000
    assert probe.settings["max_tokens"] == 4_000
    assert len(probe.packed.proofs) == len(COMPOSITIONS)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["terminal", "markdown", "html", "json"])
def test_reports_show_the_budget_and_its_proofs(
    tuned: tuple[Path, Path], form: str
) -> None:
    run, _ = tuned
    ran = run_here("report", run, "--format", form, "--full")
    assert ran.returncode == 0, ran.stderr
    probe = read_result(run / PROBE_FILE, Probe)
    assert probe.packed is not None
    if form == "json":
        assert json.loads(ran.stdout)["probe"]["packed"]["proofs"]
        return
    assert f"max_tokens = {probe.packed.max_tokens:,}" in ran.stdout
    assert "Peak memory: " in ran.stdout
    assert "sum of squares" in " ".join(ran.stdout.split()) or form == "terminal"


@pytest.mark.slow
def test_a_rule_holds_the_budget(tuned: tuple[Path, Path]) -> None:
    run, _ = tuned
    ran = run_here("report", run, "--fail-if", "probe.packed.max_tokens > 1")
    assert ran.returncode == 3


@pytest.mark.slow
def test_verify_says_that_it_runs_padded_batches(tuned: tuple[Path, Path]) -> None:
    run, manifest = tuned
    ran = run_here("verify", run, manifest)
    assert ran.returncode == 1
    assert "is of packed batches, and verify runs padded ones only" in ran.stderr


@pytest.mark.slow
def test_the_same_folder_can_not_be_probed_padded(tuned: tuple[Path, Path]) -> None:
    run, manifest = tuned
    ran = run_here(
        *("probe-oom", manifest, "--run", run, "--device", "cpu"),
        *("--workload", "builtin:transformer-lm", "--memory", "420MiB"),
    )
    assert ran.returncode == 1
    assert "holds a run of something else" in ran.stderr


@pytest.mark.slow
def test_python_finds_the_budget_too(tuned: tuple[Path, Path]) -> None:
    run, _ = tuned
    results = batchtune.probe(
        "builtin:transformer-lm",
        LENGTHS,
        run=run,
        device="cpu",
        options={**TINY, "packed": True},
        memory_bytes=420 * MIB,
        max_tokens=4_000,
    )
    assert results.probe is not None
    assert results.probe.packed is not None
    assert results.probe == read_result(run / PROBE_FILE, Probe)
