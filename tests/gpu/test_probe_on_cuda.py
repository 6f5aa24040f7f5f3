"""The probe on a CUDA device, under the allocator's own limit."""

import pytest
from gpu.on_cuda import GIB, settings, supervise

from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe
from batchtune.results import BatchShape

pytestmark = pytest.mark.usefixtures("one_nursery")
LENGTHS = Lengths.of([10.0, 20.0, 40.0] * 30)


def test_the_limit_is_real_and_the_worker_lives_on():
    with supervise("Known") as supervisor:
        supervisor.start()
        trials = [
            supervisor.measure(BatchShape(size, 100.0), 0).trial
            for size in (10, 30, 10)
        ]
    assert [trial.outcome for trial in trials] == ["ok", "oom", "ok"]
    assert 1000 << 20 <= trials[0].peak_bytes <= 1100 << 20
    assert trials[0].reserved_bytes >= trials[0].peak_bytes


@pytest.mark.parametrize("memory_gib", [1, 3])
def test_the_probe_finds_what_a_brute_force_finds(tmp_path, memory_gib):
    """But for the 1.5% of the limit that sizes leave free, as a cache uses some pages only in part."""
    probe = run_probe(LENGTHS, settings(memory_bytes=memory_gib * GIB), tmp_path)
    usable_bytes = 0.985 * probe.device.limit_bytes
    with supervise(memory_bytes=memory_gib * GIB) as supervisor:
        supervisor.start()
        for point in probe.frontier:
            # Below and above the answer: memory grows with each example.
            cap = LENGTHS.histogram.count_up_to(point.length)
            sizes = range(
                max(1, point.batch_size - 1), min(cap, point.batch_size + 3) + 1
            )
            trials = {
                size: supervisor.measure(BatchShape(size, point.length), size).trial
                for size in sizes
            }
            fits = [size for size in sizes if trials[size].outcome == "ok"]
            leaves = [
                size for size in fits if trials[size].reserved_bytes <= usable_bytes
            ]
            assert max(leaves) - 1 <= point.batch_size <= max(fits)


def test_an_oom_caught_by_the_workload_still_counts(tmp_path):
    with supervise("CatchesItself") as supervisor:
        supervisor.start()
        fits, too_large = (
            supervisor.measure(BatchShape(size, 100.0), 0).trial for size in (10, 30)
        )
        stepped = supervisor.step(BatchShape(30, 100.0)).trial
    assert (fits.outcome, fits.caught) == ("ok", False)
    assert (too_large.outcome, too_large.caught) == ("oom", True)
    assert (stepped.outcome, stepped.caught) == ("oom", True)
    probe = run_probe(LENGTHS, settings("CatchesItself"), tmp_path)
    assert any(
        text.startswith("The workload catches out-of-memory errors itself")
        for text in probe.warnings
    )


@pytest.mark.parametrize(
    ("dtype", "checkpoint"), [("fp32", False), ("bf16", True), ("fp16", False)]
)
@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_the_built_in_workloads_train(name, dtype, checkpoint):
    options = {"size": "tiny", "dtype": dtype, "checkpoint": checkpoint}
    with supervise(f"builtin:{name}", options, memory_bytes=8 * GIB) as supervisor:
        supervisor.start()
        for shape in (BatchShape(2, 4.0), BatchShape(4, 2.0)):
            assert supervisor.measure(shape, 0).trial.outcome == "ok"
