"""A real model from a manifest to a whole shuffled epoch under a real limit: nothing runs out of memory.

Batches are as large as was proven, and the epochs' seeds are not the probe's: whatever peaks above what was measured
shows here.
"""

from pathlib import Path

import numpy as np
import pytest
from cli.conftest import ANY_TIME, result_in, write_lengths

SPEECH = f"{Path(__file__).parents[1] / 'speech_workload.py'}:SpeechTagger"
# A half of the model's usual width: half as many batches.
WORKLOAD = ["--workload", SPEECH, "--set", "dim=32", "--device", "cpu"]
MEMORY = ["--memory", "360MiB", "--memory-fraction", "1.0"]
FEW = ["--num-lengths", 5, "--max-lengths", 7]
# Each test takes some minutes, and many where other programs run beside it: no time is held.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def speech_lengths():
    """Of the kind of LibriSpeech's at half their time: 0.7 to 12.3 s, most between 6 and 8."""
    rng = np.random.default_rng(5)
    long = np.clip(rng.normal(7.15, 0.6, 187), 0.7, 12.25)
    short = rng.uniform(0.7, 6.5, 61)
    lengths = [*long, *short, 0.705, 12.26]
    rng.shuffle(lengths)
    return np.round(lengths, 3).tolist()


def test_after_tune_alone_an_epoch_runs_without_oom(succeed, tmp_path):
    manifest = write_lengths(tmp_path / "lengths.csv", speech_lengths())
    succeed("tune", manifest, *WORKLOAD, *MEMORY, *FEW)
    succeed("report", "--fail-if", "unproven > 0")
    succeed("verify", manifest, *WORKLOAD[:4], "--epoch", "--seed", 3, *ANY_TIME)
    found = result_in(tmp_path, "verify")
    sweep = result_in(tmp_path)
    assert (found["holds"], found["failures"]) == (True, [])
    assert found["steps"] == sweep["rows"][sweep["recommended"]]["batches"]
