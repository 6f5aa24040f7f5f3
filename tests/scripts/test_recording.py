"""Tests of the recording of a script's loaders: every step is of the batches that it was trained on."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import made_loops
import pytest
import torch
from made_loops import Trainer, batches

from batchtune.errors import ResultError
from batchtune.results import BatchShape, read_training
from batchtune.scripts.recorder import Recorder, TrainingLog, wrap


class Watched:
    """A loader whose iterators are watched."""

    def __init__(self, loader, recorder):
        self.loader = loader
        self.recorder = recorder

    def __iter__(self):
        return self.recorder.watch(self.loader)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "training.jsonl"


def steps_in(path):
    return [step for recording in read_training(path) for step in recording.steps]


def lengths_in(path):
    return [[batch.length for batch in step.batches] for step in steps_in(path)]


LOOPS = [made_loops.plain, made_loops.one_ahead, made_loops.in_groups]


@pytest.mark.parametrize("count", [1, 2, 8, 9])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_recorded_are_the_batches_of_each_step(loop, accumulate, count, path):
    trainer = Trainer()
    with Recorder(path.parent) as recorder:
        for epoch in range(3):
            loop(trainer, Watched(batches(count, 100 * epoch), recorder), accumulate)
    assert lengths_in(path) == trainer.steps
    first = steps_in(path)[0].batches[0]
    assert (first.batch_size, first.target_length) == (2, 3)


@pytest.mark.parametrize("loop", LOOPS)
def test_skipped_optimizer_steps_do_not_look_like_looking_ahead(loop, path):
    trainer = Trainer(skipped_steps=2)
    with Recorder(path.parent) as recorder:
        loop(trainer, Watched(batches(8), recorder), 1)
    assert lengths_in(path) == trainer.steps


def test_an_oom_is_recorded_with_the_batch_that_failed(path):
    trainer = Trainer()
    with pytest.raises(torch.OutOfMemoryError), Recorder(path.parent) as recorder:
        for number, batch in enumerate(
            made_loops.ahead_by_one(Watched(batches(8), recorder))
        ):
            if number == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            trainer.train(batch)
            trainer.step()
    oom = steps_in(path)[-1]
    assert oom.oom == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert [batch.length for batch in oom.batches] == [14]


def test_another_error_is_no_oom(path):
    with pytest.raises(ValueError, match="finite"), Recorder(path.parent) as recorder:
        made_loops.plain(Trainer(), Watched(batches(3), recorder), 1)
        raise ValueError("the loss is not finite")
    assert all(step.oom is None for step in steps_in(path))


def test_batches_of_a_loader_without_steps_are_left_out(path):
    trainer = Trainer()
    with Recorder(path.parent) as recorder:
        list(Watched(batches(5, 100), recorder))
        made_loops.plain(trainer, Watched(batches(3), recorder), 1)
    assert lengths_in(path) == trainer.steps


class Attributes:
    """A batch as SpeechBrain makes them."""

    def __init__(self, **parts):
        self.__dict__.update(parts)


def packed_batch(*lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": torch.ones_like(positions)[None], "position_ids": positions}


PADDED = {name: leaf.expand(3, 30) for name, leaf in packed_batch(30).items()}
OFFSETS = torch.tensor([0, 5, 35, 35], dtype=torch.int32)


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (torch.ones(3, 20, 80), BatchShape(3, 20)),
        (
            (torch.ones(3, 20, 80), torch.ones(3, 7), ["a", "b", "c"]),
            BatchShape(3, 20, 7),
        ),
        ({"ids": torch.ones(3, 20), "mask": torch.ones(3, 20)}, BatchShape(3, 20)),
        ({"in": {"x": torch.ones(4, 9)}, "n": torch.ones(4)}, BatchShape(4, 9)),
        (
            Attributes(id=["a"], sig=(torch.ones(2, 50), torch.ones(2))),
            BatchShape(2, 50),
        ),
        (packed_batch(5, 30, 7), BatchShape.packed((30, 7, 5))),
        (
            {"x": torch.ones(1, 35, 8), "cu_seqlens": OFFSETS},
            BatchShape.packed((30, 5)),
        ),
        (packed_batch(30), BatchShape(1, 30)),
        (PADDED, BatchShape(3, 30)),
        (torch.ones(5), None),
        ("text", None),
        (torch.ones(0, 4), None),
    ],
)
def test_shapes_of_batches(batch, shape, path):
    assert shapes_of(batch, path) == ([] if shape is None else [shape])


def shapes_of(batch, path, axis=1):
    with pytest.raises(MemoryError), Recorder(path.parent, axis=axis) as recorder:
        for _ in recorder.watch([batch]):
            raise MemoryError
    return [batch for step in steps_in(path) for batch in step.batches]


def test_the_axis_of_the_length_can_be_another(path):
    batch = (torch.ones(3, 80, 200), torch.ones(3, 7))
    assert shapes_of(batch, path, axis=2) == [BatchShape(3, 200, 7)]


def logs(path, patch, port):
    """The open logs of two ranks that meet at this port."""
    patch.setattr(torch.distributed, "is_initialized", lambda: True)
    patch.setattr(torch.distributed, "get_world_size", lambda: 2)
    patch.setenv("MASTER_PORT", port)
    for rank in range(2):
        patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        log = TrainingLog(path)
        log.open()
        yield log


def test_ranks_share_a_recording_and_trainings_do_not(path, monkeypatch):
    alone = TrainingLog(path)
    alone.open()
    together = [*logs(path, monkeypatch, "1"), *logs(path, monkeypatch, "2")]
    for length, log in enumerate([alone, *together, alone], 1):
        log.write([BatchShape(1, length)])
    for log in (alone, *together):
        log.close()
    lengths = [
        [step.batches[0].length for step in recording.steps]
        for recording in read_training(path)
    ]
    assert lengths == [[1, 6], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (TrainingLog, "end_step", RuntimeError("a bug")),
        (os, "write", OSError(28, "No space left on device")),
    ],
    ids=["a bug", "a full disk"],
)
def test_a_recorders_own_error_ends_only_the_recording(
    owner, name, error, path, capsys, monkeypatch
):
    def fail(*_):
        raise error

    trainer = Trainer()
    own = batches(4)
    options = {"recorder": {"run": str(path.parent)}}
    monkeypatch.setattr(owner, name, fail)
    for _ in range(2):
        made_loops.plain(trainer, wrap(own, own.__iter__, options), 1)
    monkeypatch.undo()
    assert len(trainer.steps) == 8
    (warning,) = capsys.readouterr().err.splitlines()
    assert "batchtune records no further" in warning
    assert warning.endswith(error.args[-1])


@pytest.mark.parametrize("damage", ["a pipe", "a damaged run.json"])
def test_a_recording_that_cant_begin_leaves_the_training_alone(damage, path, capsys):
    if damage == "a pipe":
        os.mkfifo(path)
    else:
        path.with_name("run.json").write_text("[")
    own = batches(4)
    options = {"recorder": {"run": str(path.parent)}}
    assert list(wrap(own, own.__iter__, options)) == list(own)
    assert "Warning: batchtune records nothing" in capsys.readouterr().err


def test_a_run_is_read_with_little_memory(path, monkeypatch):
    """As under `ulimit -d`: what is asked for is allocated at once."""
    path.with_name("run.json").write_text("[")
    tracemalloc.start()
    with pytest.raises(ResultError):
        Recorder(path.parent)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 << 20


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import uncompiled
import made_loops
from batchtune.scripts.recorder import wrap

class Loader(list):
    def __iter__(self):
        return wrap(self, super().__iter__, {options!r})

def train(count, epochs):
    trainer = made_loops.Trainer()
    for _ in range(epochs):
        made_loops.one_ahead(trainer, Loader(made_loops.batches(count)), 1)
"""


def script(folder, end):
    """A script that records itself, and ends with these lines."""
    options = {"recorder": {"run": str(folder)}}
    return SCRIPT.format(tests=str(Path(__file__).parent), options=options) + end


@pytest.mark.slow
def test_the_end_of_the_process_is_recorded(tmp_path):
    # A child that trains to its end, then its parent, which fails.
    end = """
import os
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
train(3, 1)
if child:
    for batch in Loader(made_loops.batches(1)):
        raise MemoryError("big")
"""
    program = [sys.executable, "-c", script(tmp_path, end)]
    assert b"MemoryError: big" in subprocess.run(program, capture_output=True).stderr
    *steps, oom = steps_in(tmp_path / "training.jsonl")
    lengths = [[batch.length for batch in step.batches] for step in steps]
    assert lengths == [[10], [11], [12]] * 2
    assert oom.oom == "MemoryError: big"


@pytest.mark.process
def test_every_line_parses_after_a_kill(tmp_path):
    # The last step is written with the next one.
    end = "train(100, 3)\nprint('trained', flush=True)\ntrain(100, 100_000)\n"
    program = [sys.executable, "-c", script(tmp_path, end)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "trained\n"
        process.kill()
    assert len(steps_in(tmp_path / "training.jsonl")) >= 200


def test_rows_on_a_gpu_are_left_out_and_counted(path, capsys):
    trainer = Trainer()
    # As on a GPU, nothing can be read from there at once.
    batch = {"x": torch.ones(1, 35), "position_ids": torch.ones(1, 35, device="meta")}
    with Recorder(path.parent) as recorder:
        for _ in recorder.watch([batch] * 3):
            trainer.train((torch.ones(2, 10, 4), torch.ones(2, 3)))
            trainer.step()
        recorder.start(batch)
        recorder.failed(MemoryError("big"))
    steps = steps_in(path)
    assert [step.batches for step in steps] == [[], [], [], []]
    assert steps[-1].oom == "MemoryError: big"
    assert "left out 4 packed batches" in capsys.readouterr().err
