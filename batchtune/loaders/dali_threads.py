"""The user's function that makes batches with DALI, in the training process's own thread or in reader threads."""

from __future__ import annotations

import contextlib
import queue
import threading
import types
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from batchtune.errors import LoaderError
from batchtune.loaders.base import Target
from batchtune.loaders.batches import examples_in_largest, leaves
from batchtune.loaders.dali_readers import ReaderWatch
from batchtune.results import Arguments

_ENDING_SECONDS = 30.0
# DALI's words for an operator that failed before its result was needed; the operator's own error is the cause.
_LATE = ("An error happened during asynchronous execution", "An error happened during deferred evaluation")


@contextlib.contextmanager
def _operators_errors() -> Iterator[None]:
    """Raise an operator's own error, which has the user's line and DALI's own words, for what DALI makes of it.

    Each operator that needs the result of one that failed wraps its error once more.
    """
    try:
        yield
    except Exception as raised:
        error: BaseException = raised
        while str(error) in _LATE and error.__cause__ is not None:
            error = error.__cause__
        if error is raised:
            raise
        raise error from None


class Source:
    """The user's function in one thread; all methods are called there."""

    def __init__(
        self, ndd: Any, target: Target, arguments: Arguments, watch: ReaderWatch, shard: tuple[int, int], mode: str
    ) -> None:
        self._ndd = ndd
        self._target = target
        self._watch = watch
        self._mode = mode
        self._seed = target.seed + shard[0]
        given = {name: value for name, value in arguments.items() if value is not None}
        on = "gpu" if target.device.startswith("cuda") else "cpu"
        self._given = {**given, "shard_id": shard[0], "num_shards": shard[1], "device": on}
        self._thread_state = contextlib.ExitStack()
        self._made: Any = None

    def start(self) -> None:
        """Prepare the thread, and call the function for the first time."""
        ndd = self._ndd
        self._thread_state.enter_context(ndd.EvalMode[self._mode])
        if self._target.device.startswith("cuda"):
            self._thread_state.enter_context(ndd.device(self._target.device))
        ndd.random.set_seed(self._seed)
        self._given["rng"] = ndd.random.RNG(seed=self._seed)
        with _operators_errors():
            self._made = self._call()

    def batches(self) -> Generator[tuple[Any, int], None, None]:
        """Yield the batches of one epoch, each finished, with the number of its last examples that do not count."""
        made = self._call() if self._made is None else self._made
        iterator = iter(made)
        self._made = None if iterator is made else made
        self._watch.forget()
        complete = False
        try:
            with _operators_errors():
                for batch in iterator:
                    for _, value in leaves(batch):
                        if isinstance(value, (self._ndd.Batch, self._ndd.Tensor)):
                            value.evaluate()
                    synchronise(self._ndd, self._target.device)
                    yield batch, self._watch.surplus(examples_in_largest(batch))
            complete = True
        finally:
            if isinstance(iterator, types.GeneratorType):
                iterator.close()
            if not complete and self._watch.captured:
                self._made = None
            self._settle()

    def stop(self) -> None:
        """Let go of the user's objects, and leave the thread as it was."""
        self._made = None
        self._settle()
        self._thread_state.close()

    def _call(self) -> Any:
        made = self._target.call(self._given)
        if not isinstance(made, Iterable):
            raise LoaderError(
                f"your function returns a {type(made).__name__}, but an iterable of batches is needed",
                "Write a generator function that yields batches, or a class with __iter__.",
            )
        return made

    def _settle(self) -> None:
        """Wait for all operators that this thread has begun, though their results were dropped.

        Its background thread runs them in order: when one more has run, so have all before it.
        """
        ndd = self._ndd
        with ndd.EvalMode.eager:
            ndd.random.uniform(batch_size=1, rng=ndd.random.RNG(seed=0), device="cpu").evaluate()
        synchronise(ndd, self._target.device)


class ReaderThread:
    """A thread that makes batches, epoch by epoch, and the queue in which they wait for training."""

    def __init__(self, source: Source, depth: int) -> None:
        self._source = source
        self._begun = queue.SimpleQueue[bool]()
        # A batch; None when an epoch ends, or the thread is prepared; an error.
        self._queue = queue.Queue[Any](depth)
        self._running = True
        self._broken_off = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchtune-reader", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin an epoch."""
        self._running = True
        self._broken_off.clear()
        self._begun.put(True)

    def take(self) -> tuple[Any, int] | None:
        """Return the next batch; None at the end of the epoch, or when the thread is prepared. Raises its errors."""
        made = self._queue.get()
        self._running = isinstance(made, tuple)
        if isinstance(made, BaseException):
            raise made
        batch: tuple[Any, int] | None = made
        return batch

    def break_off(self) -> None:
        """End the epoch, if one runs: wait until its last batch is made, and drop it."""
        self._broken_off.set()
        while self._running:
            with contextlib.suppress(Exception):
                self.take()

    def end(self) -> None:
        """End the thread."""
        self.break_off()
        self._begun.put(False)
        self._thread.join(_ENDING_SECONDS)

    def _run(self) -> None:
        try:
            self._source.start()
            self._queue.put(None)
            while self._begun.get():
                self._epoch()
        except BaseException as error:
            self._queue.put(error)
        finally:
            self._source.stop()

    def _epoch(self) -> None:
        try:
            with contextlib.closing(self._source.batches()) as batches:
                for made in batches:
                    self._queue.put(made)
                    if self._broken_off.is_set():
                        break
        except BaseException as error:
            self._queue.put(error)
        else:
            self._queue.put(None)


def synchronise(ndd: Any, device: str) -> None:
    """Wait for the streams of this thread, DALI's and torch's."""
    if (stream := ndd.get_current_stream()) is not None:  # there is a GPU
        stream.synchronize()
    if device.startswith("cuda"):
        import torch

        torch.cuda.current_stream(device).synchronize()
