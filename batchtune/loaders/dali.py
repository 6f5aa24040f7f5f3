"""Loaders that use DALI's dynamic mode (`nvidia.dali.experimental.dynamic`): a function that makes batches in a thread.

The user's function is called with those of these parameters that it takes:

- `shard_id`, `num_shards`: of the thread that calls it; 0 and 1 for a single one. A function without both of them is
  never called by several threads.
- `rng`: a `RNG` of the thread's own, seeded with seed + shard_id, as is the default generator of its thread.
- `seed`: the same in every thread, for the reader's shuffling.
- `device`: `cpu` or `gpu`.
- `num_threads`, and each name that is swept besides (`batch_size`, the reader's `prefetch_queue_depth`).

If it returns an iterator, as a generator function does, it is called again for each epoch, and so reads its list of
files again. An object with `__iter__` is made once in each thread, and iterated once an epoch: its readers live on,
except after an epoch that was broken off.

**Seeds.** A reader that shuffles without a `seed` of its own takes DALI's default: the same order in every process,
and for a reader that is made for one epoch, in every epoch. Pass `seed` on, or keep the reader, if that is not meant.

**Epochs.** `reader.next_epoch(batch_size=B)` yields full batches only. The last batch of a shard is
filled up with the first examples of the next epoch, which then starts behind them, or with `pad_last_batch` with
copies of the shard's last example. These do not count here: an epoch has each example once, `epoch_size` in all.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from batchtune.errors import LoaderError
from batchtune.loaders import LoaderKind, OpenLoader, SweptArguments, Target
from batchtune.loaders.worker import BatchFacts, facts_of, leaves
from batchtune.results import Arguments
from batchtune.workloads import first_line

_DYNAMIC = "nvidia.dali.experimental.dynamic"
_IMPORTS_IT = re.compile(r"nvidia\.dali\.experimental(\.| import )dynamic")
_QUEUE_DEPTH = 2
# A batch, and the number of its examples that count, if known.
_Made = tuple[Any, int | None]
# DALI's words for an operator that failed before its result was needed; the operator's own error is the cause.
_LATE = (
    "An error happened during asynchronous execution",
    "An error happened during deferred evaluation",
)


class DaliKind(LoaderKind):
    """DALI's dynamic mode.

    - `eval_mode`: when operators run. `eager`: in the background, begun at once; `deferred`: when their results are
      needed; `sync_cpu`: before the call returns; `sync_full`: the same, on the GPU too.
    - `num_threads`: of DALI's pool, which all readers share; set once in each process.
    - `reader_threads`: Python threads that call the function, each with its own shard, random numbers and CUDA stream.
      0: the training process calls it itself, for each batch when it needs one.
    - `queue_depth`: how many finished batches of each reader thread may wait for training.
    """

    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "eval_mode": Literal["eager", "deferred", "sync_cpu", "sync_full"],
        "reader_threads": Annotated[int, msgspec.Meta(ge=0)],
        "queue_depth": Annotated[int, msgspec.Meta(ge=1)] | None,
    }
    WORKERS = "reader_threads"
    WORKERS_ARE = "reader threads"
    SPLIT = "Pass shard_id and num_shards on to the reader."
    GIVEN = ("shard_id", "num_shards", "rng", "num_threads")

    def axes(
        self, processors: int, *, accelerator: bool, takes: frozenset[str]
    ) -> SweptArguments:
        """Return the arguments to sweep: at most 24 settings, on a machine without a GPU at most 18."""
        eval_modes = ["eager", "deferred", "sync_cpu"]
        if accelerator:  # else it is sync_cpu
            eval_modes.append("sync_full")
        reader_threads = [0, 1]
        if {"shard_id", "num_shards"} <= takes:
            reader_threads.append(2)
        return {
            "eval_mode": eval_modes,
            "num_threads": sorted({1, processors}),
            "reader_threads": reader_threads,
            "queue_depth": [_QUEUE_DEPTH],
        }

    def simplified(self, arguments: Arguments) -> Arguments:
        """Return the arguments that matter: a queue needs reader threads."""
        if self.workers(arguments):
            return arguments
        return {**arguments, "queue_depth": None}

    def recognises(self, target: Target) -> bool:
        """Return whether the function's file imports DALI's dynamic mode."""
        try:
            source = inspect.getsource(
                inspect.getmodule(target.function) or target.function
            )
        except (OSError, TypeError):  # written in C
            return False
        return _IMPORTS_IT.search(source) is not None

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """Open the loader; sets what DALI allows to be set once in a process."""
        return DaliLoader(target, arguments, self.workers(arguments))


class DaliLoader(OpenLoader):
    """A user's function that makes batches with DALI, called in this thread or in reader threads."""

    kind = "dali"

    def __init__(self, target: Target, arguments: Arguments, threads: int) -> None:
        try:
            ndd = importlib.import_module(_DYNAMIC)
        except ImportError as error:
            raise LoaderError(
                f"DALI's dynamic mode can't be imported: {first_line(error)}",
                "Install it for your CUDA: pip install nvidia-dali-cuda120, or nvidia-dali-cuda130. It needs DALI 2.0.",
            ) from None
        if threads > 1 and not {"shard_id", "num_shards"} <= target.takes:
            raise LoaderError(
                f"reader_threads={threads}: your function does not take shard_id and num_shards, so each thread would "
                "read all of the data",
                "Let it take both, and pass them to its reader.",
            )
        if arguments.get("num_threads") is not None:
            ndd.set_num_threads(arguments["num_threads"])
        _count_examples(ndd)
        self._examples: int | None = None  # of the last batch
        self._readers: list[_Source | _ReaderThread] = []
        if not threads:
            self._readers.append(_Source(ndd, target, arguments))
        depth = int(arguments.get("queue_depth") or _QUEUE_DEPTH)
        for shard in range(threads):
            source = _Source(ndd, target, arguments, shard, threads)
            self._readers.append(_ReaderThread(source, depth))
        for reader in self._readers:
            reader.start()

    def epoch(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch; those of reader threads in turn, so that their order is always the same."""
        running = list(self._readers)
        try:
            for reader in running:
                reader.begin()
            while running:
                for reader in tuple(running):
                    made = reader.take()
                    if made is None:
                        running.remove(reader)
                    else:
                        batch, self._examples = made
                        yield batch
        finally:
            for reader in self._readers:
                reader.end()

    def facts(self, batch: Any) -> BatchFacts:
        """Return the facts of a batch.

        In the last batch of a shard, examples that the reader repeats or takes from the next epoch do not count.
        """
        return facts_of(batch, self._examples)


class _Source:
    """The user's function in one thread; all methods are called there."""

    def __init__(
        self,
        ndd: Any,
        target: Target,
        arguments: Arguments,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self._ndd = ndd
        self._target = target
        self._mode = str(arguments.get("eval_mode", "eager"))
        self._seed = target.seed + shard
        given = {name: value for name, value in arguments.items() if value is not None}
        on = "gpu" if target.device.startswith("cuda") else "cpu"
        self._given = {**given, "shard_id": shard, "num_shards": shards, "device": on}
        self._made: Any = None

    def start(self) -> None:
        """Prepare the thread, and call the function for the first time."""
        ndd = self._ndd
        ndd.random.set_seed(self._seed)
        self._given["rng"] = ndd.random.RNG(seed=self._seed)
        self._made = self._call()

    def begin(self) -> None:
        """Begin an epoch."""
        self._epoch = self._batches()

    def take(self) -> _Made | None:
        """Return the next batch, finished; None at the end."""
        return next(self._epoch, None)

    def end(self) -> None:
        """End the epoch, complete or not."""
        self._epoch.close()

    def _batches(self) -> Generator[_Made, None, None]:
        made = self._call() if self._made is None else self._made
        self._made = None  # if this epoch is broken off, a captured pipeline of its reader is lost
        _counted.examples.clear()
        with self._context() as context:
            iterator = iter(made)
            if isinstance(iterator, Generator):
                context.callback(iterator.close)  # in this thread, as DALI wants it
            for batch in iterator:
                for _, value in leaves(batch):
                    if isinstance(value, (self._ndd.Batch, self._ndd.Tensor)):
                        value.evaluate()
                self._synchronise()
                examples = max(_counted.examples.values(), default=None)
                _counted.examples.clear()
                yield batch, examples
        if iterator is not made:
            self._made = made

    def _call(self) -> Any:
        with self._context():
            made = self._target.call(self._given)
        if not isinstance(made, Iterable):
            raise LoaderError(
                f"your function returns a {type(made).__name__}, but an iterable of batches is needed",
                "Write a generator function that yields batches, or a class with __iter__.",
            )
        return made

    def _context(self) -> contextlib.ExitStack:
        """Return the context that the user's code runs in."""
        context = contextlib.ExitStack()
        context.enter_context(_operators_errors())
        context.enter_context(self._ndd.EvalMode[self._mode])
        if self._target.device.startswith("cuda"):
            context.enter_context(self._ndd.device(self._target.device))
        return context

    def _synchronise(self) -> None:
        """Wait for the streams of this thread, DALI's and torch's."""
        stream = self._ndd.get_current_stream()
        if stream is not None:  # there is a GPU
            stream.synchronize()
        if self._target.device.startswith("cuda"):
            import torch

            torch.cuda.current_stream(self._target.device).synchronize()


class _ReaderThread:
    """A source in a thread of its own, which makes `depth` batches before they are taken."""

    def __init__(self, source: _Source, depth: int) -> None:
        self._source = source
        self._depth = depth
        self._thread = ThreadPoolExecutor(1)
        self._coming: deque[Future[_Made | None]] = deque()

    def start(self) -> None:
        """Start the source in its thread."""
        self._thread.submit(self._source.start).result()

    def begin(self) -> None:
        """Begin an epoch, with `depth` batches on their way."""
        self._thread.submit(self._source.begin)
        for _ in range(self._depth):
            self._coming.append(self._thread.submit(self._source.take))

    def take(self) -> _Made | None:
        """Return the next batch, and ask for one more."""
        self._coming.append(self._thread.submit(self._source.take))
        return self._coming.popleft().result()

    def end(self) -> None:
        """End the source, after the batch that is being made."""
        while self._coming:
            self._coming.popleft().cancel()
        self._thread.submit(self._source.end).result()


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


class _Counted(threading.local):
    """Reader → the examples that this thread read since its last batch, without those that do not count."""

    def __init__(self) -> None:
        self.examples: dict[int, int] = {}


_counted = _Counted()
# Each reader's metadata, which a captured one gives in its first epoch only, and the epochs it ended.
_metadata: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _count_examples(ndd: Any) -> None:
    """Let all readers count the examples that belong to the epoch.

    `next_epoch(batch_size=B)` yields ceil(size of the shard / B) batches, all of B examples. Only the reader knows the
    size (`get_metadata`), and only the user's function holds the reader; so this wraps `next_epoch`.
    """
    reader_class = next(
        base
        for base in reversed(ndd.readers.File.__mro__)
        if "next_epoch" in vars(base)
    )
    original = reader_class.next_epoch
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def next_epoch(reader: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        left: int | None = None
        with contextlib.closing(original(reader, *args, **kwargs)) as batches:
            for outputs in batches:
                first = next(
                    iter(outputs.values() if isinstance(outputs, dict) else outputs)
                )
                size = getattr(first, "batch_size", None)
                if size is not None:
                    if left is None:
                        left = _epoch_size(reader, size)
                    examples = _counted.examples.get(id(reader), 0)
                    _counted.examples[id(reader)] = examples + max(0, min(size, left))
                    left -= size
                yield outputs
        _epochs[reader] = _epochs.get(reader, 0) + 1

    reader_class.next_epoch = next_epoch


def _epoch_size(reader: Any, batch_size: int) -> int:
    """Return the number of examples in the shard that the reader's next epoch reads, without those that pad it."""
    if reader not in _metadata:
        _metadata[reader] = reader.get_metadata(batch_size)
    metadata = _metadata[reader]
    size = metadata["epoch_size"]
    shards = metadata["number_of_shards"]
    shard = metadata["shard_id"]
    if not metadata["stick_to_shard"]:
        shard = (shard + _epochs.get(reader, 0)) % shards
    return int((shard + 1) * size // shards - shard * size // shards)
