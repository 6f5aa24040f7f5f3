"""Tests of the recording of a script's loaders: every step is of the batches that it was trained on."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import made_loops
import pytest
import torch
from made_loops import Batch, Trainer, batches

from batchtune.results import CutLine, TrainingStart, TrainingStep, read_training
from batchtune.scripts.recording import Delivered, Passing
from batchtune.scripts.training_log import TrainingLog, sizes_of


class Recorded:
    """A loader whose iterators are recorded."""

    def __init__(self, loader: Iterable[Batch], delivered: Delivered) -> None:
        self.loader = loader
        self.delivered = delivered

    def __iter__(self) -> Iterator[Batch]:
        self.delivered.begin_epoch()
        return Passing(iter(self.loader), self.delivered)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TrainingLog]:
    log = TrainingLog(tmp_path / "training.jsonl", None, None)
    yield log
    log.close()


def steps_in(path: Path) -> list[TrainingStep]:
    return [line for line in read_training(path) if isinstance(line, TrainingStep)]


def lengths_in(path: Path) -> list[list[int]]:
    return [[batch.length for batch in step.batches] for step in steps_in(path)]


LOOPS = [made_loops.plain, made_loops.one_ahead, made_loops.in_groups]


@pytest.mark.parametrize("count", [1, 2, 8, 9])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_recorded_are_the_batches_of_each_step(
    loop: Callable[..., None], accumulate: int, count: int, log: TrainingLog
) -> None:
    trainer = Trainer()
    delivered = Delivered(log)
    for epoch in range(3):
        loop(trainer, Recorded(batches(count, 100 * epoch), delivered), accumulate)
    delivered.end_epoch()
    assert lengths_in(log.path) == trainer.steps
    assert all(
        batch.batch_size == 2 and batch.target_length == 3
        for step in steps_in(log.path)
        for batch in step.batches
    )


@pytest.mark.parametrize("loop", LOOPS)
def test_skipped_optimizer_steps_do_not_look_like_looking_ahead(
    loop: Callable[..., None], log: TrainingLog
) -> None:
    trainer = Trainer(skipped_steps=2)
    delivered = Delivered(log)
    loop(trainer, Recorded(batches(8), delivered), 1)
    delivered.end_epoch()
    assert lengths_in(log.path) == trainer.steps


def test_steps_have_a_time_and_a_peak(log: TrainingLog) -> None:
    delivered = Delivered(log)
    made_loops.plain(Trainer(), Recorded(batches(5), delivered), 1)
    steps = steps_in(log.path)
    assert len(steps) == 5
    assert all(step.seconds and step.peak_bytes for step in steps)
    assert [step.warm_up for step in steps] == [True, False, False, False, False]


def test_an_oom_is_recorded_with_the_batch_that_failed(log: TrainingLog) -> None:
    delivered = Delivered(log)
    trainer = Trainer()
    for number, batch in enumerate(
        made_loops.ahead_by_one(Recorded(batches(8), delivered))
    ):
        if number == 4:
            break
        trainer.train(batch)
        trainer.step()
    delivered.failed(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    oom = steps_in(log.path)[-1]
    assert oom.oom == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert [batch.length for batch in oom.batches] == [14]


def test_another_error_is_no_oom(log: TrainingLog) -> None:
    delivered = Delivered(log)
    made_loops.plain(Trainer(), Recorded(batches(3), delivered), 1)
    delivered.failed(ValueError("the loss is not finite"))
    assert all(step.oom is None for step in steps_in(log.path))


def test_batches_of_a_loader_without_steps_are_left_out(log: TrainingLog) -> None:
    delivered = Delivered(log)
    list(Recorded(batches(5, 100), delivered))
    trainer = Trainer()
    made_loops.plain(trainer, Recorded(batches(3), delivered), 1)
    assert lengths_in(log.path) == trainer.steps


def test_an_iterator_passes_on_what_the_loader_has(log: TrainingLog) -> None:
    class Inner(list[Any]):
        yielded = 7

    assert Passing(Inner(), Delivered(log)).yielded == 7  # type: ignore[arg-type]


class Attributes:
    """A batch as SpeechBrain makes them."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (torch.ones(3, 20, 80), (3, 20, None)),
        ((torch.ones(3, 20, 80), torch.ones(3, 7), ["a", "b", "c"]), (3, 20, 7)),
        ({"ids": torch.ones(3, 20), "mask": torch.ones(3, 20)}, (3, 20, None)),
        ({"in": {"x": torch.ones(4, 9)}, "n": torch.ones(4)}, (4, 9, None)),
        (Attributes(id=["a"], sig=(torch.ones(2, 50), torch.ones(2))), (2, 50, None)),
        (torch.ones(5), None),
        ("text", None),
        (None, None),
        (torch.ones(0, 4), None),
    ],
)
def test_sizes_of_batches(batch: Any, sizes: tuple[Any, ...] | None) -> None:
    found = sizes_of(batch)
    if sizes is None:
        assert found is None
    else:
        assert found is not None
        assert (found.batch_size, found.length, found.target_length) == sizes


def test_the_axis_of_the_length_can_be_another() -> None:
    found = sizes_of((torch.ones(3, 80, 200), torch.ones(3, 7)), axis=2)
    assert found is not None
    assert (found.batch_size, found.length, found.target_length) == (3, 200, 7)


def test_a_line_cut_short_stays_apart(tmp_path: Path, log: TrainingLog) -> None:
    delivered = Delivered(log)
    made_loops.plain(Trainer(), Recorded(batches(3), delivered), 1)
    with log.path.open("ab") as file:
        file.write(b'{"rank":0,"batch')
    again = TrainingLog(log.path, None, None)
    made_loops.plain(Trainer(), Recorded(batches(2), Delivered(again)), 1)
    again.close()
    kinds = [type(line) for line in read_training(log.path)]
    assert kinds.count(CutLine) == 1
    assert kinds.count(TrainingStart) == 2
    assert kinds.count(TrainingStep) == 5


def test_a_full_disk_ends_only_the_recording(
    log: TrainingLog, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    delivered = Delivered(log)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    trainer = Trainer()
    made_loops.plain(trainer, Recorded(batches(4), delivered), 1)
    monkeypatch.undo()
    assert len(trainer.steps) == 4
    warning = capsys.readouterr().err
    assert warning.count("batchtune records no further") == 1
    assert "No space left" in warning


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import made_loops
from batchtune.scripts.recording import wrap

class Loader(list):
    def __iter__(self):
        return wrap(self, super().__iter__, {options!r})

def train(count, epochs):
    trainer = made_loops.Trainer()
    for _ in range(epochs):
        made_loops.one_ahead(trainer, Loader(made_loops.batches(count)), 1)
"""


def script(folder: Path, end: str) -> str:
    """A script that records itself, and ends with these lines."""
    options = {"run": str(folder), "per_unit": None, "target_per_unit": None, "axis": 1}
    return SCRIPT.format(tests=str(Path(__file__).parent), options=options) + end


def test_the_end_of_the_process_is_recorded(tmp_path: Path) -> None:
    program = script(tmp_path, "train(3, 1)\n")
    subprocess.run([sys.executable, "-c", program], check=True)
    assert lengths_in(tmp_path / "training.jsonl") == [[10], [11], [12]]
    failing = script(
        tmp_path,
        "train(3, 1)\nfor batch in Loader(made_loops.batches(1)):\n    raise MemoryError('big')\n",
    )
    ran = subprocess.run([sys.executable, "-c", failing], capture_output=True)
    assert b"MemoryError: big" in ran.stderr
    *steps, oom = steps_in(tmp_path / "training.jsonl")
    assert len(steps) == 6
    assert oom.oom == "MemoryError: big"


@pytest.mark.slow
def test_every_line_parses_after_a_kill(tmp_path: Path) -> None:
    end = "train(100, 100)\nprint('trained', flush=True)\ntrain(100, 100_000)\n"
    program = [sys.executable, "-c", script(tmp_path, end)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        process.kill()
    lines = list(read_training(tmp_path / "training.jsonl"))
    assert len(lines) >= 10_000
    assert not any(isinstance(line, CutLine) for line in lines)
