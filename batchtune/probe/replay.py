"""Replays the memory requests of recorded steps in torch's own allocator, without their kernels.

Whether a batch fits in shuffled training depends on what the batches before it left: where the
optimizer's state came to lie in the first step, and which free blocks are too small. A replayed
step takes milliseconds, so far more orders of batches can be replayed than run. On an emulated
device, five of 60 replayed processes ran out of memory where two of eight real ones did, each in
its first steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

from batchtune.probe.devices.cuda import begin
from batchtune.probe.requests import OF_A_STREAM, RecordedStep, Replay, Replayed

# Some tables run out of memory in the first steps of a process: with native segments one of conformer-ctc base in bf16
# did so in 1 of 5 epochs, at step 3. 60 replayed processes of 10 steps showed it three times, as many of 100 once. So
# each of the steps begins a short process, however long they all take.
_FEW_STEPS = 10
# Others do so after hundreds: with expandable segments one of transformer-lm base in fp32 did in 1 of 5 epochs, at step
# 394. 232 replayed processes of 24 steps did not show it, and the 15th of 100 did. Another, of conformer-ctc base in
# bf16, did in 4 of 5 epochs: 9 of 79 processes of 100 steps showed it.
_MANY_STEPS = 100
_FEWEST_LONG = 40
_LONG_PROCESSES = 2  # of each step
_MOST_ENTRIES = 4_000_000
_MOST_REQUESTS = 500_000  # of a step: more make a message too long

Requests = Sequence[int]
"""Those of a `RecordedStep`."""


class RequestRecorder:
    """Records what is asked of a GPU's allocator from step to step."""

    def __init__(self, device: int) -> None:
        import torch

        self._memory: Any = torch.cuda.memory
        self._device = device
        segments = [
            segment
            for segment in self._memory.memory_snapshot()
            if segment["device"] == device and segment["active_size"]
        ]
        blocks = [block for segment in segments for block in segment["blocks"]]
        in_use = (block["address"] for block in blocks if _is_in_use(block))
        # Of each block that was in use before the step: its address, and its number.
        self._places = {address: place for place, address in enumerate(in_use)}
        self._streams: dict[int, int] = {0: 0}  # handle → number
        self._held: list[list[int]] | None = [
            self._layout_of(segment) for segment in segments
        ]

    def begin(self) -> None:
        """Record a step from here on."""
        self._memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MOST_ENTRIES
        )

    def take(self) -> RecordedStep | None:
        """Return the step that ends here; None if it asks too often."""
        snapshot = self._memory._snapshot()
        self._memory._record_memory_history(None)
        left = self._places
        made: dict[int, int] = {}
        numbers = count()
        requests = []
        for entry in snapshot["device_traces"][self._device]:
            address = entry.get("addr")  # an error has none
            if entry["action"] == "alloc":
                made[address] = next(numbers)
                on = self._number_of(entry["stream"])
                requests.append(entry["size"] + on * OF_A_STREAM)
            elif entry["action"] == "free_completed":
                if address in made:
                    requests.append(-1 - 2 * made.pop(address))
                elif address in left:
                    requests.append(-2 - 2 * left.pop(address))
        # In the order in which they were made: a block that is made again moves to the end.
        self._places = {address: place for place, address in enumerate(made)}
        held = self._held
        self._held = None
        if len(requests) > _MOST_REQUESTS:
            return None
        return RecordedStep(self._device, held, requests)

    def _number_of(self, stream: int) -> int:
        return self._streams.setdefault(stream, len(self._streams))

    def _layout_of(self, segment: Mapping[str, Any]) -> list[int]:
        """Return a segment as `RecordedStep.held` has it."""
        total = segment["total_size"] if segment["segment_type"] == "large" else 0
        return [
            self._number_of(segment["stream"]),
            total,
            *(
                block["size"] if _is_in_use(block) else -block["size"]
                for block in segment["blocks"]
            ),
        ]


def _is_in_use(block: Mapping[str, Any]) -> bool:
    return bool(block["state"] == "active_allocated")


def replay(request: Replay) -> Replayed:
    """Replay processes that begin with each of the steps, and go on with random ones, until one runs out of memory.

    It also ends when the requested time is over. A step that begins a process also allocates what
    the recorded first step kept for good, the optimizer's state; a step that makes another number
    of blocks begins none.
    """
    import torch

    steps: list[Requests] = [step.requests for step in request.steps]
    first, second, *_ = steps
    device = torch.device("cuda", request.steps[0].device)
    torch.cuda.set_device(device)
    begin(device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, request.limit_bytes / total))
    held = request.steps[0].held or []
    released, first = freed_by(first)
    freed, steps[1] = freed_by(second)
    kept = kept_from(first, freed)
    beginnings = [(0, first)]
    for number, step in enumerate(steps[1:], start=1):
        beginning = as_first(step, first, kept)
        if beginning is not None:
            beginnings.append((number, beginning))
    chosen = random.Random(request.seed)
    short = [(*beginning, _FEW_STEPS) for beginning in beginnings]
    long = [(*beginning, _MANY_STEPS) for beginning in beginnings] * _LONG_PROCESSES
    began = time.monotonic()
    ends = began + request.most_seconds
    processes = 0
    replayed = 0
    for number, beginning, length in short + long:
        if processes == len(short) + _FEWEST_LONG:
            ends = min(ends, began + request.seconds)
        if time.monotonic() >= ends:
            break
        memory = Memory(held, released)
        processes += 1
        try:
            memory.run(beginning)
            memory.keep(kept)
            replayed += 1
            for _ in range(length - 1):
                number = chosen.randrange(1, len(steps))
                memory.run(steps[number])
                replayed += 1
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". GPU")[0]
            return Replayed(
                processes=processes, steps=replayed, failed=number, error=reason
            )
        finally:
            memory.end()
    return Replayed(processes=processes, steps=replayed)


class Memory:
    """The memory of a replayed process, which holds what a `RecordedStep` says.

    The first step frees the `released` blocks of these.
    """

    def __init__(
        self, held: Sequence[Sequence[int]], released: Sequence[int] = ()
    ) -> None:
        from torch import _C

        self._take = _C._cuda_cudaCachingAllocator_raw_alloc
        self._free = _C._cuda_cudaCachingAllocator_raw_delete
        self._held: list[int] = []
        self._streams: list[Any] = []
        gaps: list[int] = []
        for on, total, *blocks in held:
            if total:  # blocks come to lie in the segment that this leaves
                self._free(self._allocate(total, on))
            for block in blocks:
                made = self._allocate(abs(block), on)
                (self._held if block > 0 else gaps).append(made)
        self._free_all(gaps)
        self._left = [self._held[number] for number in released]
        for number in sorted(released, reverse=True):
            del self._held[number]
        self._made: list[int] = []

    def run(self, requests: Requests) -> None:
        """Make a step's requests, then free what the step before left. Raises torch.OutOfMemoryError."""
        allocate = self._allocate
        left = self._left
        made = self._made
        for request in requests:
            if request > 0:
                on, size = divmod(request, OF_A_STREAM)
                made.append(allocate(size, on))
                continue
            blocks = left if request % 2 == 0 else made
            number = (-1 - request) // 2
            if number < len(blocks) and blocks[number]:
                self._free(blocks[number])
                blocks[number] = 0
        self._free_all(left)
        self._left = list(filter(None, made))
        self._made = []

    def _allocate(self, size: int, on: int) -> int:
        """Return the address of a block for the stream of that number."""
        if not on:
            return self._take(size, 0)
        import torch

        cuda: Any = torch.cuda
        while len(self._streams) < on:
            self._streams.append(cuda.Stream())
        return self._take(size, self._streams[on - 1].cuda_stream)

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep these of the blocks that the last step left, until the end."""
        self._held += [self._left[number] for number in numbers]
        for number in reversed(numbers):
            del self._left[number]

    def end(self) -> None:
        """Free all."""
        import torch

        for blocks in (self._made, self._left, self._held):
            self._free_all(blocks)
        torch.cuda.empty_cache()

    def _free_all(self, blocks: list[int]) -> None:
        for block in filter(None, blocks):
            self._free(block)
        blocks.clear()


def _left(requests: Requests) -> list[int]:
    """Return which of its blocks a step leaves to the next one, in their order."""
    freed = set(_freed(requests))
    made = sum(request > 0 for request in requests)
    return [number for number in range(made) if number not in freed]


def _freed(requests: Requests, *, left: bool = False) -> list[int]:
    """Return which of its blocks a step frees, in their order; or which of those that were left."""
    frees = (-1 - request for request in requests if request < 0)
    return [number // 2 for number in frees if number % 2 == left]


def freed_by(step: Requests) -> tuple[list[int], list[int]]:
    """Return which of the blocks that were left to a step it frees, and the step as if only these had been left.

    All held blocks are left to the first recorded step. If earlier steps were not recorded, it frees gradients.
    """
    freed = sorted(_freed(step, left=True))
    places = {-2 - 2 * number: -2 - 2 * place for place, number in enumerate(freed)}
    return freed, [places.get(request, request) for request in step]


def kept_from(first: Requests, freed: Collection[int]) -> list[int]:
    """Return the blocks that the first step leaves and the second has not freed: the optimizer's state."""
    return [number for number in range(len(_left(first))) if number not in freed]


def as_first(step: Requests, first: Requests, kept: Sequence[int]) -> list[int] | None:
    """Return a step as the first of a process, which also allocates the optimizer's state as the recorded one did.

    Return None if apart from that state, the two make or leave different numbers of blocks.
    """
    left = _left(first)
    for_good = {left[number] for number in kept}
    before: list[list[int]] = [[]]  # sizes, by the number of other blocks before them
    for number, size in enumerate(request for request in first if request > 0):
        if number in for_good:
            before[-1].append(size)
        else:
            before.append([])
    others = sum(request > 0 for request in step)
    if others != len(before) - 1 or len(_left(step)) != len(left) - len(kept):
        return None
    made = 0
    places: list[int] = []
    requests = []
    for request in step:
        if request > 0:
            sizes = before[len(places)]
            requests += [*sizes, request]
            places.append(made + len(sizes))
            made += len(sizes) + 1
        elif request % 2:
            requests.append(-1 - 2 * places[(-1 - request) // 2])
        else:
            requests.append(request)
    return requests + before[-1]
