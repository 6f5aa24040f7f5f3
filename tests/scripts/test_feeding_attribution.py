"""Which batch a measured step trains on, in loops that accumulate and that fetch batches ahead."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batchtune.probe.requests import ScriptRequest
from batchtune.results import BatchShape
from batchtune.scripts.answering import Fed
from batchtune.scripts.feeding import Feed, Loop
from batchtune.scripts.learning import Axes


class MadeMeter:
    """A device whose memory nobody measures."""

    def synchronize(self) -> None: ...
    def reset(self) -> None: ...


class MadeLearned:
    """Batches that are their own shape."""

    lengths = (1, 2)
    targets = None
    packing = None

    def make(self, axes: Axes) -> tuple[int, int]:
        return (axes.batch_size, axes.length)


class Training:
    """A loop that trains on batches of `feed` in its own thread, and notes for each optimizer step which they were."""

    def __init__(self, loop: Loop, accumulation: int, look_ahead: int) -> None:
        self.steps: list[list[Any]] = []
        self._loop = loop
        self._accumulation = accumulation
        self._look_ahead = look_ahead
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _fetched(self) -> Iterator[Any]:
        ahead: deque[Any] = deque()
        while True:
            ahead.append(self._loop.next_batch())
            if len(ahead) > self._look_ahead:
                yield ahead.popleft()

    def _train(self) -> None:
        batches = self._fetched()
        while True:
            step = list(itertools.islice(batches, self._accumulation))
            self.steps.append(step)
            self._loop.steps += 1


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("look_ahead", [0, 1, 4])
def test_a_measured_step_trains_on_what_was_asked_for(
    accumulation: int, look_ahead: int
) -> None:
    loop = Loop()
    loop.batches_before_forward = 1 + look_ahead
    training = Training(loop, accumulation, look_ahead)
    loop.train(lambda: "own", accumulation)
    assert loop.train(lambda: "own", accumulation) == accumulation
    script = ScriptRequest(command=[], scratch="", lengths=[1.0, 2.0])
    fed = Fed(loop, MadeLearned(), MadeMeter(), script, {"per_unit": 1.0}, accumulation)  # type: ignore[arg-type]
    for size, length in [(4, 10.0), (9, 2.0), (1, 30.0), (1, 30.0), (7, 5.0)]:
        batch = fed.make_batch(BatchShape(size, length))
        for _ in range(3):
            before = len(training.steps)
            fed.step(batch)
            assert training.steps[before:] == [[(size, int(length))] * accumulation]


def test_an_error_of_the_loop_is_raised_in_the_step() -> None:
    loop = Loop()

    def train() -> None:
        loop.next_batch()
        error = torch.OutOfMemoryError("CUDA out of memory")
        loop.end(error)

    threading.Thread(target=train, daemon=True).start()
    with pytest.raises(torch.OutOfMemoryError):
        loop.train(lambda: "own")


def test_a_loop_without_an_optimizer_step_is_no_training() -> None:
    loop = Loop()

    def go_on() -> None:
        while True:
            loop.next_batch()

    threading.Thread(target=go_on, daemon=True).start()
    with pytest.raises(Exception, match="24 batches without an optimizer step"):
        loop.train(lambda: "own")


def test_other_iterators_deliver_their_own_batches() -> None:
    class Loader:
        dataset = [0] * 3

    feed = Feed(Loader(), lambda: iter([1, 2, 3]))
    assert list(feed) == [1, 2, 3]
