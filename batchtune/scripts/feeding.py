"""Feeds a script's training loop the batches that a probe asks for: the loader's iterator is the worker.

The training loop is the one after whose batch an optimizer steps; other loaders deliver their own
batches. From then on, a thread of this process answers the probe. When the loop asks for a batch,
it waits for that thread, which decides: a batch of its own, or one made in the shape that was asked
for. A training step lasts from one optimizer step to the next, so it may take several batches
(accumulation).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import queue
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from batchtune.errors import NO_STEP, NoStepError, WorkloadError
from batchtune.probe.attempt import OOM_COUNTED, Agree, alone
from batchtune.probe.failures import error_verdict, first_noted
from batchtune.probe.ranks import RankPlace
from batchtune.scripts import Begin, place_in_group, say
from batchtune.units import counted
from batchtune.workloads import first_line

Value = TypeVar("Value")
# No epoch may end while its loop is measured.
_LEAST_LENGTH = 1_000_000
# A loop that takes so many times the batches of an optimizer step does not step any more. A GradScaler skips up to 16
# steps at first, until its scale fits.
_PATIENCE = 24


class Deliver(NamedTuple):
    """Lets the loop go on with a batch; `trace` is a function to trace the script with meanwhile, or None."""

    batch: Any
    trace: Any


class Returned(NamedTuple):
    """What a function returned that was called in the script's thread."""

    value: Any


class Raised(NamedTuple):
    """What the script raised, or a function that was called in its thread."""

    error: BaseException


class Asked(NamedTuple):
    """The loop asks for its next batch."""


class Loop:
    """The training loop of this process, between the script's thread and the one that answers the probe."""

    is_unexplained = False  # whether the script has ended, and raised nothing

    def __init__(self) -> None:
        self.steps = 0  # of any optimizer
        self.optimizers: set[str] = set()  # the classes of those that stepped
        self.feed: Feed | None = None  # the training loop's
        self.delivered: Counter[str] = Counter()  # batches, by loader
        self._feeds: list[weakref.ref[Feed]] = []
        self.batches_before_forward = 0  # delivered before the model was first called
        self.agree: Agree = alone  # with the loops of other ranks
        self._commands: queue.SimpleQueue[Deliver | Callable[[], Any]] = (
            queue.SimpleQueue()
        )
        self._events: queue.SimpleQueue[Returned | Raised | Asked] = queue.SimpleQueue()
        self._has_delivered = False
        self._traced: list[FrameType] = []

    @property
    def feeds(self) -> list[Feed]:
        """The iterators that have delivered, in order, and that are still in use."""
        living = [reference() for reference in self._feeds]
        return [feed for feed in living if feed is not None]

    # In the script's thread

    def note(self, feed: Feed) -> None:
        """Note that an iterator delivers."""
        self.delivered[feed.name] += 1
        if feed not in self.feeds:
            self._feeds.append(weakref.ref(feed))

    def forget(self, feed: Feed) -> None:
        """Note that an iterator has no more batches."""
        self._feeds = [known for known in self._feeds if known() is not feed]

    def next_batch(self) -> Any:
        """Return the next batch of the training loop, once the probe has decided which."""
        if self._has_delivered:
            self._untrace()
            self._events.put(Asked())
        while True:
            command = self._commands.get()
            if isinstance(command, Deliver):
                self._has_delivered = True
                self._trace(command.trace)
                return command.batch
            try:
                self._events.put(Returned(command()))
            except BaseException as error:
                self._events.put(Raised(error))

    def end(self, error: BaseException) -> None:
        """Tell the probe why the script ends; the probe then ends the process.

        That may be an out-of-memory error which something caught before, such as `mp.spawn`.
        """
        caught = first_noted(sys.gettrace())
        ending = sys.exc_info()[1]  # within what caught it
        if caught is None and ending is not None and error_verdict(ending):
            caught = first_line(ending.__context__ or ending)
        if caught is not None and error_verdict(error) is None:
            error = MemoryError(f"caught by the script, which then ended: {caught}")
        self.is_unexplained = isinstance(error, WorkloadError)
        self._untrace()
        self._events.put(Raised(error))
        threading.Event().wait()

    def _trace(self, trace: Any) -> None:
        """Trace the script, in functions that are at work too: it may swallow what is raised."""
        if trace is None:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = trace
            frame.f_trace_lines = False
            self._traced.append(frame)
            frame = frame.f_back
        sys.settrace(trace)

    def _untrace(self) -> None:
        if self._traced:
            sys.settrace(None)
        for frame in self._traced:
            frame.f_trace = None
        self._traced.clear()

    # In the thread that answers

    def call(self, function: Callable[[], Value]) -> Value:
        """Return what a function of the script's returns, called in the script's thread; raise what it raises."""
        self._commands.put(function)
        event = self._events.get()
        if isinstance(event, Raised):
            raise event.error
        assert isinstance(event, Returned)
        value: Value = event.value
        return value

    def train(
        self,
        next_batch: Callable[[], Any],
        batches_per_step: int = 1,
        count_ooms: Callable[[], int] = int,
    ) -> int:
        """Deliver batches until an optimizer has stepped, on all ranks; return how many.

        Raises what the script raises, and NoStepError if no optimizer steps: at once if `count_ooms`, those of the
        allocator, shows that the script has caught one.
        """
        before = self.steps
        ooms_before = count_ooms()
        trace = sys.gettrace()
        most = _PATIENCE * batches_per_step
        for batches in range(1, most + 1):
            self._commands.put(Deliver(next_batch(), trace))
            event = self._events.get()
            if isinstance(event, Raised):
                raise event.error
            has_stepped = self.steps > before
            if not has_stepped and batches < batches_per_step:
                continue
            caught = first_noted(trace)
            if caught is None and count_ooms() > ooms_before:
                caught = OOM_COUNTED
            if not self.agree(not has_stepped, caught):
                return batches
            if caught is not None and not has_stepped:
                raise NoStepError(f"no optimizer stepped after {caught}")
        raise NoStepError(
            f"the script took {most} batches without an optimizer step",
            "Is its loss finite? Does it catch errors and go on? If it steps after a number of tokens, let it step "
            "after a fixed number of batches (gradient accumulation) while you tune it.",
        )


class Feed(Iterator[Any]):
    """The iterator of a loader that may be the training loop's."""

    _num_yielded = 0  # which torchdata's loader asks its iterator for

    def __init__(self, loader: Any, begin: Begin) -> None:
        self.loader = loader
        self.name = described(loader)
        self.is_endless = False  # one of several that the training loop needs
        self._begin = begin
        self._own = begin()
        self.batches = 0

    def __next__(self) -> Any:
        loop = _loop
        if loop.feed is None and loop.steps and self.batches:
            _answer_the_probe(loop, self)
        if loop.feed is self:
            self._num_yielded += 1
            return loop.next_batch()
        if self.is_endless:
            return self.own_batch()
        if loop.feed is None:
            loop.steps = 0  # of another loop
        try:
            batch = next(self._own)
        except StopIteration:
            loop.forget(self)
            raise
        loop.note(self)
        self.batches += 1
        return batch

    def own_batch(self) -> Any:
        """Return the loader's next own batch, from as many epochs as it takes."""
        try:
            return next(self._own)
        except StopIteration:
            self._own = self._begin()
            return next(self._own)

    def end_own(self) -> None:
        """End the loader's own iteration, and its worker processes."""
        self._own = iter(())


_loop = Loop()
_options: Mapping[str, Any] = {}


def wrap(loader: Any, begin: Begin, options: Mapping[str, Any]) -> Iterator[Any]:
    """Return the iterator of a loader, and watch the optimizers of this process from the first one on."""
    global _options
    if not _options:
        _options = options
        _watch(_loop)
    return Feed(loader, begin)


def length(loader: Any, own: Callable[[Any], int], options: Mapping[str, Any]) -> int:
    """Return a length at which no epoch ends."""
    return max(own(loader), _LEAST_LENGTH)


def _watch(loop: Loop) -> None:
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def on_step(optimizer: Any, *_: Any) -> None:
        loop.steps += 1
        loop.optimizers.add(type(optimizer).__name__)

    def on_forward(*_: Any) -> None:
        if loop.feeds:
            loop.batches_before_forward = loop.feeds[-1].batches
            forwards.remove()

    register_optimizer_step_post_hook(on_step)
    forwards = register_module_forward_pre_hook(on_forward)
    atexit.register(_at_end, loop)
    if multiprocessing.parent_process() is not None:  # its exit handlers do not run
        multiprocessing.util.Finalize(None, _at_end, [loop], exitpriority=0)
    excepthook = sys.excepthook

    def on_error(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        excepthook(kind, error, trace)
        if loop.feed is not None:
            loop.end(error)
        atexit.unregister(_at_end)  # its exit code and output say what happened

    sys.excepthook = on_error


def _at_end(loop: Loop) -> None:
    """Say what ended the script: it ran to its end, or called sys.exit."""
    if loop.feed is not None:
        loop.end(
            WorkloadError(
                "the script ended by itself while it was measured",
                "Something limits its steps (max_steps, fast_dev_run, limit_train_batches), it resumed from a "
                "checkpoint that was at its end, or it caught an error and left: its output may say more.",
            )
        )
    elif loop.delivered:
        batches = " and ".join(
            f"{count} batches of {name}" for name, count in loop.delivered.items()
        )
        # No failure yet: it may only help the script that trains.
        say(f"{NO_STEP} {batches}")


def described(loader: Any) -> str:
    """Describe a loader by its data set: `SpeechData, 28,539 examples`."""
    text = type(loader.dataset).__name__
    with contextlib.suppress(TypeError):
        text += f", {counted(len(loader.dataset), 'example')}"
    return text


def _connected() -> RankPlace:
    """Return this process's place among the ranks that train together, connected to the probe."""
    rank, world_size = place_in_group() or (0, 1)
    host, port = _options["address"]
    place = RankPlace.connected((host, port), _options["token"], rank, world_size)

    def leave() -> None:
        with contextlib.suppress(OSError):  # a child of a child
            os.close(place.channel.detach())

    # A loader's worker that outlives this process must not hold the connection open.
    os.register_at_fork(after_in_child=leave)
    return place


def _answer_the_probe(loop: Loop, feed: Feed) -> None:
    """Start to answer the probe, now that the training loop is known."""
    loop.feed = feed
    threading.Thread(target=_serve, args=[loop], daemon=True).start()


def _serve(loop: Loop) -> None:
    from batchtune.scripts.answering import ScriptWorker

    place = _connected()
    loop.agree = place.agree
    place.serve(ScriptWorker(loop, place))
