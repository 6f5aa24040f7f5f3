"""From a training script as it is to the same script in recommended batches: the commands that a user types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.results import Probe, Sweep, read_result, read_training

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"
FEW = ["--num-lengths=3", "--max-lengths=3", "--num-buckets=3:5", "--memory=700MiB"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_is_tuned_run_recorded_and_reported(
    tmp_path: Path,
) -> None:
    for name in ("plain.py", "speech_train.csv", "speech_valid.csv"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    script = ["--", sys.executable, "plain.py"]
    run = tmp_path / "batchtune-run"

    def batchtune(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "batchtune", *words]
        ran = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    tuned = batchtune("tune", *FEW, *script)
    assert "the script's own data set (" in tuned.stderr
    assert "▶ recommended" in tuned.stdout, tuned.stdout + tuned.stderr
    assert not (tmp_path / "runs").exists()  # the probe trains in a scratch folder

    learned = read_result(run / "probe.json", Probe).device.script
    assert learned is not None
    assert (learned.per_unit, len(learned.twins)) == (100, 3)
    for twin in learned.twins:  # within 2%, or a MiB of the heap
        most = max(0.02 * twin.own_bytes, 1 << 20)
        assert abs(twin.made_bytes - twin.own_bytes) <= most
    shown = f"({learned.loader}): {'; '.join(learned.batches)}."
    assert shown in (EXAMPLES / "README.md").read_text()

    sweep = read_result(run / "sweep.json", Sweep)
    assert sweep.lengths.count == 400 and sweep.recommended is not None
    batches = sweep.rows[sweep.recommended].batches
    proof = sweep.proof  # the script itself ran these batches, in a fresh process
    assert proof is not None and proof.holds and proof.steps >= 12
    # What it would gain is told against its own DataLoader.
    assert sweep.current is not None and sweep.current.batches == 50
    assert "Your current config is fixed batches of 8 (as the script's DataLoader" in (
        " ".join(tuned.stdout.split())
    )
    trained = batchtune("run", *script)
    assert "the DataLoader of Speech gives the batches of" in trained.stderr
    assert f"{run.name}/sampler.yaml, {batches} an epoch." in trained.stderr
    assert "epoch 0: valid loss" in trained.stdout
    assert (tmp_path / "runs" / "plain" / "epoch-0.pt").is_file()

    recorded = batchtune("record", f"--run={run}", *script)
    assert f"Recorded in {run}" in recorded.stderr
    recording = read_training(run / "training.jsonl")[-1]
    assert len(recording.steps) == 50

    shown = batchtune("report")
    assert "▶ recommended" in shown.stdout
    assert "Recorded training: 50 steps" in shown.stdout
    results = json.loads(batchtune("report", "--format=json").stdout)
    assert results["training"]["steps"] == 50

    assert (tmp_path / "plain.py").read_bytes() == (EXAMPLES / "plain.py").read_bytes()
