"""The ranks' connections, with threads in the place of ranks."""

import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace
from probe.test_worker_session import MadeMeter, MadeWorkload

import batchtune
from batchtune.probe import ranks as ranks_module
from batchtune.probe.rank import RankPlace
from batchtune.probe.ranks import Ranks
from batchtune.probe.requests import Hello, Ran, Reply, Run, Vote
from batchtune.probe.session import Session
from batchtune.probe.verdicts import cause_of, merged
from batchtune.processes.worker import OUTERMOST_FRAME, Failed, encode
from batchtune.results import BatchShape, Trial

SHAPE = BatchShape(4, 3.0)
RUN = Run(shape=SHAPE)
TOKEN = "0123"


def ran(outcome: Any = "ok", error: str | None = None) -> Ran:
    return Ran(trial=Trial.of(SHAPE, outcome, error=error))


class MadeRank:
    """A rank's side of its connection."""

    def __init__(self, port: int, rank: int) -> None:
        self.channel = socket.create_connection(("127.0.0.1", port))
        self.replies = self.channel.makefile("rb")
        self.place = RankPlace(self.channel, self.replies, rank, 2)
        self.place.say(self.place.hello(TOKEN))

    def close(self) -> None:
        self.replies.close()
        self.channel.close()


class Led:
    """Two ranks and what leads them."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self.ranks = Ranks(listener, TOKEN, 2, lambda: "last words", None)
            strangers = [
                socket.create_connection(("127.0.0.1", port)) for _ in range(100)
            ]
            # All but two say nothing, one speaks another language, one does not know the token.
            strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
            hello = Hello(token="nöne", rank=0, world_size=2, host="", pid=1)
            strangers[2].sendall(encode(hello) + b"\n")
            self.made = [MadeRank(port, rank) for rank in (1, 0)][::-1]
            assert self.ranks.accept(20.0, lambda: False)
            for stranger in strangers:
                stranger.close()
        self.threads = ThreadPoolExecutor()

    def gather(
        self, *acts: Callable[[MadeRank], object], seconds: float = 20.0
    ) -> dict[int, Reply]:
        """What comes of a request to which each rank reacts by its own act."""
        self.ranks.send(RUN)
        for rank in self.made:
            assert b'"run"' in rank.replies.readline()
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

    def close(self) -> None:
        self.ranks.close()
        for rank in self.made:
            rank.close()
        self.threads.shutdown()


@pytest.fixture
def led(monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    monkeypatch.setattr(ranks_module, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(ranks_module, "_CAUGHT_SECONDS", 0.3)
    monkeypatch.setattr(ranks_module, "_STACK_SECONDS", 0.1)
    monkeypatch.setattr(ranks_module, "_ENDING_SECONDS", 0.1)
    made = Led()
    yield made
    made.close()


def causes(replies: dict[int, Reply]) -> dict[int, str | None]:
    return {rank: cause_of(reply) for rank, reply in replies.items()}


def message(reply: Reply) -> str:
    assert isinstance(reply, Failed)
    return reply.message


def nothing(rank: MadeRank) -> None: ...


def test_all_ranks_take_the_decision_of_any(led: Led) -> None:
    votes = {0: [False, False, True], 1: [False, True, False]}

    def act(rank: MadeRank) -> list[bool]:
        decided = [rank.place.agree(vote) for vote in votes[rank.place.rank]]
        decided.append(rank.place.largest(-rank.place.rank) == 0)
        rank.place.say(ran())
        return decided

    assert causes(led.gather(act, act)) == {0: None, 1: None}
    assert led.results == [[False, True, True, True]] * 2


def test_a_failure_ends_the_wait_of_the_others(led: Led) -> None:
    def fail(rank: MadeRank) -> None:
        rank.place.say(ran("oom", "out of memory"))

    def wait(rank: MadeRank) -> None:
        rank.place.say(Vote(value=1))

    assert causes(led.gather(wait, fail)) == {1: "oom"}


def test_an_error_that_one_rank_caught_ends_the_trial(led: Led) -> None:
    def catch(rank: MadeRank) -> None:
        rank.place.say(Vote(value=1, caught="out of memory"))

    replies = led.gather(nothing, catch)
    assert causes(replies) == {1: "oom"}
    assert message(replies[1]).startswith("caught by the workload")


def test_a_rank_that_ends_is_noticed(led: Led) -> None:
    def end(rank: MadeRank) -> None:
        rank.channel.shutdown(socket.SHUT_RDWR)

    replies = led.gather(nothing, end)
    assert causes(replies) == {1: "crash"}
    assert "closed its channel" in message(replies[1])
    assert message(replies[1]).endswith("last words")


@pytest.mark.process
def test_a_rank_whose_process_ends_is_judged_by_how(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_ENDING_SECONDS", 10.0)
    process = subprocess.Popen(["sh", "-c", "kill -KILL $$"])
    led.ranks._hellos[1] = replace(led.ranks._hellos[1], pid=process.pid)

    def close(rank: MadeRank) -> None:
        rank.channel.shutdown(socket.SHUT_RDWR)

    replies = led.gather(nothing, close)
    process.wait()
    assert causes(replies) == {1: "crash"}
    assert message(replies[1]) == "its process was killed by SIGKILL: last words"


def test_a_rank_of_another_node_just_ends(led: Led) -> None:
    def end(rank: MadeRank) -> None:
        rank.channel.shutdown(socket.SHUT_RDWR)

    led.ranks._hellos[1] = replace(led.ranks._hellos[1], node_rank=1, host="b")
    replies = led.gather(nothing, end)
    assert causes(replies) == {1: "crash"}
    assert message(replies[1]) == "its process on node 1 (b) ended"


def test_a_rank_that_says_nonsense_is_a_crash(led: Led) -> None:
    def scribble(rank: MadeRank) -> None:
        rank.channel.sendall(b"step 1\n")

    replies = led.gather(nothing, scribble)
    assert causes(replies) == {1: "crash"}
    assert "said b'step 1' over its channel" in message(replies[1])


@pytest.mark.parametrize(
    ("innermost", "hanging"),
    [(("torch/x.py", "train.py"), [1]), (("torch/x.py",) * 2, [0, 1])],
)
def test_ranks_that_hang_say_where(
    led: Led,
    innermost: tuple[str, str],
    hanging: list[int],
) -> None:
    """A rank that is in one of torch's functions waits for one that is not."""
    stacks = [
        f'Thread 0x1 (most recent call first):\n  File "/lib/{file}", line 28 in wait\n'
        '  File "/me/train.py", line 12 in step\n'
        f"{OUTERMOST_FRAME}60 in <module>\n"
        for file in innermost
    ]

    def print_stack(rank: MadeRank) -> None:
        select.select([], [], [rank.channel], 20.0)
        assert rank.channel.recv(1, socket.MSG_OOB) == b"!"
        rank.channel.sendall(stacks[rank.place.rank].encode())

    replies = led.gather(print_stack, print_stack, seconds=0.5)
    assert causes(replies) == dict.fromkeys(hanging, "timeout")
    assert message(replies[1]).startswith("no answer within 0.5 s; it hangs at ")


def test_a_rank_that_left_its_step_does_not_hang(led: Led) -> None:
    stacks = [
        'Thread 0x1 (most recent call first):\n  File "/lib/site-packages/torch/x.py", line 28 in wait\n'
        f'  File "/me/train.py", line 12 in step\n{OUTERMOST_FRAME}60 in <module>\n',
        'Thread 0x1 (most recent call first):\n  File "/lib/socket.py", line 706 in readinto\n'
        f'  File "{batchtune.__path__[0]}/probe/x.py", line 9 in read\n{OUTERMOST_FRAME}60 in <module>\n',
    ]

    def print_stack(rank: MadeRank) -> None:
        select.select([], [], [rank.channel], 20.0)
        assert rank.channel.recv(1, socket.MSG_OOB) == b"!"
        rank.channel.sendall(stacks[rank.place.rank].encode())

    replies = led.gather(print_stack, print_stack, seconds=0.5)
    assert causes(replies) == {1: "timeout"}
    assert message(replies[1]).endswith(
        "it has left its step, and other ranks have not: rank 0 waits at train.py, line 12, in step"
    )


def test_ranks_that_never_come_are_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = Ranks(listener, TOKEN, 2, str, None)
        assert not ranks.accept(20.0, lambda: True)
        assert not ranks.accept(0.0, lambda: False)
        assert ranks.missing == [0, 1]


def test_the_first_rank_says_how_many_there_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = Ranks(listener, TOKEN, None, str, None)
        made = [MadeRank(listener.getsockname()[1], rank) for rank in (1, 0)]
        assert ranks.accept(20.0, lambda: False)
    assert (ranks.world_size, ranks.connected) == (2, [0, 1])
    ranks.close()
    for rank in made:
        rank.close()


def test_a_rank_that_fails_before_all_came_ends_the_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = Ranks(listener, TOKEN, None, str, None)
        made = MadeRank(listener.getsockname()[1], 1)
        made.place.say(Failed(message="no optimizer stepped"))
        assert ranks.accept(20.0, lambda: False)
        assert causes(ranks.gather(20.0)) == {1: "error"}
        late = Ranks(listener, TOKEN, None, str, None)
        other = MadeRank(listener.getsockname()[1], 0)
        assert not late.accept(20.0, lambda: False, apart_seconds=0.0)
        assert late.connected == [0]
    for rank in (made, other):
        rank.close()
    ranks.close()
    late.close()


def test_fifty_trials_of_uneven_ranks_run_without_a_deadlock(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take longer on rank 0 alone, and on rank 1 they leave memory behind, seven in a row.

    Each step waits for the other rank's, as a collective does: one that runs a step more breaks the barrier.
    """
    collective = threading.Barrier(2, timeout=20.0)
    clock = threading.local()  # each rank's own
    monkeypatch.setattr(
        "batchtune.probe.attempt.time.perf_counter", lambda: getattr(clock, "now", 0.0)
    )

    def act(meter: MadeMeter, shape: BatchShape, number: int) -> None:
        collective.wait()
        seconds = 0.2 if number % 3 and meter is meters[0] else 0.001
        clock.now = getattr(clock, "now", 0.0) + seconds
        if meter is meters[1]:
            meter.used = (100 + number % 7) << 20

    meters = [MadeMeter(), MadeMeter()]
    sessions = [
        Session(MadeWorkload(meter, act), meter, rank.place.agree)
        for meter, rank in zip(meters, led.made, strict=True)
    ]

    def answer(rank: MadeRank) -> None:
        own = sessions[rank.place.rank]
        for index in range(50):
            request = ask(index)
            assert rank.replies.readline() == encode(request) + b"\n"
            if request.single:
                rank.place.say(own.step(request.shape, release=request.release))
            else:
                rank.place.say(own.measure(request.shape))

    def ask(index: int) -> Run:
        shape = BatchShape(1 + index % 5, 100.0)
        return Run(shape=shape, single=index % 7 == 6, release=index % 2 == 0)

    acting = [led.threads.submit(answer, rank) for rank in led.made]
    outcomes = []
    for index in range(50):
        request = ask(index)
        led.ranks.send(request)
        reply = merged(led.ranks.gather(60.0), request, 2)
        assert isinstance(reply, Ran)
        outcomes.append(reply.trial.outcome)
    for ended in acting:
        ended.result()
    assert set(outcomes) == {"ok"}
