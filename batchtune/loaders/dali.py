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
except after an epoch that was broken off if they capture a pipeline (`capture=True`), for then DALI gives them up.

**Seeds.** A reader that shuffles without a `seed` of its own takes DALI's default: the same order in every process,
and for a reader that is made for one epoch, in every epoch. Pass `seed` on, or keep the reader, if that is not meant.

**Epochs.** `reader.next_epoch(batch_size=B)` yields full batches only. The last batch of a shard is
filled up with the first examples of the next epoch, which then starts behind them, or with `pad_last_batch` with
copies of the shard's last example. These do not count here: an epoch has each example once, `epoch_size` in all.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from batchtune.errors import LoaderError
from batchtune.loaders.base import BatchFacts, LoaderKind, Machine, OpenLoader, Target
from batchtune.loaders.batches import examples_in_largest, facts_of
from batchtune.loaders.dali_readers import ReaderWatch
from batchtune.loaders.dali_threads import ReaderThread, Source
from batchtune.results import Argument, Arguments
from batchtune.workloads.loading import first_line

_DYNAMIC = "nvidia.dali.experimental.dynamic"
# DALI's default first; on the CPU the last two are the same.
_EVAL_MODES = ("eager", "deferred", "sync_cpu", "sync_full")


class DaliKind(LoaderKind):
    """DALI's dynamic mode.

    - `eval_mode`: when operators run. `eager`: in the background, begun at once; `deferred`: when their results are
      needed; `sync_cpu`: before the call returns; `sync_full`: the same, on the GPU too.
    - `num_threads`: of DALI's pool, which all readers share; set once in each process.
    - `reader_threads`: Python threads that call the function, each with its own shard, random numbers and CUDA stream.
      0: the training process calls it itself, for each batch when it needs one.
    - `queue_depth`: how many finished batches of each reader thread may wait for training.
    """

    name = "dali"
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "reader_threads": Annotated[int, msgspec.Meta(ge=0)],
        "queue_depth": Annotated[int, msgspec.Meta(ge=1)] | None,
    }
    WORKERS: ClassVar[str] = "reader_threads"
    QUEUE: ClassVar[str] = "queue_depth"
    WORKERS_ARE: ClassVar[str] = "reader threads"
    SPLIT: ClassVar[str] = "Pass shard_id and num_shards on to the reader."
    GIVEN: ClassVar[tuple[str, ...]] = ("shard_id", "num_shards", "rng", "num_threads")

    def axes(self, machine: Machine, takes: frozenset[str]) -> dict[str, Sequence[Argument]]:
        """As in the base class: at most 36 settings, on a machine without a GPU at most 27."""
        eval_modes: Sequence[str] = _EVAL_MODES
        num_threads = {1, machine.processors}
        if not machine.accelerator:
            eval_modes = _EVAL_MODES[:-1]
            num_threads.add(max(1, round(math.sqrt(machine.processors))))
        reader_threads = [0, 1]
        if {"shard_id", "num_shards"} <= takes:
            reader_threads.append(2)
        return {
            "eval_mode": eval_modes,
            "num_threads": sorted(num_threads),
            "reader_threads": reader_threads,
            "queue_depth": [2],
        }

    def quick_axes(self, axes: Mapping[str, Sequence[Argument]]) -> dict[str, Sequence[Argument]]:
        """As in the base class, with all processors, and operators in the background or at once."""
        modes = [mode for mode in axes["eval_mode"] if mode in ("eager", "sync_cpu")]
        return {**super().quick_axes(axes), "num_threads": axes["num_threads"][-1:], "eval_mode": modes}

    def simplified(self, arguments: Arguments) -> Arguments:
        """As in the base class: without reader threads there is no queue."""
        return arguments if self.workers(arguments) else {**arguments, "queue_depth": None}

    def recognises(self, target: Target) -> bool:
        """Return whether the module, or the code, of the function refers to DALI's dynamic mode."""
        return _mentions_dali(target.function)

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """As in the base class; sets what DALI allows to be set once in a process."""
        return DaliLoader(target, arguments, self.workers(arguments), self.prefetched(arguments))


class DaliLoader(OpenLoader):
    """A user's function that makes batches with DALI, called in this thread or in reader threads."""

    kind: ClassVar[str] = "dali"

    def __init__(self, target: Target, arguments: Arguments, threads: int, depth: int) -> None:
        self._ndd = ndd = _dynamic_mode(target.function)
        _check_device(ndd, target.device)
        mode = arguments.get("eval_mode", "eager")
        if mode not in _EVAL_MODES:
            raise LoaderError(f"eval_mode={mode}: DALI has {', '.join(_EVAL_MODES)}")
        if (num_threads := arguments.get("num_threads")) is not None:
            try:
                ndd.set_num_threads(num_threads)
            except (TypeError, ValueError) as error:
                raise LoaderError(f"num_threads={num_threads}: {' '.join(str(error).split())}") from None
        if threads > 1 and not {"shard_id", "num_shards"} <= target.takes:
            raise LoaderError(
                f"reader_threads={threads}: your function does not take shard_id and num_shards, so each thread would "
                "read all of the data",
                "Let it take both, and pass them to its reader.",
            )
        self._target = target
        self._arguments = arguments
        self._watch = ReaderWatch(ndd)
        self._last: tuple[Any, int] = (None, 0)
        self._own: Source | None = None
        self._threads: list[ReaderThread] = []
        if threads:
            sources = [self._source(shard, threads, str(mode)) for shard in range(threads)]
            self._threads += [ReaderThread(source, depth) for source in sources]
        else:
            self._own = self._source(0, 1, str(mode))
        try:
            if self._own:
                self._own.start()
            for thread in self._threads:
                thread.take()
        except BaseException:
            self.close()
            raise

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch; those of reader threads in turn, so that their order is always the same."""
        if self._own:
            with contextlib.closing(self._own.batches()) as batches:
                for self._last in batches:
                    yield self._last[0]
            return
        running = list(self._threads)
        try:
            for thread in running:
                thread.begin()
            while running:
                for thread in tuple(running):
                    made = thread.take()
                    if made is None:
                        running.remove(thread)
                    else:
                        self._last = made
                        yield made[0]
        finally:
            for thread in self._threads:
                thread.break_off()

    def facts(self, batch: Any) -> BatchFacts:
        """As in the base class. Lengths are exact: each example of a DALI batch has its own shape.

        In the last batch of a shard, examples that the reader repeats or takes from the next epoch do not count.
        """
        surplus = 0
        if batch is self._last[0]:
            surplus = self._last[1]
        return facts_of(batch, examples_in_largest(batch), surplus=surplus)

    def explain(self, error: BaseException) -> str | None:
        """As in the base class: DALI's own message for too many shards needs more."""
        return "there are fewer files than reader threads" if "num_shards_ <= Size()" in str(error) else None

    def close(self) -> None:
        """As in the base class. DALI may crash a process that ends while operators still run; they are awaited."""
        for thread in self._threads:
            thread.end()
        if self._own:
            self._own.stop()
            self._own = None
        self._watch.close()

    def _source(self, shard: int, shards: int, mode: str) -> Source:
        return Source(self._ndd, self._target, self._arguments, self._watch, (shard, shards), mode)


def _dynamic_mode(function: Callable[..., Any]) -> Any:
    """Import DALI's dynamic mode, for a function that uses it."""
    if _DYNAMIC not in sys.modules and not _mentions_dali(function):
        raise LoaderError(
            f"nothing that your code imports is {_DYNAMIC}, so it can't be measured as a loader of kind dali",
            "Leave --kind out; DALI's pipelines, and all other iterables of batches, are measured as kind iterable.",
        )
    try:
        return importlib.import_module(_DYNAMIC)
    except ImportError as error:
        raise LoaderError(
            f"DALI's dynamic mode can't be imported: {first_line(error)}",
            "Install it for your CUDA: pip install 'batchtune[dali]', or nvidia-dali-cuda130. It needs DALI 2.0.",
        ) from None


def _check_device(ndd: Any, device: str) -> None:
    if not device.startswith("cuda"):
        return
    try:
        ndd.device(device)
    except (RuntimeError, ValueError) as error:
        raise LoaderError(
            f"batches are to go to {device}, but DALI sees no such GPU: {first_line(error)}",
            "Take --device cpu, or look at the driver: nvidia-smi lists the GPUs.",
        ) from None


def _mentions_dali(function: Callable[..., Any]) -> bool:
    """Return whether the dynamic mode is among the globals of the function's module, or imported in its code."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    for value in vars(module).values() if module else ():
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.startswith(_DYNAMIC):
            return True
    members = vars(function).values() if isinstance(function, type) else [function]
    codes = [member.__code__ for member in members if isinstance(member, types.FunctionType)]
    for code in codes:  # which grows
        if any(name.startswith(_DYNAMIC) for name in code.co_names):
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return False
