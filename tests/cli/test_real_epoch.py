"""A real model from a manifest to a whole shuffled epoch under a real limit, as processes: nothing runs out of memory.

Batches are as large as was proven, and the epochs' seeds are not the probe's: whatever peaks above what was measured
shows here.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import run_in

SPEECH = f"{Path(__file__).parents[1] / 'speech_workload.py'}:SpeechTagger"
# A half of the model's usual width: half as many batches.
WORKLOAD = ["--workload", SPEECH, "--set", "dim=32", "--device", "cpu"]
MEMORY = ["--memory", "360MiB", "--memory-fraction", "1.0"]
# Each test takes some minutes, and many where other programs run beside it: no time is held.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ANY_TIME = ["--time-tolerance", "1000"]


def write_speech_manifest(path: Path, count: int = 500) -> Path:
    """Lengths of the kind of LibriSpeech's at half their time: 0.7 to 12.3 s, most between 6 and 8."""
    rng = np.random.default_rng(5)
    long, short = (
        rng.normal(7.15, 0.6, count * 3 // 4),
        rng.uniform(0.7, 6.5, count - count * 3 // 4 - 2),
    )
    lengths = np.concatenate((np.clip(long, 0.7, 12.25), short, [0.705, 12.26])).round(
        3
    )
    rng.shuffle(lengths)
    path.write_text(
        "id,duration\n"
        + "".join(f"utt{index},{length}\n" for index, length in enumerate(lengths))
    )
    return path


def said_by(folder: Path, *arguments: object) -> str:
    """Runs a command that has to succeed; what it printed."""
    ran = run_in(folder, *arguments)
    assert ran.returncode == 0, f"{arguments[0]}: {ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_after_tune_alone_an_epoch_runs_without_oom(tmp_path: Path) -> None:
    manifest = write_speech_manifest(tmp_path / "lengths.csv")
    said_by(tmp_path, "tune", manifest, *WORKLOAD, *MEMORY)
    said_by(tmp_path, "report", "--fail-if", "unproven > 0")
    asked = [
        "--workload",
        SPEECH,
        "--set",
        "dim=32",
        "--epoch",
        "--seed",
        3,
        "--json",
        *ANY_TIME,
    ]
    found = json.loads(said_by(tmp_path, "verify", "lengths.csv", *asked))
    sweep = json.loads((tmp_path / "batchtune-run" / "sweep.json").read_text())
    assert (found["holds"], found["failures"]) == (True, [])
    assert found["steps"] == sweep["rows"][sweep["recommended"]]["batches"]
