"""What a script's failures become, and what is learned of its loaders: its loop runs in a thread of the tests."""

import itertools
import socket
import sys
import threading
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from frames import Lengths, collate
from made_devices import StillMeter
from msgspec.structs import replace
from report_records import SCRIPT
from scripts.made_training import MadeScript, fed_by
from torch.utils.data import DataLoader, IterableDataset

from batchtune import scripts
from batchtune.lengths import RowLength
from batchtune.probe.ranks import RankPlace, merged
from batchtune.probe.requests import (
    Describe,
    Described,
    Prepare,
    Ran,
    Ready,
    RunTrial,
    ScriptRequest,
)
from batchtune.probe.supervisor import script_error
from batchtune.probe.worker import Session
from batchtune.processes.worker import Failed, WorkerLost, judged_end
from batchtune.results import BatchShape, ProbedWith, Trial
from batchtune.scripts import answering, feeding
from batchtune.scripts.answering import ScriptWorker
from batchtune.scripts.feeding import Feed, Loop, Raised
from batchtune.scripts.launching import Launcher
from batchtune.workloads import TrainingCheck

SMALL = BatchShape(4, 60.0)
LARGE = BatchShape(30, 60.0)
FAILS_ABOVE = 20  # examples
TIMED_OUT = "no answer within 8 s; it hangs at train.py, line 28, in fail"


class Stream(IterableDataset[torch.Tensor]):
    """Gives whole batches of one to eight examples, or single examples."""

    def __init__(self, *, whole):
        self.whole = whole

    def __iter__(self):
        data = Lengths()
        for first in range(0, len(data), 4):
            examples = [data[first + place] for place in range(1 + first // 4 % 4)]
            if self.whole:
                yield collate(examples)
            else:
                yield from examples


def loader_of(data, **options):
    return DataLoader(data, **{"batch_size": 4, "collate_fn": collate, **options})


def worker_of(loop, world_size=1):
    channel, other = socket.socketpair()
    with other, channel, channel.makefile("rb") as replies:
        return ScriptWorker(loop, RankPlace(channel, replies, 0, world_size))


def raising(error):
    def fail():
        raise error

    return fail


def catching(error):
    def end():
        try:
            raise error
        except RuntimeError:
            sys.exit(1)

    return end


OOM = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
BUG = KeyError("no such speaker")


def trained_with(fail, *, catches=False):
    """A training loop that fails in a large batch; it may catch that, and go on without a step."""

    def train(loop, batches):
        for (batch,) in batches:
            try:
                if batch[0] > FAILS_ABOVE:
                    fail()
            except RuntimeError:
                if not catches:
                    raise
                continue
            loop.steps += 1

    return train


def with_session(monkeypatch, train, meter=None):
    """The worker of a script that trains so, in the middle of its steps."""
    small = loader_of([(4, 60)] * 10, batch_size=None, collate_fn=None)
    loop = MadeScript(monkeypatch, train, small).measured()
    worker = worker_of(loop)
    worker._session = Session(fed_by(loop, meter=meter), meter or StillMeter())
    return worker


@pytest.mark.parametrize(
    ("fail", "catches", "outcome", "error"),
    [
        (raising(OOM), False, "oom", "RuntimeError: CUDA out of memory"),
        (raising(OOM), True, "oom", "caught by the workload, whose step still"),
        (catching(OOM), False, "oom", "by the script, which then ended: RuntimeError"),
        (raising(BUG), False, "error", "KeyError: 'no such speaker'"),
        (raising(SystemExit(0)), False, "error", "the script ended by itself"),
    ],
    ids=["raised", "caught", "caught at its end", "a bug", "its end"],
)
def test_a_failure_is_that_of_its_batch(monkeypatch, fail, catches, outcome, error):
    worker = with_session(monkeypatch, trained_with(fail, catches=catches))
    worker._training = TrainingCheck()
    before, failed = (worker.answer(RunTrial(shape=shape)) for shape in (SMALL, LARGE))
    assert (before.trial.outcome, before.renew) == ("ok", False)
    # The script starts anew: nothing is known of its state.
    assert (failed.trial.outcome, failed.renew) == (outcome, True)
    assert failed.stage == "step"
    assert error in (failed.trial.error or "")
    if error.startswith("KeyError"):
        assert "raise error" in (failed.traceback or "")


@pytest.mark.parametrize("noting", [False, True])
def test_an_oom_swallowed_in_a_later_step_is_known_if_noted(monkeypatch, noting):
    def train(loop, batches):
        large = 0
        for (batch,) in batches:
            large += batch[0] > FAILS_ABOVE
            if large == 2:
                try:
                    raise OOM
                except RuntimeError:
                    break
            loop.steps += 1

    worker = with_session(monkeypatch, train)
    ran = worker.answer(RunTrial(shape=LARGE, noting=noting))
    assert ran.trial.outcome == ("oom" if noting else "error")
    assert (ran.unexplained, ran.renew) == (not noting, True)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_that_a_script_skips_ran_out_of_memory(monkeypatch, goes_on):
    ooms = []

    def run_out():
        ooms.append(1)
        raise OOM

    meter = StillMeter()
    monkeypatch.setattr(meter, "retries_and_ooms", lambda: (0, len(ooms)))
    train = trained_with(run_out, catches=True)
    worker = with_session(monkeypatch, train, meter)
    worker._goes_on = goes_on
    failed, after = (
        worker.answer(RunTrial(shape=shape, single=True)) for shape in (LARGE, SMALL)
    )
    assert (failed.trial.outcome, failed.renew) == ("oom", not goes_on)
    assert "the allocator ran out of memory" in (failed.trial.error or "")
    assert (after.trial.outcome, after.renew) == ("ok", False)
    assert len(ooms) == 1


def test_an_oom_that_ends_the_process_is_known_in_any_step():
    """As in a child of `mp.spawn`, which exits within its `except`; only the first step of a trial is traced."""
    loop = Loop()
    loop.feed = Feed(loader_of(Lengths()), lambda: iter([]))

    def end():
        try:
            catching(OOM)()
        finally:
            feeding._at_end(loop)

    threading.Thread(target=end, daemon=True).start()
    event = loop._events.get(timeout=20.0)
    assert isinstance(event, Raised) and isinstance(event.error, MemoryError)
    assert "RuntimeError: CUDA out of memory" in str(event.error)


def test_a_script_that_hangs_is_a_timeout():
    hangs = Failed(message=TIMED_OUT, outcome="timeout")
    launcher = Launcher()
    launcher._ranks = SimpleNamespace(world_size=1)
    ran = launcher._one_of({0: hangs}, RunTrial(shape=LARGE))
    assert ran == Ran(trial=Trial.of(LARGE, "timeout", error=TIMED_OUT), renew=True)


# How a script that can't be measured ends


def test_a_loop_without_optimizer_steps_says_what_it_got(monkeypatch, capsys):
    """It is no failure, as the script that trains may have started it."""

    def train(loop, batches):
        for _ in batches:
            pass

    monkeypatch.setattr(sys, "argv", ["work/train.py"])
    script = MadeScript(monkeypatch, train, loader_of(Lengths()))
    script.thread.join(20.0)
    said = capsys.readouterr().err
    words = "train.py ended, and no optimizer stepped after any of its 10 batches of Lengths, 40 examples"
    assert said == f"batchtune: {words}\n"
    assert lost(0, said)[0] == (
        f"python train.py ended with exit code 0 before it trained: {words}"
    )
    assert (
        lost(1, said)[0] == "python train.py ended with exit code 1 before it trained"
    )


@pytest.mark.parametrize("rank", [None, 1])
def test_a_script_without_a_loader_says_what_it_imported(rank, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali", sys)
    monkeypatch.setattr(sys, "argv", ["work/train.py"])
    marked = ""
    if rank is not None:
        marked = f"[rank{rank}]: "
        monkeypatch.setattr(scripts, "place_in_group", lambda: (rank, 2))
    scripts._say_what_was_used()
    assert capsys.readouterr().err.startswith(
        f"{marked}batchtune: train.py iterated over no torch DataLoader with gradients; "
        "it imported nvidia.dali, which loads"
    )


def lost(code, output):
    """The message and the last output of a script that ended before it trained."""
    _, how = judged_end(code, output, None)
    error = script_error("python train.py", WorkerLost("crash", how, output))
    return error.message, error.traceback


def test_a_script_that_ends_without_a_word_did_not_train():
    assert lost(0, "")[0] == (
        "python train.py ended with exit code 0 before it trained: no optimizer stepped after a batch of a torch "
        "DataLoader"
    )


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
REPORT = """\
W1128 22:39:48.452000 18701 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 18721)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 5 (pid: 18722)
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            f"[rank0]: {GLOO}\n[rank1]: Traceback\n[rank1]: ValueError: no folder\n",
            "Traceback\nValueError: no folder",
        ),
        (
            f"[rank1]: batchtune: train.py iterated over no loader.\n[rank0]: {GLOO}\n",
            "batchtune: train.py iterated over no loader.",
        ),
    ],
    ids=["raised", "trained on nothing"],
)
def test_the_rank_that_ended_first_is_shown(words, shown):
    """One that ended silently: test_torchrun_tells_how_a_silent_rank_has_ended."""
    ended = "python train.py ended with exit code 1 before it trained"
    assert lost(1, words + REPORT) == (f"{ended}: rank 1 ended first", shown)


def train_on_all(loop, batches):
    for _ in batches:
        loop.steps += 1


def prepared(
    patch,
    loop,
    world_size=1,
    settings=None,
    trained=(),
    rows=(),
    **options,
):
    """What a script that has trained these parameters answers when it is to be measured, on a made device."""
    worker = worker_of(loop, world_size)
    patch.setattr(answering, "trained_parameters", lambda: trained)
    patch.setattr(worker, "_open_device", lambda *_: StillMeter())
    lengths = sorted(map(float, Lengths().lengths))
    return worker.answer(
        Prepare(
            workload="a script",
            options=options,
            settings=settings or ProbedWith(),
            limit_bytes=None,
            examples=len(lengths),
            script=ScriptRequest(
                command=[],
                scratch="",
                lengths=lengths,
                rows=tuple(RowLength(i, row, None) for i, row in enumerate(rows)),
            ),
        )
    )


def learned_of(patch, train, loader, **asked):
    """What is learned of a script that trains so on a loader."""
    ready = prepared(patch, MadeScript(patch, train, loader).measured(), **asked)
    assert isinstance(ready, Ready)
    return ready.device.script


NOT_FINITE = [torch.nn.Parameter(torch.tensor([1.0, float("nan")]))]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"trained": NOT_FINITE},
            "parameters are not finite after the script's first optimizer steps",
        ),
        (
            {"world_size": 2, "settings": ProbedWith(ddp=True)},
            "trains on 2 ranks, where they are really allocated",
        ),
    ],
)
def test_what_can_not_be_measured_is_refused(monkeypatch, asked, message):
    loop = MadeScript(monkeypatch, train_on_all, loader_of(Lengths())).measured()
    assert message in prepared(monkeypatch, loop, **asked).message


def test_a_manifest_of_other_data_is_told_by_its_examples(monkeypatch):
    data = [torch.ones(1 + 997 * length) for length in range(9)]
    loop = MadeScript(monkeypatch, train_on_all, loader_of(data)).measured()
    message = prepared(monkeypatch, loop).message
    assert message.startswith("the data set has 9 examples, but the manifest 40, and")


def test_ranks_that_learned_different_batches_are_refused():
    other = replace(SCRIPT, batches=["x: [B, L] float64"])
    device = StillMeter().device
    replies = {
        rank: Ready(device=replace(device, script=learned))
        for rank, learned in enumerate((SCRIPT, other))
    }
    request = Describe(
        script=ScriptRequest(command=[], scratch=""), options={}, output=""
    )
    assert merged(replies, request, 2).message.startswith(
        "rank 1 has learned something else about the script's batches than rank 0: batches"
    )


# Which loader, and what its batches are made of


def test_of_several_loaders_one_is_chosen(monkeypatch):
    seen = []

    def train(loop, batches):
        for batch, other in batches:
            seen.append((len(batch), len(other)))
            loop.steps += 1

    loaders = [loader_of(Lengths()), loader_of(Lengths(30))]
    loop = MadeScript(monkeypatch, train, *loaders).measured()
    for number in (None, 2):
        message = prepared(monkeypatch, loop, loader=number).message
        assert message.endswith("0: Lengths, 40 examples; 1: Lengths, 30 examples")
    script = prepared(monkeypatch, loop, loader=1).device.script
    assert script.loader == "Lengths, 30 examples"
    for _ in range(50):  # more than an epoch of the loader that delivers its own
        loop.train(lambda: [0] * 7)
    assert seen[-1] == (4, 7)


@pytest.mark.parametrize(
    ("loader", "name", "batch_size"),
    [
        (loader_of(Lengths(), shuffle=True), "Lengths, 40 examples", 4),
        (loader_of(Stream(whole=False)), "Stream", 4),
        (
            loader_of(Stream(whole=True), batch_size=None, collate_fn=None),
            *("Stream", None),
        ),
    ],
    ids=["examples", "a stream", "whole batches"],
)
def test_any_loader_can_be_learned_from(monkeypatch, loader, name, batch_size):
    script = learned_of(monkeypatch, train_on_all, loader)
    assert script.batches == ["batch: [B, L, 16] float32"]
    assert (script.loader, script.per_unit, script.batch_size) == (
        name,
        1.0,
        batch_size,
    )
    assert (script.accumulation, script.look_ahead) == (1, 0)
    assert script.streams == (name == "Stream")
    assert [twin.difference for twin in script.twins] == [0.0] * 3


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([2], (2, False)),
        ([1, 2, 1, 1, 1], (1, False)),
        ([4, 2, 3], (3, True)),
        ([4, 2], (3, True)),
    ],
    ids=["equal", "left out", "different", "multiples"],
)
def test_several_steps_tell_how_many_batches_each_has(monkeypatch, numbers, found):
    def train_on(loop, batches):
        for number in itertools.cycle(numbers):
            list(itertools.islice(batches, number))
            loop.steps += 1

    script = learned_of(monkeypatch, train_on, loader_of(Lengths()))
    assert (script.accumulation, script.steps_vary) == found


@pytest.fixture
def written(monkeypatch):
    """The files for the batches of loaders' own samplers."""
    written = []
    monkeypatch.setattr(
        answering, "write_own_batches", lambda _, path: written.append(path)
    )
    return written


@pytest.mark.parametrize(("seconds", "twins"), [(30.0, 3), (0.0, 1)])
def test_rows_in_the_order_of_the_data_set_are_drawn(
    monkeypatch, written, seconds, twins
):
    """Where steps are slow, fewer batches are compared."""
    monkeypatch.setattr(answering, "_TWIN_SECONDS", seconds)
    rows = [length / 100 for length in Lengths().lengths]
    script = learned_of(monkeypatch, train_on_all, loader_of(Lengths()), rows=rows)
    assert (script.batches, script.per_unit) == (["batch: [B, L, 16] float32"], 100.0)
    assert [(twin.batch_size, twin.difference) for twin in script.twins] == [
        (4, 0.0)
    ] * twins
    assert all(twin.length in rows for twin in script.twins)
    # They are not drawn at random, so its own batches are counted.
    assert [path and path.name for path in written] == ["own-batches.npz"]


@pytest.mark.parametrize("known", [True, False])
def test_rows_in_another_order_are_found_by_the_data_sets_own(
    monkeypatch, written, known
):
    """Without numbers of its own, what its batches are made of is learned."""
    data = Lengths()
    if not known:
        data = [data[index] for index in range(len(data))]
    learned = []
    from_examples = answering.Learned.from_examples

    def learn(examples, *arguments, **names):
        learned.append(examples)
        return from_examples(examples, *arguments, **names)

    monkeypatch.setattr(answering.Learned, "from_examples", learn)
    rows = sorted(map(float, Lengths().lengths))
    script = learned_of(monkeypatch, train_on_all, loader_of(data), rows=rows)
    assert script.batches == ["batch: [B, L, 16] float32"]
    assert (len(learned), written) == (not known, [])


def test_a_data_set_without_numbers_is_measured(monkeypatch, tmp_path):
    data = [torch.ones(length, 16) for length in Lengths().lengths]
    loop = MadeScript(monkeypatch, train_on_all, loader_of(data)).measured()
    path = tmp_path / "lengths.parquet"
    script = ScriptRequest(command=[], scratch="")
    request = Describe(
        script=script, options={}, output=str(path), timeout_seconds=60.0
    )
    assert isinstance(worker_of(loop).answer(request), Described)
    table = pyarrow.parquet.read_table(path).to_pydict()
    assert table.pop("row") == list(range(len(data)))
    assert table == {"length": Lengths().lengths}
