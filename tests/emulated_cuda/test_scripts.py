"""Unchanged training scripts: the device that they choose, its peaks, and what they do about running out of memory."""

import json
import sys
from pathlib import Path

import pytest
from emulated_cuda.machine import CONTEXT, MIB

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).with_name("training_script.py")

PROBED = """
import json, msgspec, os, sys
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape
memory, allocator, *command = sys.argv[1:]
settings = ProbeSettings(
    workload="a script", options={}, command=[sys.executable, *command],
    device=command[1], allocator=allocator,
    memory_bytes=int(memory), memory_fraction=1.0,
)
lengths = Lengths.of([20 + 37 * index % 80 for index in range(40)])
with Supervisor(settings, lengths=lengths) as supervisor:
    device = supervisor.start()
    rans = [supervisor.measure(BatchShape(size, 60.0), 0) for size in (400, 40_000)]
    rans += [supervisor.step(BatchShape(size, 60.0)) for size in (40_000, 400)]
print(json.dumps(msgspec.to_builtins([device, [ran.trial for ran in rans]])))
"""


@pytest.fixture
def probed(emulated_cuda, tmp_path):
    """The device of a script, and a small and a large trial, then a large and a small step."""

    def run(device, *habits):
        command = (str(256 * MIB), "auto", str(SCRIPT), device, *habits)
        return emulated_cuda.figures(
            PROBED, *command, memory="8GiB", devices=2, TMPDIR=str(tmp_path)
        )

    return run


@pytest.mark.parametrize(
    ("device", "habits", "workers"),
    [
        ("cuda:1", ("resets",), [1, 1, 2, 3]),
        # It goes on by itself, so that it is not started again.
        ("cuda:0", ("catches",), [1, 1, 1, 1]),
    ],
    ids=["another GPU, and resets peaks", "catches errors"],
)
def test_a_script_is_measured_whatever_it_does(probed, device, habits, workers):
    used, trials = probed(device, *habits)
    assert int(used["uuid"][-1]) == int(device[-1]) + 1
    assert used["limit_bytes"] == 256 * MIB
    assert used["outside_bytes"] > CONTEXT
    assert [trial["outcome"] for trial in trials] == ["ok", "oom", "oom", "ok"]
    assert [trial["worker"] for trial in trials] == workers
    assert trials[0]["peak_bytes"] == 150028288


def test_recorded_peaks_are_those_of_the_training_gpu(emulated_cuda, tmp_path):
    peaks = {}
    for habits in (("cuda:0",), ("cuda:1", "resets")):
        run = tmp_path / habits[0]
        script = (sys.executable, str(SCRIPT), *habits)
        emulated_cuda.batchtune("record", "--run", str(run), "--", *script, devices=2)
        lines = (run / "training.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines if line]
        peaks[habits] = [step.get("peak_bytes") for step in steps]
    plain, reset = peaks.values()
    assert plain == reset
    assert len([peak for peak in plain if peak]) == 9


@pytest.mark.timeout(900)
def test_a_tuned_script_trains_without_running_out_of_memory(emulated_cuda, tmp_path):
    """On a device that the recommended batches fill: none of them is recorded as out of memory."""
    manifest = tmp_path / "lengths.jsonl"
    lengths = [20 + 79 * (index % 7 < 3) for index in range(12_000)]
    lines = [json.dumps({"length": length}) for length in lengths]
    manifest.write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    data = (str(manifest), "--run", str(run), "--unit", "frames")
    # It goes on after an error by itself, so that it is seldom started again.
    script = ("--", sys.executable, str(SCRIPT), "cuda", "long", "catches")
    few = ("--num-lengths", "2", "--max-lengths", "2", "--num-buckets", "2")
    rough = ("--tolerance", "0.1", "--keep", "nothing")
    emulated_cuda.batchtune("tune", *data, *few, *rough, *script)
    swept = json.loads((run / "sweep.json").read_text())
    assert swept["proof"]["reason"] is None
    assert swept["proof"]["processes"] > 1
    assert swept["proof"]["replayed_steps"] > 1000
    # Two lengths are too few to see that examples and rows are in the same order.
    emulated_cuda.batchtune("run", *data[:-2], "--force", *script)
    lines = (run / "training.jsonl").read_text().splitlines()
    _, *steps = [json.loads(line) for line in lines if line]
    recommended = swept["rows"][swept["recommended"]]
    assert len(steps) == recommended["batches"] > 1
    assert not [step for step in steps if "oom" in step]
    filled = swept["proof"]["highest_reserved_bytes"] / swept["proof"]["limit_bytes"]
    assert filled > 0.8


@pytest.mark.parametrize("allocator", ["auto", "expandable"])
def test_a_driver_without_expandable_segments(emulated_cuda, tmp_path, allocator):
    command = (str(256 * MIB), allocator, str(SCRIPT), "cuda:0")
    settings = {"EMULATED_CUDA_MAPS_MEMORY": "0", "TMPDIR": str(tmp_path)}
    ran = emulated_cuda("-c", PROBED, *command, **settings)
    refused = "expandable segments don't work: CUDA driver error: operation not"
    if allocator == "expandable":
        assert f"--allocator expandable is impossible here: {refused}" in ran.stderr
        return
    device, trials = json.loads(ran.stdout.splitlines()[-1])
    assert device["allocator"] == "native"
    assert device["allocator_problem"].startswith(refused)
    assert [trial["worker"] for trial in trials] == [1, 1, 2, 3]
