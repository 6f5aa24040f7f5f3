"""The worker process: builds a loader once, and takes batches from it on request; and the messages to and from it.

Forked by the nursery. It speaks over its socket alone: what the loader's code prints goes to the standard streams and
disturbs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import math
import os
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from batchtune.errors import BatchtuneError, LoaderError
from batchtune.loaders import KINDS, OpenLoader, Target, kind_of
from batchtune.probe.failures import error_verdict
from batchtune.processes.worker import Failed, Message, oom_kills, serve
from batchtune.results import Arguments
from batchtune.workloads import first_line, load_function, user_traceback


class Open(Message, frozen=True):
    """A request to import the user's code and to build the loader.

    Attributes:
        kind: As the user named it; None: recognised.
        processors: The processors that the process and all that it starts may use.
        device: `auto`, `cpu` or `cuda:N`.
        inspect: Whether to drop arguments that the user's function does not take.
        config: Path of the run's `sampler.yaml`, if it has one.
    """

    spec: str
    options: dict[str, Any]
    kind: str | None
    arguments: Arguments
    processors: list[int]
    device: str
    seed: int
    inspect: bool = False
    config: str | None = None


class Opened(Message, frozen=True):
    """The loader that was built.

    Attributes:
        takes: The parameters of the user's function.
        device: That batches go to, `cpu` or `cuda:N`; device_name: as a person knows it.
        batches: Of an epoch; None: unknown.
        exact, dealt: As in `OpenLoader`.
    """

    pid: int
    kind: str
    takes: list[str]
    device: str
    device_name: str
    batches: int | None
    exact: bool = False
    dealt: bool = False


class Take(Message, frozen=True):
    """A request for an epoch, or its first part.

    Attributes:
        seconds: The epoch ends this long after its first batch, or
        batches: after this many, whichever comes first.
        steps: How long the consumer is busy with each batch in turn, from the start again after the last; None: it
            takes batches as fast as they come.
        digests: Whether to hash each batch.
    """

    seconds: float
    batches: int | None = None
    steps: list[float] | None = None
    digests: bool = False


class BatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered batch; None: unknown.

    Attributes:
        total_length: Sum of the true lengths where they are known, else of the padded ones, in the loader's unit.
        size_bytes: Of all its tensors and arrays.
        length: Longest true length, in the run's unit.
    """

    examples: int | None
    total_length: float | None
    size_bytes: int
    length: float | None = None


class Taken(Message, frozen=True):
    """A delivered epoch, or its first part; lists have one entry for each batch.

    Attributes:
        complete: Whether the epoch came to its end.
        waits: Seconds for each batch, the first from the start of the epoch.
        steps: Seconds that the consumer then took.
        cpu_seconds: Of the process and all that it started.
        words: The shape of the first batch, in words.
        digests: Of each batch, name → hash.
    """

    complete: bool = False
    waits: list[float] = msgspec.field(default_factory=list)
    steps: list[float] = msgspec.field(default_factory=list)
    batches: list[BatchFacts] = msgspec.field(default_factory=list)
    cpu_seconds: float = 0.0
    words: str | None = None
    digests: list[dict[str, str]] = msgspec.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From its start to its end, without starting the workers of the next epoch."""
        return sum(self.waits) + sum(self.steps)


LoaderRequest = Open | Take
LoaderReply = Opened | Taken | Failed


# As torch, Python and the C library write them.
_DIED = re.compile(
    r"DataLoader worker \(pid.*?\) (?:is killed by signal|exited unexpectedly).*"
)
_NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|resize) shared memory|(?:shm|torch_)\S*.*No space left on device|out of shared memory"
)

_FEWER = "Use fewer workers, a lower prefetch_factor or smaller batches."


def work(channel: int) -> None:
    """Serve requests until the supervisor closes the socket."""
    serve(channel, LoaderRequest, _Loaders().answer)


class _Loaders:
    """The loader that this worker process opened, and the answers to what is asked of it."""

    def __init__(self) -> None:
        self._loader: OpenLoader | None = None
        self._kills: int | None = None
        # Its traceback keeps torch's iterator, which would wait for its workers as it goes, or for a lock left closed.
        self._raised: BaseException | None = None

    def answer(self, request: LoaderRequest) -> LoaderReply:
        """Do what a request asks for."""
        try:
            if isinstance(request, Open):
                self._kills = oom_kills()
                return self._open(request)
            assert self._loader is not None, "asked before the loader was opened"
            return _take(self._loader, request)
        except BaseException as error:
            self._raised = error
            return failed(error, self._kills)

    def _open(self, request: Open) -> Opened:
        os.sched_setaffinity(0, request.processors)
        _seed(request.seed, len(request.processors))
        device, device_name = _device(request.device)
        target = _target(request, device)
        arguments = request.arguments
        if request.inspect:
            arguments = {
                name: value for name, value in arguments.items() if name in target.takes
            }
        if request.kind is not None:
            kind = kind_of(request.kind)
        else:
            kind = next(kind for kind in map(kind_of, KINDS) if kind.recognises(target))
        self._loader = kind.open(target, arguments)
        return Opened(
            pid=os.getpid(),
            kind=self._loader.kind,
            takes=sorted(target.takes),
            device=device,
            device_name=device_name,
            batches=self._loader.batches(),
            exact=self._loader.exact,
            dealt=self._loader.dealt,
        )


def _take(loader: OpenLoader, request: Take) -> Taken | Failed:
    """Take batches until the epoch or the request ends."""
    taken = Taken()
    complete = False
    words = None
    ending = math.inf
    steps = itertools.cycle(request.steps or ())
    busy_before = _cpu_seconds()
    asked = time.perf_counter()
    epoch = loader.epoch()
    for batch in epoch:
        delivered = time.perf_counter()
        taken.waits.append(delivered - asked)
        taken.batches.append(loader.facts(batch))
        words = words or words_of(batch)
        if request.digests:
            taken.digests.append(digests_of(batch))
        del batch
        if request.steps:
            step_ends = delivered + next(steps)
            time.sleep(max(0.0, step_ends - time.perf_counter()))
        asked = time.perf_counter()
        taken.steps.append(asked - delivered)
        ending = min(ending, delivered + request.seconds)
        if asked >= ending or len(taken.waits) == request.batches:
            break
    else:
        complete = True
    if not taken.waits:
        return Failed(
            outcome="empty",
            message="no batch in an epoch: is the data set empty, or smaller than a batch, with drop_last?",
        )
    cpu_seconds = _cpu_seconds() - busy_before
    # Workers that were stopped in the middle of a batch may end in disorder.
    with contextlib.suppress(Exception):
        epoch.close()
    return replace(
        taken,
        complete=complete or len(taken.waits) == loader.batches(),
        cpu_seconds=cpu_seconds,
        words=words,
    )


def _seed(seed: int, processors: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    torch.set_num_threads(processors)  # as if it had started with them


def _device(device: str) -> tuple[str, str]:
    """Return the device that a `--device` value means, `cpu` or `cuda:N`, and its name; it is the current one then."""
    import torch

    usable = torch.cuda.device_count() if device != "cpu" else 0
    if not usable and device in ("auto", "cpu"):
        return "cpu", "CPU"
    number = int(device.partition(":")[2] or 0)
    if number >= usable:
        raise LoaderError(
            f"--device {device}: torch can use {usable or 'no'} GPUs here",
            "Measure on the CPU with --device cpu, or name another.",
        )
    torch.cuda.set_device(number)
    return f"cuda:{number}", torch.cuda.get_device_name(number)


def _target(request: Open, device: str) -> Target:
    """Import what the request names."""
    given = {"seed", "device", *request.arguments}
    for kind in map(kind_of, KINDS):
        given.update(kind.GIVEN)
    function = load_function(request.spec, request.options, given=given)
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # written in C
        parameters += inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind in by_name
    }
    needed = {
        name for name, default in named.items() if default is inspect.Parameter.empty
    }
    return Target(
        function=function,
        options=request.options,
        takes=frozenset(named),
        needs=frozenset(needed),
        seed=request.seed,
        device=device,
        config=request.config,
    )


def _cpu_seconds() -> float:
    """Return how long this process and all that it started have computed so far, those that have ended included."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            # Its own and its children's, user and system.
            total += sum(process.cpu_times()[:4])
    return total


def failed(error: BaseException, kills: int | None) -> Failed:
    """Return what an error was, in words.

    `kills` is how many processes the kernel had killed for lack of memory when the loader was opened.
    """
    if isinstance(error, BatchtuneError):
        return Failed.of(error)
    message = first_line(error)
    last_lines = user_traceback(error)
    # The error itself ends what torch passes on.
    if "in DataLoader worker process" in message:
        message = last_lines.rstrip().rpartition("\n")[2]
    said = "".join(traceback.format_exception(error, limit=0))
    if _NO_SHARED_MEMORY.search(said):
        return Failed(
            outcome="shared_memory",
            message="/dev/shm is too small for the batches in flight",
            hint=f"Enlarge it (docker run --shm-size=8g, or --ipc=host). {_FEWER}",
        )
    if deaths := _DIED.findall(said):
        death = deaths[-1].strip()  # torch's own cause names the signal
        if (oom_kills() or 0) > (kills or 0):
            return Failed(
                outcome="oom",
                message=f"{death} The kernel killed it for lack of memory.",
                hint=_FEWER,
            )
        return Failed(
            outcome="crash",
            message=death,
            hint="Look at what it printed, and run it with num_workers=0. Under spawn and forkserver, workers import "
            "your file again, by its name.",
        )
    if error_verdict(error) == "oom":
        return Failed(outcome="oom", message=message, hint=_FEWER, traceback=last_lines)
    hint = None
    if "pickle" in said.lower():
        hint = (
            "What workers are sent (under spawn, the data set) and send must be picklable: define functions and "
            "classes at the top level of the file, open files and locks in the worker, and return tensors."
        )
    return Failed(message=message, hint=hint, traceback=last_lines)


# Describes any batch: tensors and arrays in dicts, lists, tuples and objects; DALI's batches among them.
#
# A batch of DALI's has a list of shapes, one for each example.

# Deeper than any batch; an object may refer to itself.
_MAX_DEPTH = 8
_PLAIN = (str, bytes, bytearray, bool, int, float, complex, type(None))


def leaves(
    batch: Any, name: str = "", depth: int = _MAX_DEPTH
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of a batch, and its plain values, each with its name: `wav.data`, `0`, `meta.id`.

    A list of plain values is one leaf. Private attributes of objects are left out.
    """
    if _is_tensor(batch) or isinstance(batch, _PLAIN):
        yield name, batch
    elif isinstance(batch, (list, tuple)) and all(
        isinstance(item, _PLAIN) for item in batch
    ):
        yield name, list(batch)
    elif depth:
        for key, inner in _members(batch):
            yield from leaves(inner, f"{name}.{key}" if name else str(key), depth - 1)


def facts_of(batch: Any, limit: int | None = None) -> BatchFacts:
    """Describe a batch by the shapes of its tensors; it holds no more examples than `limit`.

    The number of examples is the size that most of its tensors and lists begin with. The length of each is the longest
    side of the largest tensor that is not this number; in a DALI batch each example has its own.
    """
    values = [value for _, value in leaves(batch)]
    tensors = [value for value in values if _is_tensor(value)]
    examples = _examples(batch, values)
    if limit is not None:
        examples = limit if examples is None else min(limit, examples)
    total_length = None
    if tensors and examples is not None:
        lengths = _lengths(max(tensors, key=_bytes_of), examples)
        total_length = sum(lengths[:examples]) or None
    return BatchFacts(
        examples=examples,
        total_length=total_length,
        size_bytes=sum(map(_bytes_of, tensors)),
    )


def words_of(batch: Any) -> str:
    """Say what a batch is by its largest tensor: `32 × 1600 (wav)`; in a DALI batch, up to which shape its examples."""
    tensors = [(name, value) for name, value in leaves(batch) if _is_tensor(value)]
    if not tensors:
        return f"a {type(batch).__name__} without tensors"
    name, largest = max(tensors, key=lambda named: _bytes_of(named[1]))
    sides = list(largest.shape)
    if _is_ragged(largest):
        sides = [len(largest.shape), *map(max, zip(*largest.shape, strict=True))]
    shape = " × ".join(map(str, sides)) or "a number"
    return f"{shape} ({name})" if name else shape


def digests_of(batch: Any) -> dict[str, str]:
    """Return a hash of each leaf of a batch, by its name: of a tensor's type, shape and bits, or of plain values."""
    return {name: _digest(value) for name, value in leaves(batch)}


def moved(batch: Any, device: str, *, non_blocking: bool) -> Any:
    """Return a batch with all that has a method `to` on a torch device: the batch itself, or what is nested in it."""
    from torch.utils._pytree import tree_map

    def move(leaf: Any) -> Any:
        if callable(getattr(leaf, "to", None)):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf

    return tree_map(move, batch)


def _is_tensor(value: Any) -> bool:
    """Return whether a leaf is a tensor or an array, of whatever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_ragged(tensor: Any) -> bool:
    return isinstance(tensor.shape, list)


def _bytes_of(tensor: Any) -> int:
    if _is_ragged(tensor):
        return sum(map(math.prod, tensor.shape)) * int(tensor.dtype.bytes)
    return int(getattr(tensor, "nbytes", 0))


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a mapping, a record, a list or any other object, each with its name."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if callable(value):  # a class, for example
        return ()
    return [
        (key, inner)
        for key, inner in getattr(value, "__dict__", {}).items()
        if not key.startswith("_")
    ]


def _examples(batch: Any, values: list[Any]) -> int | None:
    """Return how many examples a batch has: the entries of a list of dicts, or the most frequent first side."""
    if (
        isinstance(batch, list)
        and batch
        and all(isinstance(item, Mapping) for item in batch)
    ):
        return len(batch)
    sizes: Counter[int] = Counter()
    for value in values:
        if isinstance(value, list):
            sizes[len(value)] += 1
        elif _is_tensor(value) and len(value.shape):
            sizes[len(value.shape) if _is_ragged(value) else int(value.shape[0])] += 1
    return max(sizes, key=lambda size: (sizes[size], -size), default=None)


def _lengths(tensor: Any, examples: int) -> list[float]:
    """Return the length of each example of a tensor; nothing without a length."""
    if _is_ragged(tensor):
        return list(
            max(
                zip(*tensor.shape, strict=True),
                key=lambda extents: (max(extents) - min(extents), max(extents)),
                default=[],
            )
        )
    sides = [int(side) for side in tensor.shape]
    if examples in sides:
        sides.remove(examples)
    return [max(sides, default=0)] * examples


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if not _is_tensor(value):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()
    digest.update(str(value.dtype).encode())
    tensors = value.cpu().evaluate().tensors if _is_ragged(value) else [value]
    for tensor in tensors:
        digest.update(f" {tuple(tensor.shape)}".encode())
        digest.update(_bits(tensor))
    return digest.hexdigest()


def _bits(tensor: Any) -> bytes:
    """Return the bytes of a torch or DALI tensor, or of an array."""
    import numpy as np

    if callable(getattr(tensor, "evaluate", None)):  # DALI's
        tensor = tensor.cpu().evaluate()
    if callable(getattr(tensor, "detach", None)):
        import torch

        tensor = tensor.detach().cpu()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    array = np.asarray(tensor)
    if array.dtype == object:
        return repr(array.tolist()).encode("utf-8", "backslashreplace")
    return array.tobytes()
