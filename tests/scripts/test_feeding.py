"""A training script under the probe: what its failures become, and that nothing of the user's is touched."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchtune.errors import BatchtuneError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Trial

SCRIPT = Path(__file__).with_name("small_script.py")
LENGTHS = Lengths.of([20 + 37 * index % 80 for index in range(40)], unit="frames")
SMALL = BatchShape(4, 60.0)
LARGE = BatchShape(30, 60.0)


def supervise(*words: str, memory_mib: int = 1024, **options: Any) -> Supervisor:
    settings = ProbeSettings(
        workload="a script",
        options=options,
        command=[sys.executable, str(SCRIPT), *words],
        memory_bytes=memory_mib << 20,
        memory_fraction=1.0,
        trial_timeout_seconds=120.0,
    )
    return Supervisor(settings, lengths=LENGTHS)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.pt").write_text("an earlier training's")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trials(supervisor: Supervisor) -> Iterator[Trial]:
    """The outcomes of a small batch, a large one, and the small one again."""
    with supervisor:
        supervisor.start()
        for index, shape in enumerate((SMALL, LARGE, SMALL)):
            yield supervisor.measure(shape, index).trial


def test_a_script_trains_on_the_shapes_that_are_asked_for(working_folder: Path) -> None:
    notes: list[str] = []
    supervisor = supervise("fine")
    supervisor._note = notes.append
    with supervisor:
        device = supervisor.start()
        small, large = (
            supervisor.measure(shape, index).trial
            for index, shape in enumerate((SMALL, LARGE))
        )
        worker = supervisor.worker
    assert (small.outcome, large.outcome, worker) == ("ok", "ok", 1)
    # The features and 256 activations of each frame, forward and backward.
    growth = (large.peak_bytes or 0) - (small.peak_bytes or 0)
    frame_bytes = growth / ((30 - 4) * 60)
    assert 4 * 256 < frame_bytes < 4 * (5 * 256 + 16)
    script = device.script
    assert script is not None
    assert script.loader == "Lengths, 40 examples"
    assert (
        script.batches == [": [B, L, 16] float32"] or "[B, L, 16]" in script.batches[0]
    )
    assert (script.per_unit, script.accumulation, script.look_ahead) == (1.0, 1, 0)
    assert all(abs(twin.difference) <= 0.02 for twin in script.twins)
    assert any("scratch copy" in note for note in notes)
    assert any("Learned" in note for note in notes)
    assert os.listdir(working_folder) == ["model.pt"]


@pytest.mark.slow
def test_a_script_that_packs_trains_on_rows_of_sequences() -> None:
    notes: list[str] = []
    supervisor = supervise("packed")
    supervisor._note = notes.append
    rows = [[99, 20, 61], [99] * 30 + [20] * 20]
    with supervisor:
        device = supervisor.start()
        assert supervisor.packed
        small, large = (
            supervisor.measure(BatchShape.packed(row), index).trial
            for index, row in enumerate(rows)
        )
    assert (small.outcome, large.outcome) == ("ok", "ok")
    assert small.sequences == [(99, 1), (61, 1), (20, 1)]
    growth = (large.peak_bytes or 0) - (small.peak_bytes or 0)
    frame_bytes = growth / (sum(rows[1]) - sum(rows[0]))
    assert 4 * 256 < frame_bytes < 4 * (5 * 256 + 16)
    script = device.script
    assert script is not None and script.packed
    assert "x: [1, ΣL, 16] float32" in script.batches
    for twin in script.twins:
        assert abs(twin.difference) <= 0.02
        assert twin.sequences is not None and len(twin.sequences) == 4
    assert any("batches are packed" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "outcome"), [("oom", "oom"), ("swallowed", "oom"), ("killed", "crash")]
)
def test_after_a_failure_the_script_starts_anew(variant: str, outcome: str) -> None:
    before, failed, after = trials(supervise(variant))
    if variant == "killed":
        assert "killed by SIGKILL" in (failed.error or "")
    assert (before.outcome, failed.outcome, after.outcome) == ("ok", outcome, "ok")
    assert (before.worker, failed.worker, after.worker) == (1, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "message"),
    [("bug", "no such speaker"), ("ends", "the script ended by itself")],
)
def test_an_error_of_the_script_is_shown_as_its_own(variant: str, message: str) -> None:
    with supervise(variant) as supervisor:
        supervisor.start()
        ran = supervisor.measure(LARGE, 0)
    assert ran.trial.outcome == "error"
    assert message in (ran.trial.error or "")
    if variant == "bug":
        assert 'raise KeyError("no such speaker")' in (ran.traceback or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (
            "no loader",
            "ended with exit code 0 before it trained: no optimizer stepped after",
        ),
        (
            "no loader",
            "small_script.py iterated over no torch DataLoader with gradients; it imported nvidia.dali,",
        ),
        (
            "no step",
            "no optimizer stepped after any of its 40 batches of Lengths, 40 examples",
        ),
        ("arguments", "usage: small_script.py --data FOLDER"),
        ("arguments", "ended with exit code 1 before it trained\n"),
        ("input", "EOFError"),
        ("not finite", "parameters are not finite after the script's first"),
        ("two", "0: Lengths, 40 examples; 1: Lengths, 30 examples"),
    ],
)
def test_a_script_that_can_not_be_measured_says_why(
    variant: str, expected: str
) -> None:
    with supervise(variant) as supervisor, pytest.raises(WorkloadError) as raised:
        supervisor.start()
    assert expected in f"{raised.value.message}\n{raised.value.traceback}"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["stream", "whole batches"])
def test_a_stream_can_be_learned_from(variant: str) -> None:
    small, large, _ = trials(supervise(variant))
    assert (small.outcome, large.outcome) == ("ok", "ok")


@pytest.mark.slow
def test_loaders_may_spawn_their_workers() -> None:
    small, large, _ = trials(supervise("spawn"))
    assert (small.outcome, large.outcome) == ("ok", "ok")


@pytest.mark.slow
def test_the_loader_to_tune_can_be_chosen() -> None:
    with supervise("two", loader=1) as supervisor:
        device = supervisor.start()
        trial = supervisor.measure(SMALL, 0).trial
    assert device.script is not None
    assert device.script.loader == "Lengths, 30 examples"
    assert trial.outcome == "ok"


@pytest.mark.slow
def test_a_limit_below_what_the_script_holds() -> None:
    with (
        supervise("fine", memory_mib=100) as supervisor,
        pytest.raises(BatchtuneError, match=r"100 MiB is too small.* hold \d+ MiB"),
    ):
        supervisor.start()


def test_a_command_that_is_not_there_is_named() -> None:
    settings = ProbeSettings(workload="x", options={}, command=["no-such-program"])
    with (
        Supervisor(settings, lengths=LENGTHS) as supervisor,
        pytest.raises(WorkloadError, match="no-such-program can't be started"),
    ):
        supervisor.start()


def test_lengths_are_sent_in_ascending_order() -> None:
    with supervise("fine") as supervisor:
        request = supervisor._script()
    assert request is not None
    assert request.lengths == sorted(LENGTHS.values.tolist())
