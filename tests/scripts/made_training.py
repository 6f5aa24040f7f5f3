"""A script's training loop in a thread of the tests, as batchtune stands between it and its loaders."""

import itertools
import sys
import threading
from collections import deque
from importlib import import_module
from types import SimpleNamespace

from made_devices import StillMeter

from batchtune.scripts import feeding
from batchtune.scripts.answering import Fed
from batchtune.scripts.feeding import Feed, Loop


class MadeLearned:
    """Batches that are their own shape."""

    packed = False

    def make(self, shape):
        return (shape.batch_size, int(shape.length))


def fed_by(loop, accumulation=1, meter=None):
    """The script of this loop as a workload."""
    learned = MadeLearned()
    return Fed(loop, learned, meter or StillMeter(), accumulation)


class Training:
    """A loop that trains on batches of `feed` in its own thread, and notes for each optimizer step which they were."""

    def __init__(self, loop, accumulation, look_ahead):
        self.steps = []
        self._loop = loop
        self._accumulation = accumulation
        self._look_ahead = look_ahead
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _fetched(self):
        ahead = deque()
        while True:
            ahead.append(self._loop.next_batch())
            if len(ahead) > self._look_ahead:
                yield ahead.popleft()

    def _train(self):
        batches = self._fetched()
        while True:
            step = list(itertools.islice(batches, self._accumulation))
            self.steps.append(step)
            self._loop.steps += 1


class MadeScript:
    """A script in a thread; `train` is its loop over the batches of these loaders, which it gets as tuples.

    It ends as a script does: an error reaches `sys.excepthook`, and whatever ends it without one, the exit handlers.
    """

    def __init__(
        self,
        patch,
        train,
        *loaders,
    ):
        self.loop = Loop()
        self._trains = threading.Event()
        self._at_exit = []
        patch.setattr(feeding, "_loop", self.loop)
        patch.setattr(feeding, "_answer_the_probe", self._answer)
        exits = SimpleNamespace(
            register=self._register, unregister=lambda _: self._at_exit.clear()
        )
        patch.setattr(feeding, "atexit", exits)
        patch.setattr(sys, "excepthook", lambda *_: None)
        # The loop counts its own steps: other tests train in this process too.
        for module, register in (
            ("torch.optim.optimizer", "register_optimizer_step_post_hook"),
            ("torch.nn.modules.module", "register_module_forward_pre_hook"),
        ):
            patch.setattr(import_module(module), register, lambda hook: None)
        feeding._watch(self.loop)
        self._train = train
        self._loaders = loaders
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def measured(self):
        """Its training loop, once it is known."""
        assert self._trains.wait(20.0)
        return self.loop

    def _register(self, function, *arguments):
        self._at_exit.append(lambda: function(*arguments))

    def _answer(self, loop, feed):
        loop.feed = feed
        self._trains.set()

    def _run(self):
        feeds = [Feed(loader, loader.__iter__) for loader in self._loaders]
        try:
            self._train(self.loop, zip(*feeds, strict=False))
        except SystemExit:
            pass
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        for function in self._at_exit:
            function()
