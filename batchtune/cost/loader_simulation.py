"""Simulates the queue of a torch DataLoader: its workers make batches, the training process takes them, and waits.

The rules are those of `_MultiProcessingDataLoaderIter` in torch/utils/data/dataloader.py (version 2.13):

- `prefetch_factor` × `num_workers` batches are requested at the start, from the workers in a cycle. One more is
  requested each time a batch is handed out, before the step that takes it.
- In order, it is requested from the next worker of the cycle, however busy that one is, and batches are handed out in
  the order of the requests. Those that arrive early are received while the process waits for the right one.
- Out of order, it is requested from the worker whose batch was handed out, the only one with fewer than
  `prefetch_factor` batches to make, and what arrives first is handed out first.
- A batch is received only while the training process waits for one: receiving never overlaps with a step.
- Without workers, nothing overlaps: each batch is made between two steps.

An iterable dataset makes no difference: each worker has its own stream, but batches are requested alike.

Processors are shared as in processor sharing (Kleinrock 1967), in the limit of parts so small that waiting and
computing alternate evenly: if a worker computes for the share `busy` of its time, W workers that make batches and C
processors all proceed at the rate min(1, C / (W·busy + the training process's own computing)).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSetting:
    """The arguments of a DataLoader that its queue depends on."""

    workers: int
    prefetch_factor: int = 2
    in_order: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCosts:
    """The loader's costs of batches, in the order of the requests.

    Attributes:
        seconds: One worker's time for each batch, with a processor of its own: shape (batches,).
        busy: The share of it that computes.
        receive_seconds: The training process's time to receive each, computing: shape (batches,).
        latency_seconds: The delay of a batch whose worker had nothing to do when it was requested.
    """

    seconds: FloatArray
    busy: float
    receive_seconds: FloatArray
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """A consumer's waits: arrays of shape (batches,), in the order in which batches were handed out.

    Attributes:
        seconds: The wait for each, receiving included; for the first from the start of the epoch.
        delivered: When each was handed out, in seconds from the start of the epoch.
        batches: The index of each in the costs.
    """

    seconds: FloatArray
    delivered: FloatArray
    batches: npt.NDArray[np.int64]


def simulate_waits(
    setting: QueueSetting, costs: BatchCosts, step_seconds: npt.ArrayLike, *, processors: float = math.inf
) -> Waits:
    """Simulate an epoch, event by event.

    Without contention, one worker that always has requests is the queue of Lindley 1952: with u the time at which a
    batch is made, wait = max(0, u - the time at which training wants it) + the time to receive it.

    `step_seconds` are those of each batch of `costs`, or one for all. Workers and receiving share the `processors`,
    without those that the steps keep busy.
    """
    count = len(costs.seconds)
    steps = np.broadcast_to(np.asarray(step_seconds, dtype=np.float64), count)
    if not setting.workers:
        return Waits(costs.seconds, np.cumsum(costs.seconds + steps) - steps, np.arange(count))
    queue = _Queue(setting, costs, processors)
    handed = np.empty(count, dtype=np.int64)
    waits, delivered = np.empty(count), np.empty(count)
    seconds = steps.tolist()
    for place in range(count):
        asked = queue.now
        batch = queue.take()
        waits[place], delivered[place], handed[place] = queue.now - asked, queue.now, batch
        queue.ask(batch)
        queue.step(seconds[batch])
    return Waits(waits, delivered, handed)


class _Queue:
    """The state of a simulated epoch.

    All that computes proceeds at the same rate, so what is under way ends in the order of its remaining work: `ends` is
    a heap by virtual time, which runs at that rate. The training process that receives a batch is worker -1.
    """

    def __init__(self, setting: QueueSetting, costs: BatchCosts, processors: float) -> None:
        self.in_order = setting.in_order
        self.seconds = costs.seconds.tolist()
        self.receive_seconds = costs.receive_seconds.tolist()
        self.busy, self.latency, self.processors = costs.busy, costs.latency_seconds, processors
        self.workers = setting.workers
        self.now, self.virtual, self.rate = 0.0, 0.0, 1.0
        self.ends: list[tuple[float, int, int]] = []
        self.tasks: list[deque[int]] = [deque() for _ in range(setting.workers)]
        self.making = [False] * setting.workers
        self.active = 0
        self.maker: dict[int, int] = {}
        self.arrived: deque[int] = deque()
        self.received: set[int] = set()
        self.sent = self.expected = 0
        for _ in range(setting.workers * setting.prefetch_factor):
            self._send(self.sent % self.workers)

    def ask(self, handed: int) -> None:
        """Request one more batch, after this one was handed out."""
        worker = self.maker.pop(handed)
        self._send(self.sent % self.workers if self.in_order else worker)

    def take(self) -> int:
        """Wait for the next batch."""
        while not (self.in_order and self.expected in self.received):
            while not self.arrived:
                self._go_on()
            batch = self.arrived.popleft()
            self._receive(self.receive_seconds[batch])
            if not self.in_order:
                return batch
            self.received.add(batch)
        self.received.remove(self.expected)
        self.expected += 1
        return self.expected - 1

    def step(self, seconds: float) -> None:
        """Let the workers proceed for the time of a step."""
        end = self.now + seconds
        while self.ends and self.now + (self.ends[0][0] - self.virtual) / self.rate <= end:
            self._go_on()
        self.virtual += (end - self.now) * self.rate
        self.now = end

    def _send(self, worker: int) -> None:
        if self.sent == len(self.seconds):
            return
        self.maker[self.sent] = worker
        self.tasks[worker].append(self.sent)
        self.sent += 1
        if not self.making[worker]:
            self.making[worker] = True
            self.active += 1
            self._begin(worker, self.latency)
            self._share()

    def _begin(self, worker: int, latency: float = 0.0) -> None:
        batch = self.tasks[worker].popleft()
        heappush(self.ends, (self.virtual + latency + self.seconds[batch], worker, batch))

    def _share(self, more: float = 0.0) -> None:
        """Set the rate at which all proceed; the training process keeps `more` processors busy."""
        wanted = self.active * self.busy + more
        self.rate = 1.0 if wanted <= self.processors else self.processors / wanted

    def _go_on(self, more: float = 0.0) -> int:
        """Advance to the end of what ends next; return its worker."""
        end, worker, batch = heappop(self.ends)
        self.now += (end - self.virtual) / self.rate
        self.virtual = end
        if worker < 0:
            return worker
        self.arrived.append(batch)
        if self.tasks[worker]:
            self._begin(worker)
        else:
            self.making[worker] = False
            self.active -= 1
            self._share(more)
        return worker

    def _receive(self, seconds: float) -> None:
        if not seconds:
            return
        heappush(self.ends, (self.virtual + seconds, -1, -1))
        self._share(1.0)
        while self._go_on(1.0) >= 0:
            pass
        self._share()
