"""A training script under the probe: how shapes and failures pass, and that nothing of the user's is touched."""

import os
import sys
from pathlib import Path

import pytest
from shared_nursery import OF_SCRIPTS

from batchtune.errors import WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape

SCRIPT = Path(__file__).with_name("small_script.py")
LENGTHS = Lengths.of([20 + 37 * index % 80 for index in range(40)], unit="frames")
SMALL = BatchShape(4, 60.0)
LARGE = BatchShape(30, 60.0)
TOO_LARGE = BatchShape(40, 60.0)  # for the script, by its own fault


def supervise(*command, lengths=LENGTHS, **changes):
    given = {"memory_bytes": 1 << 30, "memory_fraction": 1.0, **changes}
    settings = ProbeSettings(
        workload="a script", options={}, command=list(command), **given
    )
    return Supervisor(settings, lengths=lengths)


def check_growth(small, large, frames):
    """The features and 256 activations of each frame that one has more, forward and backward."""
    growth = (large.peak_bytes or 0) - (small.peak_bytes or 0)
    assert 4 * 256 < growth / frames < 4 * (5 * 256 + 16)


def measured(supervisor, *shapes):
    """The trials of these shapes, in turn."""
    return [
        supervisor.measure(shape, index).trial for index, shape in enumerate(shapes)
    ]


def supervise_script(variant):
    return supervise(sys.executable, str(SCRIPT), variant)


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    (tmp_path / "model.pt").write_text("an earlier training's")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("batchtune.probe.supervisor.Nursery", lambda *_: OF_SCRIPTS)
    return tmp_path


@pytest.mark.process
def test_a_script_trains_on_the_wanted_shapes_until_it_fails(working_folder):
    notes = []
    supervisor = supervise_script("oom")
    supervisor._note = notes.append
    with supervisor:
        device = supervisor.start()
        small, large, failed = measured(supervisor, SMALL, LARGE, TOO_LARGE)
    outcomes = [trial.outcome for trial in (small, large, failed)]
    assert outcomes == ["ok", "ok", "oom"]
    # One process serves all of them.
    assert {trial.worker for trial in (small, large, failed)} == {1}
    check_growth(small, large, (30 - 4) * 60)
    script = device.script
    assert script.loader == "Lengths, 40 examples"
    assert script.batches == ["batch: [B, L, 16] float32"]
    assert (script.per_unit, script.accumulation, script.look_ahead) == (1.0, 1, 0)
    assert all(abs(twin.difference) <= 0.02 for twin in script.twins)
    assert any("scratch folder" in note for note in notes)
    assert any("Learned" in note for note in notes)
    assert os.listdir(working_folder) == ["model.pt"]


@pytest.mark.slow
def test_an_oom_is_known_that_mp_spawn_catches():
    script = str(SCRIPT.with_name("spawning_script.py"))
    with supervise(sys.executable, script, "oom", "2") as supervisor:
        supervisor.start()
        before, failed = measured(supervisor, SMALL, TOO_LARGE)
    assert (before.outcome, failed.outcome) == ("ok", "oom")
    caught = "caught by the script, which then ended: RuntimeError"
    assert caught in (failed.error or "")


@pytest.mark.slow
def test_after_a_script_was_killed_it_starts_anew():
    """Its loader spawns its worker, which must not be measured in the script's place."""
    with supervise_script("killed") as supervisor:
        supervisor.start()
        before, failed, after = measured(supervisor, SMALL, TOO_LARGE, SMALL)
    assert "killed by SIGKILL" in (failed.error or "")
    assert (before.outcome, failed.outcome, after.outcome) == ("ok", "crash", "ok")
    assert (before.worker, failed.worker, after.worker) == (1, 1, 2)


def refusal(program, message):
    """The error with this message that the start of a Python program must end with."""
    with (
        supervise(sys.executable, "-c", program) as supervisor,
        pytest.raises(WorkloadError, match=message) as raised,
    ):
        supervisor.start()
    return raised.value


@pytest.mark.slow
def test_a_script_without_a_loader_ends_after_a_few_steps():
    program = (
        "import torch\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"
        "while True: optimizer.step()"
    )
    message = "-c iterated over no torch DataLoader in its first 24 optimizer steps"
    assert "--workload" in refusal(program, message).hint


@pytest.mark.process
def test_a_script_that_ends_before_it_trains_says_why():
    program = "input('Go on? ')"  # it gets none
    message = "a script ended with exit code 1 before it trained"
    assert "EOFError" in refusal(program, message).traceback
