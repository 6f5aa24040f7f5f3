"""The ranks' connections, with threads in the place of ranks."""

import re
import select
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import made_trials
import pytest
from msgspec.structs import replace

import batchtune
from batchtune.probe import ranks as ranks_module
from batchtune.probe.ranks import RankPlace, Ranks, cause_of
from batchtune.probe.requests import Hello, RunTrial, Vote
from batchtune.processes.worker import OUTERMOST_FRAME, Failed, encode
from batchtune.results import BatchShape

SHAPE = BatchShape(4, 3.0)
RUN = RunTrial(shape=SHAPE)
TOKEN = "0123"


ran = partial(made_trials.ran, SHAPE)


class MadeRank:
    """A rank's side of its connection."""

    def __init__(self, listener, rank):
        self.channel = socket.create_connection(listener.getsockname())
        self.replies = self.channel.makefile("rb")
        self.place = RankPlace(self.channel, self.replies, rank, 2)
        self.place.say(self.place.hello(TOKEN))

    def close(self):
        self.replies.close()
        self.channel.close()


class Led:
    """Two ranks and what leads them; the first of them says how many there are."""

    def __init__(self, listener):
        self.ranks = Ranks(listener, TOKEN, None, lambda: "last words", None)
        stranger = socket.create_connection(listener.getsockname())
        unknown = Hello(token="nöne", rank=0, world_size=3, host="", pid=1)
        stranger.sendall(encode(unknown) + b"\n")
        self.made = [MadeRank(listener, rank) for rank in (1, 0)][::-1]
        assert self.ranks.accept(20.0, lambda: False)
        assert (self.ranks.world_size, self.ranks.connected) == (2, [0, 1])
        stranger.close()
        self.threads = ThreadPoolExecutor()

    def gather(self, *acts, seconds=20.0):
        """What comes of a request to which each rank reacts by its own act."""
        self.ranks.send(RUN)
        for rank in self.made:
            assert b'"runtrial"' in rank.replies.readline()
        acting = [
            self.threads.submit(act, rank)
            for act, rank in zip(acts, self.made, strict=True)
        ]
        replies = self.ranks.gather(seconds)
        for rank in self.made:
            # It ends whoever still waits for a decision.
            rank.channel.shutdown(socket.SHUT_RDWR)
        self.results = [act.result() for act in acting]
        return replies

    def close(self):
        self.ranks.close()
        for rank in self.made:
            rank.close()
        self.threads.shutdown()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def led(monkeypatch, listener):
    monkeypatch.setattr(ranks_module, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(ranks_module, "_CAUGHT_SECONDS", 0.3)
    monkeypatch.setattr(ranks_module, "_STACK_SECONDS", 0.1)
    monkeypatch.setattr(ranks_module, "_ENDING_SECONDS", 0.1)
    made = Led(listener)
    yield made
    made.close()


def causes(replies):
    return {rank: cause_of(reply) for rank, reply in replies.items()}


def nothing(rank): ...


def saying(reply):
    return lambda rank: rank.place.say(reply)


def sending(words):
    return lambda rank: rank.channel.sendall(words)


def closing(rank):
    rank.channel.shutdown(socket.SHUT_RDWR)


def printing(stack):
    """Prints its stack when it is asked where it hangs."""

    def act(rank):
        select.select([], [], [rank.channel], 20.0)
        assert rank.channel.recv(1, socket.MSG_OOB) == b"!"
        rank.channel.sendall(stack.encode())

    return act


def stack(*frames):
    """The stack of a thread whose innermost frame comes first."""
    lines = [f"  File {frame}" for frame in frames]
    first = "Thread 0x1 (most recent call first):"
    return "\n".join([first, *lines, f"{OUTERMOST_FRAME}60 in <module>\n"])


def test_all_ranks_take_the_decision_of_any(led):
    votes = {0: [False, False, True], 1: [False, True, False]}

    def act(rank):
        decided = [rank.place.agree(vote) for vote in votes[rank.place.rank]]
        decided.append(rank.place.largest(-rank.place.rank) == 0)
        rank.place.say(ran())
        return decided

    assert causes(led.gather(act, act)) == {0: None, 1: None}
    assert led.results == [[False, True, True, True]] * 2


@pytest.mark.parametrize(
    ("first", "second", "cause", "words"),
    [
        (saying(Vote(value=1)), saying(ran("oom", error="out of memory")), "oom", None),
        (
            nothing,
            saying(Vote(value=1, caught="out of memory")),
            "oom",
            "^caught by the workload",
        ),
        (nothing, closing, "crash", "closed its channel.*last words$"),
        (nothing, sending(b"step 1\n"), "crash", "said b'step 1' over its channel"),
    ],
    ids=["fails", "has caught an error", "ends", "says nonsense"],
)
def test_a_rank_that_goes_wrong_ends_the_others_wait(led, first, second, cause, words):
    replies = led.gather(first, second)
    assert causes(replies) == {1: cause}
    if words is not None:
        assert re.search(words, replies[1].message, re.DOTALL)


@pytest.mark.process
def test_a_rank_whose_process_ends_is_judged_by_how(led, monkeypatch):
    monkeypatch.setattr(ranks_module, "_ENDING_SECONDS", 10.0)
    process = subprocess.Popen(["sh", "-c", "kill -KILL $$"])
    led.ranks._hellos[1] = replace(led.ranks._hellos[1], pid=process.pid)
    replies = led.gather(nothing, closing)
    process.wait()
    assert causes(replies) == {1: "crash"}
    assert replies[1].message == "its process was killed by SIGKILL: last words"


def test_a_rank_of_another_node_just_ends(led):
    led.ranks._hellos[1] = replace(led.ranks._hellos[1], node_rank=1, host="b")
    replies = led.gather(nothing, closing)
    assert causes(replies) == {1: "crash"}
    assert replies[1].message == "its process on node 1 (b) ended"


STEP = '"/me/train.py", line 12 in step'
WAITS = stack('"/lib/site-packages/torch/x.py", line 28 in wait', STEP)
WORKS = stack('"/lib/train.py", line 28 in wait', STEP)


@pytest.mark.parametrize(("first", "hanging"), [(WAITS, [1]), (WORKS, [0, 1])])
def test_ranks_that_hang_say_where(led, first, hanging):
    """A rank that is in one of torch's functions waits for one that is not."""
    replies = led.gather(printing(first), printing(WORKS), seconds=0.5)
    assert causes(replies) == dict.fromkeys(hanging, "timeout")
    assert replies[1].message.startswith("no answer within 0.5 s; it hangs at ")


def test_a_rank_that_left_its_step_does_not_hang(led):
    ours = f'"{batchtune.__path__[0]}/probe/x.py", line 9 in read'
    has_left = stack('"/lib/socket.py", line 706 in readinto', ours)
    replies = led.gather(printing(WAITS), printing(has_left), seconds=0.5)
    assert causes(replies) == {1: "timeout"}
    assert replies[1].message.endswith(
        "it has left its step, and other ranks have not: rank 0 waits at train.py, line 12, in step"
    )


def test_ranks_that_never_come_are_not_waited_for(listener):
    ranks = Ranks(listener, TOKEN, 2, str, None)
    assert not ranks.accept(20.0, lambda: True)
    assert not ranks.accept(0.0, lambda: False)
    assert ranks.missing == [0, 1]
    made = MadeRank(listener, 0)
    assert not ranks.accept(20.0, lambda: False, apart_seconds=0.0)
    assert ranks.missing == [1]
    made.close()
    ranks.close()


def test_a_rank_that_fails_before_all_came_ends_the_wait(listener):
    ranks = Ranks(listener, TOKEN, None, str, None)
    made = MadeRank(listener, 1)
    made.place.say(Failed(message="no optimizer stepped"))
    assert ranks.accept(20.0, lambda: False)
    assert causes(ranks.gather(20.0)) == {1: "error"}
    made.close()
    ranks.close()
