"""The whole probe on the CPU, under a real limit, with a workload whose memory is known."""

from pathlib import Path

import pytest
from made_devices import MIB
from memory_laws import warns
from msgspec.structs import replace
from worker_processes import FAULTY

from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe
from batchtune.probe.packed_search import COMPOSITIONS, Compositions
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape

KNOWN = Path(__file__).parent / "known_workload.py"
# One example of the longest takes 52 MiB (20 · 1 + 20² · 0.08), of the others 18 and 7.
LENGTHS = Lengths.of([5.0, 10.0, 20.0] * 12)
SETTINGS = ProbeSettings(
    workload=f"{KNOWN}:Known",
    options={"a": 1.0 * MIB, "b": 0.08 * MIB},
    device="cpu",
    memory_bytes=400 * MIB,
    memory_fraction=1.0,
    num_lengths=3,
)
UNTRAINED = "The workload's step changes no parameter"

# Its probes start dozens of workers.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_nursery")]


def test_the_probe_finds_what_a_brute_force_finds(tmp_path):
    probe = run_probe(LENGTHS, SETTINGS, tmp_path)
    assert probe.device.limit_bytes == 400 * MIB
    assert [point.length for point in probe.frontier] == [5.0, 10.0, 20.0]
    assert not warns(probe, UNTRAINED)
    with Supervisor(SETTINGS) as supervisor:
        supervisor.start()
        for point in probe.frontier:
            # Below and above the answer: memory grows with each example.
            cap = LENGTHS.histogram.count_up_to(point.length)
            sizes = range(point.batch_size, min(cap, point.batch_size + 3) + 1)
            outcomes = [
                supervisor.measure(BatchShape(size, point.length), 0).trial.outcome
                for size in sizes
            ]
            assert outcomes[0] == "ok"
            assert "ok" not in outcomes[2:]


def test_the_packed_budget_is_what_a_brute_force_finds(tmp_path):
    lengths = Lengths.of([5.0, 20.0, 60.0, 100.0, 400.0] * 80, unit="tokens")
    settings = replace(SETTINGS, workload=f"{KNOWN}:Packed", options={})
    probe = run_probe(lengths, settings, tmp_path)
    packed = probe.packed
    assert len(probe.trials) <= 18
    compositions = Compositions(lengths, 0)

    def holds(tokens):
        shapes = [compositions.shape(name, tokens) for name in COMPOSITIONS]
        return all(
            supervisor.measure(shape, 0).trial.outcome == "ok" for shape in shapes
        )

    with Supervisor(settings) as supervisor:
        supervisor.start()
        assert holds(packed.max_tokens)
        assert not holds(int(packed.max_tokens * 1.02))
    assert packed.peak_bytes.token == pytest.approx(40_000, rel=0.1)


def test_a_step_that_changes_no_parameter_is_warned_of(tmp_path):
    settings = replace(SETTINGS, workload=f"{FAULTY}:TrainsNothing", options={})
    probe = run_probe(Lengths.of([1.0] * 4), settings, tmp_path)
    assert warns(probe, UNTRAINED)
