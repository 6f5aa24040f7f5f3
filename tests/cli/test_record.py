"""Tests of `batchtune record`."""

from pathlib import Path

import pytest

from batchtune.results import BatchShape, read_training

SCRIPT = f"""
import sys
sys.path.append({str(Path(__file__).parents[1] / "scripts")!r})
import uncompiled
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.ones(10 + number, 4) for number in range(8)]
for batch in DataLoader(data, batch_size=1):
    model(batch).sum().backward()
    optimizer.step()
print("trained", *sys.argv[1:])
sys.exit(5)
"""


@pytest.mark.process
def test_a_script_runs_as_it_is_and_is_recorded(batchtune, tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("--per-unit", "2", "--run", "mine")
    ran = batchtune("record", *options, "--", "python", script, "--x", code=5)
    assert capfd.readouterr().out == "trained --x\n"
    assert "Recorded in mine/training.jsonl. `batchtune report mine`" in ran.stderr
    assert "Recorded training: 8 steps" in batchtune("report", "mine").stdout
    (recording,) = read_training(tmp_path / "mine" / "training.jsonl")
    batches = [step.batches for step in recording.steps]
    assert batches == [[BatchShape(1, length / 2)] for length in range(10, 18)]
    first, *others = recording.steps
    assert (first.seconds, first.peak_bytes) == (None, None)
    assert all(step.seconds and step.peak_bytes for step in others)


@pytest.mark.process
def test_a_command_without_training_is_told_apart(succeed, capfd):
    ran = succeed("record", "--", "python", "-c", "print(1)")
    assert capfd.readouterr().out == "1\n"
    assert "nothing was recorded" in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command to record"),
        (["--"], "no command follows --"),
    ],
)
def test_a_command_that_is_none_is_an_error(batchtune, words, message):
    assert message in batchtune("record", *words, code=2).stderr
