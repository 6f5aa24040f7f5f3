"""The probe's answer of a compiled model on CUDA; of the built-in ones, `benchmarks/cuda_truth.py --brute-force`."""

import shutil
import sysconfig
from pathlib import Path

import pytest
from gpu.on_cuda import GIB, settings

from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape

# Its workers have the allocator that tuning chooses, so none come from the tests' shared process.
LENGTHS = Lengths.of([2.0, 4.0, 8.0] * 200)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("compile", "bf16"),
    [(True, False), (True, True), (False, True)],
    ids=["compiled", "compiled bf16", "eager bf16"],
)
def test_the_frontier_of_a_compiled_or_eager_model_fits(tmp_path, compile, bf16):
    if compile:
        pytest.importorskip("triton")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("torch.compile needs a C compiler here")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            pytest.skip("torch.compile needs Python's headers (Python.h) here")
    options = {"compile": compile, "bf16": bf16}
    probed_with = settings("Compiled", options, memory_bytes=GIB)
    probe = run_probe(LENGTHS, probed_with, tmp_path)
    assert [point.length for point in probe.frontier] == [2.0, 4.0, 8.0]
    assert all(point.batch_size >= 10 for point in probe.frontier)
    # In turns, in a fresh worker that keeps its cache.
    with Supervisor(probed_with) as supervisor:
        supervisor.start()
        for point in [*probe.frontier] * 3:
            shape = BatchShape(point.batch_size, point.length)
            assert supervisor.step(shape).trial.outcome == "ok"
