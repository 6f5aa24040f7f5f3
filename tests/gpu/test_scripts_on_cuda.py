"""A training script on a CUDA device: measured by torch's allocator, under its limit."""

import sys

from gpu.on_cuda import MIB
from scripts.test_feeding import SCRIPT, supervise

from batchtune.results import BatchShape


def test_a_script_is_measured_and_limited_on_its_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = (sys.executable, str(SCRIPT), "cuda")
    with supervise(*command, device="cuda", memory_bytes=256 * MIB) as supervisor:
        device = supervisor.start()
        small, large, too_large, again = (
            supervisor.measure(BatchShape(size, 60.0), index).trial
            for index, size in enumerate((4, 400, 40_000, 4))
        )
    assert device.kind == "cuda"
    assert device.limit_bytes <= 256 * MIB
    outcomes = [trial.outcome for trial in (small, large, too_large, again)]
    assert outcomes == ["ok", "ok", "oom", "ok"]
    # Of each frame: its 16 features, 256 activations forward and backward, and 16 outputs.
    growth = (large.peak_bytes or 0) - (small.peak_bytes or 0)
    assert 4 * 256 < growth / ((400 - 4) * 60) < 4 * (5 * 256 + 64)
    assert all(abs(twin.difference) <= 0.02 for twin in device.script.twins)
