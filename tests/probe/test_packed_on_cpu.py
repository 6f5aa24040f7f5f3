"""The probe of packed batches on the CPU, under a real limit, as commands and from Python."""

from functools import cache
from pathlib import Path

import pytest

from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe
from batchtune.probe.packed_search import COMPOSITIONS, Compositions
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
def test_the_budget_is_what_a_brute_force_finds(tmp_path):
    probe = run_probe(LENGTHS, SETTINGS, tmp_path)
    assert read_result(tmp_path / PROBE_FILE, Probe) == probe
    packed = probe.packed
    assert len(probe.trials) <= 18
    compositions = Compositions(LENGTHS, 0)

    @cache
    def holds(tokens):
        shapes = [compositions.shape(name, tokens) for name in COMPOSITIONS]
        return all(
            supervisor.measure(shape, 0).trial.outcome == "ok" for shape in shapes
        )

    with Supervisor(SETTINGS) as supervisor:
        supervisor.start()
        assert holds(packed.max_tokens)
        assert not holds(int(packed.max_tokens * 1.02))
    assert packed.peak_bytes.token == pytest.approx(40_000, rel=0.1)
