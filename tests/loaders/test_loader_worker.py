"""The worker process of loaders: what it opens, what an epoch delivers, and how it says what went wrong."""

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
from loader_workers import end_loader_workers
from shared_nursery import OF_LOADERS
from verify.made_stepper import made_config

from batchtune.exports.run_configs import render_sampler_yaml
from batchtune.loaders.worker import Open, Opened, Take, Taken, _Loaders, failed
from batchtune.processes.worker import Failed, WorkerLost

USERS = Path(__file__).parent / "loaders_of_users.py"
TWO = {"num_workers": 2, "prefetch_factor": 2}
WITH_WORKERS = pytest.param(TWO, marks=pytest.mark.process)


class Asker:
    """Opens loaders in this process, as a worker process does, and asks them."""

    def __init__(self):
        self.loaders = _Loaders()

    def open(self, name, arguments=None, **asked):
        every = {
            "spec": f"{USERS}:{name}",
            "options": {},
            "kind": None,
            "arguments": arguments or {},
            "device": "cpu",
            "seed": 1,
        }
        request = Open(
            processors=sorted(os.sched_getaffinity(0))[:2], **{**every, **asked}
        )
        return self.ask(request, 60.0)

    def take(self, *, timeout=60.0, **asked):
        return self.ask(Take(**{"batches": None, "seconds": 30.0, **asked}), timeout)

    def ask(self, request, timeout):
        return self.loaders.answer(request)

    def epoch(self, name, arguments=None, **asked):
        opened = self.open(name, arguments, **asked)
        assert isinstance(opened, Opened), opened
        taken = self.take(digests=True)
        assert isinstance(taken, Taken), taken
        return taken

    def failure(self, name, arguments=None, **asked):
        reply = self.open(name, arguments, **asked)
        if isinstance(reply, Opened):
            reply = self.take()
        assert isinstance(reply, Failed), reply
        return reply


def examples(taken):
    return [batch.examples for batch in taken.batches]


class ProcessAsker(Asker):
    """Opens loaders in a worker process."""

    def open(self, *arguments, **asked):
        OF_LOADERS.start_worker()
        return super().open(*arguments, **asked)

    def ask(self, request, timeout):
        return OF_LOADERS.ask(request, (Opened, Taken, Failed), timeout)

    def close(self):
        OF_LOADERS.end_worker()


@pytest.fixture
def asker(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    yield Asker()
    torch.set_num_threads(1)
    end_loader_workers()


# What it opens.


@pytest.mark.parametrize(
    "sweep",
    [
        [{}],
        pytest.param(
            [TWO, {**TWO, "in_order": False}, {**TWO, "persistent_workers": True}],
            marks=pytest.mark.process,
        ),
    ],
)
def test_a_dict_of_arguments_delivers_each_example_once(asker, sweep):
    for swept in sweep:
        taken = asker.epoch("arguments", swept)
        assert taken.complete and examples(taken) == [8] * 5
        # 32-bit numbers, padded to the longest; 64-bit lengths
        for batch in taken.batches:
            assert batch.total_length == (batch.size_bytes - 64) / 4
        assert re.fullmatch(r"8 × 1\d\d \(wav\)", taken.words)
        assert len(taken.waits) == len(taken.steps) == len(taken.digests) == 5
        again = asker.epoch("arguments", swept).digests
        if swept.get("in_order", True):
            assert taken.digests == again
        else:  # as they come
            assert sorted(map(str, taken.digests)) == sorted(map(str, again))
    assert taken.digests != asker.epoch("arguments", swept, seed=2).digests


def test_a_class_that_cant_be_made_anew_is_named(asker):
    assert (
        "FolderLoader can't be made from the arguments"
        in asker.failure("own_class", TWO).message
    )


@pytest.mark.parametrize(
    ("name", "workers", "batches"),
    [
        ("Batches", 0, 6),
        pytest.param("Batches", 2, 12, marks=pytest.mark.process),
        ("generator", 0, 5),
    ],
)
def test_iterables_deliver_their_own_batches_each_epoch(asker, name, workers, batches):
    asker.open(name, {"num_workers": workers} if workers else {})
    for _ in range(2):
        taken = asker.take()
        assert isinstance(taken, Taken) and taken.complete
        assert examples(taken) == [3] * batches


@pytest.mark.process
def test_a_web_loader_starts_its_workers_itself(asker, tmp_path):
    folder = {"folder": str(tmp_path)}
    assert examples(asker.epoch("web_loader", TWO, options=folder)) == [5] * 4


# The batches that a run recommends.


@pytest.fixture
def config(tmp_path):
    made = made_config([12.0, 14.0], [7, 4], unit="s", seed=11)
    (tmp_path / "sampler.yaml").write_text(render_sampler_yaml(made), encoding="utf-8")
    return str(tmp_path / "sampler.yaml")


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*was tuned on:UserWarning")
@pytest.mark.parametrize("in_order", [True, False])
def test_lengths_give_the_recommended_batches_and_exact_shapes(asker, config, in_order):
    opened = asker.open("with_lengths", {**TWO, "in_order": in_order}, config=config)
    assert isinstance(opened, Opened) and opened.exact and opened.batches == 8
    taken = asker.take()
    assert isinstance(taken, Taken)
    assert sorted(filter(None, examples(taken))) == [3, 4, 4, 4, 4, 7, 7, 7]
    assert {batch.length for batch in taken.batches} < {
        (100 + index) / 10 for index in range(40)
    }
    assert sum(batch.total_length or 0 for batch in taken.batches) == pytest.approx(
        sum(range(100, 140)) / 10
    )


@pytest.mark.parametrize(
    ("options", "has_run", "message"),
    [
        ({}, False, "no run folder with a sampler.yaml"),
        ({"batch_size": 4}, True, "both `lengths` and `batch_size`"),
        ({"count": 39}, True, "39 `lengths` for a data set of 40 examples"),
    ],
)
def test_lengths_that_cant_be_used(asker, config, options, has_run, message):
    failure = asker.failure(
        "with_lengths", options=options, config=config if has_run else None
    )
    assert message in failure.message and failure.hint


# What is taken.


@pytest.mark.process
def test_a_part_of_an_epoch_ends_where_it_was_asked_to(asker):
    asker.open("arguments", {**TWO, "persistent_workers": True})
    for _ in range(2):  # the second epoch begins anew
        taken = asker.take(batches=3)
        assert isinstance(taken, Taken) and not taken.complete
        assert examples(taken) == [8] * 3


def test_the_consumer_is_busy_for_each_step(asker):
    asker.open("arguments")
    taken = asker.take(steps=[0.02, 0.05])
    assert isinstance(taken, Taken)
    assert all(
        took >= asked
        for took, asked in zip(taken.steps, [0.02, 0.05, 0.02, 0.05, 0.02], strict=True)
    )


def test_examples_that_collate_fn_leaves_out_do_not_count(asker):
    assert examples(asker.epoch("thinned")) == [4] * 5


# What goes wrong.


@pytest.mark.parametrize("workers", [{}, WITH_WORKERS])
def test_an_item_that_raises_shows_its_line(asker, workers):
    failure = asker.failure("arguments", workers, options={"bad": 17})
    assert failure.outcome == "error"
    assert failure.message == "ValueError: no such clip"
    assert "in __getitem__" in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: no such clip")


def test_a_bus_error_means_too_little_shared_memory():
    # As torch 2.13 writes it.
    signal = RuntimeError(
        "DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit."
    )
    exited = RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")
    exited.__cause__ = signal
    failure = failed(exited, None)
    assert failure.outcome == "shared_memory" and failure.message.startswith(
        "/dev/shm is too small"
    )


@pytest.mark.parametrize("workers", [{}, WITH_WORKERS])
def test_the_probes_messages_mean_out_of_memory(asker, workers):
    for what in ("memory", "device memory"):
        failure = asker.failure("arguments", workers, options={"bad": 17, "what": what})
        assert failure.outcome == "oom" and failure.hint, what
    failure = asker.failure("arguments", workers, options={"bad": 17, "what": "file"})
    assert (failure.outcome, failure.hint) == ("error", None)


@pytest.mark.process
def test_a_worker_that_hangs_shows_where():
    with contextlib.closing(ProcessAsker()) as asker:
        asker.open("arguments", {}, options={"bad": 17, "what": "hang"})
        with pytest.raises(WorkerLost) as lost:
            asker.take(timeout=1.0)
    assert lost.value.outcome == "timeout"
    assert re.search(
        r"loaders_of_users\.py.* in __getitem__\n +time\.sleep\(1000\)",
        lost.value.output,
    )


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_what_cant_be_pickled_under_spawn_has_a_hint(asker):
    failure = asker.failure("with_lock", {**TWO, "multiprocessing_context": "spawn"})
    assert "cannot pickle" in failure.message
    assert failure.outcome == "error" and failure.hint and "picklable" in failure.hint


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 3, "drop_last": True}])
def test_an_epoch_without_batches_is_empty(asker, options):
    failure = asker.failure(
        "arguments" if "drop_last" in options else "Clips", options=options
    )
    assert failure.outcome == "empty" and "with drop_last" in failure.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "number",
            "the target returns an object of type int: neither a data set nor an iterable",
        ),
        ("Endless", "object of type 'Endless' has no len()"),
        ("without_data", "the target returns a dict without `dataset`: batch_size"),
        ("misspelt", "unexpected keyword argument 'batch_sise'"),
        ("missing_dali", "No module named 'nvidia"),
    ],
)
def test_what_is_no_loader_is_named(asker, name, message):
    assert message in asker.failure(name).message


def test_a_gpu_that_is_not_there(asker):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there may be one")
    assert (
        asker.failure("Clips", device="cuda:0").message
        == "--device cuda:0: torch can use no GPUs here"
    )
