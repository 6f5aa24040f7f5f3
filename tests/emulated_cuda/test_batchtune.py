"""batchtune on the emulated device, from the probe to the verification. Memory is real here, times are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emulated_cuda.machine import MIB, ROOT

pytestmark = pytest.mark.process
EMULATED = ROOT / "tests" / "benchmarks" / "emulated_steps.json"
WORKLOAD = ("--workload", "builtin:transformer-lm", "--set", "size=tiny")


@pytest.fixture
def manifest(tmp_path):
    """Lengths of 2,400 examples."""
    path = tmp_path / "lengths.jsonl"
    lines = [json.dumps({"length": 64 + 64 * (number % 4)}) for number in range(2400)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_table_is_probed_swept_and_verified(emulated_cuda, manifest, tmp_path):
    run = str(tmp_path / "run")
    lengths = (manifest, "--length-key", "length", "--unit", "tokens", "--run", run)
    emulated_cuda.batchtune("probe-oom", *lengths, *WORKLOAD, "--device", "cuda")
    emulated_cuda.batchtune("sweep-buckets", *lengths)
    options = ("--device", "cuda", "--json")
    ran = emulated_cuda("-m", "batchtune", "verify", *lengths, *WORKLOAD, *options)
    # Its exit code also says whether steps took the time that was predicted.
    verification = json.loads(ran.stdout)
    assert verification["failures"] == []
    assert verification["steps"] == verification["planned_steps"] > 0
    probe = json.loads((tmp_path / "run" / "probe.json").read_text())
    assert probe["device"]["name"] == "Emulated GPU"
    assert probe["device"]["total_bytes"] == 2048 * MIB
    shortest, longest = probe["frontier"][0], probe["frontier"][-1]
    assert shortest["closed_by"] == longest["closed_by"] == "oom"
    assert shortest["batch_size"] > longest["batch_size"] > 10


def test_doctor_shows_the_devices(emulated_cuda):
    found = json.loads(emulated_cuda.batchtune("doctor", "--json", devices=2))
    assert [gpu["name"] for gpu in found["gpus"]] == ["Emulated GPU"] * 2


HALF_MADE = """
import json, msgspec, sys
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape
settings = ProbeSettings(
    workload=sys.argv[1], options={}, device="cuda", allocator="native",
    memory_bytes=520 << 20, memory_fraction=1.0,
)
with Supervisor(settings) as supervisor:
    supervisor.start()
    rans = [supervisor.measure(BatchShape(size, 1.0), 0) for size in (300, 10)]
print(json.dumps(msgspec.to_builtins([ran.trial for ran in rans])))
"""


def test_a_half_made_optimizer_state_costs_the_process(emulated_cuda):
    """Its next step would fail with torch's own KeyError, with any batch."""
    workload = f"{Path(__file__).with_name('filling_workload.py')}:Filling"
    large, small = emulated_cuda.figures(HALF_MADE, workload)
    assert large["outcome"] == "oom"
    # Besides parameters, gradients and the batch, one state fits, and not the other.
    assert "Tried to allocate 64.00 MiB" in large["error"]
    assert (small["outcome"], small["worker"]) == ("ok", 2)


CALIBRATED = """
import json, sys
sys.path.insert(0, "tests")
from benchmarks import calibration
case, _, allocator = sys.argv[1].rpartition(" ")
case = calibration.CASES[case]
print(json.dumps(calibration.steps_of(case, allocator, "cuda", "16GiB")))
"""


@pytest.mark.parametrize("case", ["LM base bf16 native", "LM base fp32 expandable"])
def test_the_calibration_of_a_gpu_compares_it_with_this(emulated_cuda, case):
    reference = json.loads(EMULATED.read_text())[case]
    assert emulated_cuda.figures(CALIBRATED, case, memory="140GiB") == reference
