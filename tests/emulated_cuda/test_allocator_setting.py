"""The allocator of a run, with torch's own allocators: probed, verified, and compared where a sampler is used."""

import json

import numpy as np
import pytest
from emulated_cuda.machine import MIB

pytestmark = pytest.mark.process
LENGTHS = np.repeat([64.0, 512.0], [3000, 300])

# A driver that can't map memory refuses with the first allocation.
REFUSED = """
import json
from batchtune.probe.devices import backend_for, cuda
from batchtune.results import ProbedWith
create_context, calls = cuda._create_context, []
def refuse_once(device):
    calls.append(device)
    if len(calls) == 1:
        raise RuntimeError("CUDA driver error: operation not supported")
    create_context(device)
cuda._create_context = refuse_once
device = backend_for("cuda").open("cuda", ProbedWith(), None).device
print(json.dumps([device.allocator, device.allocator_problem]))
"""


def test_a_run_is_verified_and_keeps_to_its_allocator(emulated_cuda, tmp_path):
    manifest = tmp_path / "lengths.csv"
    manifest.write_text("length\n" + "\n".join(map(str, LENGTHS.astype(int))) + "\n")
    run = tmp_path / "run"
    source = (str(manifest), "--unit", "tokens", "--run", str(run))
    step = ("--workload", "builtin:transformer-lm", "--set", "size=tiny")
    few = ("--num-lengths", "2", "--max-lengths", "2", "--tolerance", "0.2")
    probe = ("probe-oom", *source, *step, *few, "--device", "cuda")
    told = emulated_cuda.batchtune(*probe, memory="1GiB")
    probed = json.loads((run / "probe.json").read_text())
    device = probed["device"]
    assert (device["name"], device["total_bytes"]) == ("Emulated GPU", 1024 * MIB)
    assert device["allocator"] == "expandable"
    shortest, longest = probed["frontier"]
    assert longest["closed_by"] == "oom"
    assert shortest["batch_size"] > longest["batch_size"] > 1
    assert "Train with PYTORCH_ALLOC_CONF=expandable_segments:True" in told
    emulated_cuda.batchtune("sweep-buckets", *source, "--num-buckets", "2")
    assert "  allocator: expandable\n" in (run / "sampler.yaml").read_text()
    verify = ("verify", *source, *step, "--steps", "12", "--time-tolerance", "99")
    emulated_cuda.batchtune(*verify, memory="1GiB")
    verified = json.loads((run / "verify.json").read_text())
    assert verified["device"]["allocator"] == "expandable"
    assert verified["failures"] == []
    assert verified["steps"] == verified["planned_steps"] > 0
    for command, message in (
        (verify, "was measured with expandable segments, but this runs without"),
        (probe, "allocator = expandable, now native"),
    ):
        refused = emulated_cuda(
            "-m", "batchtune", *command, "--allocator", "native", memory="1GiB"
        )
        assert refused.returncode == 1
        assert message in " ".join(refused.stderr.split())


def test_a_driver_without_expandable_segments_is_used_natively(emulated_cuda):
    both = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = dict.fromkeys(both, "expandable_segments:True")
    allocator, problem = emulated_cuda.figures(REFUSED, **settings)
    assert allocator == "native"
    assert problem.endswith("CUDA driver error: operation not supported")
