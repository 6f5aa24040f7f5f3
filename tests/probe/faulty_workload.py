"""Workloads that go wrong in one way each, for real."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from typing import Any

import numpy as np
import torch

from batchtune import BatchShape


class Good:
    def setup(self, device: torch.device) -> None:
        self.weight = torch.ones(4, requires_grad=True)

    def make_batch(self, shape: BatchShape) -> BatchShape:
        return shape

    def step(self, batch: BatchShape) -> None:
        (self.weight * batch.batch_size).sum().backward()


class TrainsNothing(Good):
    """Forgets the optimizer's step."""

    def setup(self, device: torch.device) -> None:
        self.model = torch.nn.Linear(64, 64)

    def step(self, batch: BatchShape) -> None:
        self.model(torch.ones(batch.batch_size, 64)).sum().backward()


class RaisesInSetup(Good):
    def setup(self, device: torch.device) -> None:
        raise ValueError("no such checkpoint: epoch-3.pt")


class RaisesInMakeBatch(Good):
    def make_batch(self, shape: BatchShape) -> BatchShape:
        raise IndexError("token 50001 is not in the vocabulary")


class RaisesInStep(Good):
    def step(self, batch: BatchShape) -> None:
        torch.ones(2, 3) @ torch.ones(2, 3)


class Disguised(Good):
    """Says of every batch what cuBLAS says both for a lack of memory and for a bug."""

    def step(self, batch: BatchShape) -> None:
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        )


class ForksAndHangs(Good):
    """Starts a child of its own, as a data loader does, and says which."""

    def step(self, batch: BatchShape) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        with open("child", "w") as file:
            file.write(str(child))
        time.sleep(1000)


def start_daemon() -> None:
    """A grandchild in a session of its own, whose parent has ended: nothing leads from it to the worker."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)


class StartsDaemons(Good):
    """Starts one in its setup and one in each step; of batches of two it dies, of larger ones it hangs."""

    def setup(self, device: torch.device) -> None:
        super().setup(device)
        start_daemon()

    def step(self, batch: BatchShape) -> None:
        start_daemon()
        super().step(batch)
        if batch.batch_size == 2:
            os._exit(3)
        if batch.batch_size > 2:
            open("hanging", "w").close()
            time.sleep(1000)


class KillsItsParent(StartsDaemons):
    """Kills the process above it, as one does that cleans up by name."""

    def step(self, batch: BatchShape) -> None:
        start_daemon()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)


class WaitsToBeKilled(Good):
    """Once: says in the folder who it is, and waits."""

    def __init__(self, folder: str) -> None:
        self.file = f"{folder}/pid"

    def step(self, batch: BatchShape) -> None:
        if not os.path.exists(self.file):
            with open(f"{self.file}.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{self.file}.new", self.file)
            time.sleep(1000)
        super().step(batch)


class SlowToSetUp(Good):
    def __init__(self, seconds: float = 1.5) -> None:
        self.seconds = seconds

    def setup(self, device: torch.device) -> None:
        super().setup(device)
        time.sleep(self.seconds)


class Leaks(Good):
    """Keeps some MiB of every step."""

    def __init__(self, mib: float = 4.0) -> None:
        self.mib = mib
        self.kept: list[torch.Tensor] = []

    def step(self, batch: BatchShape) -> None:
        super().step(batch)
        self.kept.append(torch.ones(int(self.mib * (1 << 20)), dtype=torch.uint8))


class Varies(Good):
    """Every other step takes three times as long."""

    steps = 0

    def step(self, batch: BatchShape) -> None:
        self.steps += 1
        end = time.perf_counter() + (0.01, 0.03)[self.steps % 2]
        while time.perf_counter() < end:
            pass


class Scribbles(Good):
    """Writes to descriptors that are not its own."""

    words = b"debug: 7\n"

    def step(self, batch: BatchShape) -> None:
        for number in range(3, 64):
            try:
                os.write(number, self.words)
            except OSError:
                pass
        super().step(batch)


class Forges(Scribbles):
    """Writes what could be a reply, to another question."""

    words = b'{"type":"identified","id":"cpu","name":"CPU"}\n'


class Repeats(Scribbles):
    """Writes what could be a reply, and more of it than was asked for."""

    trial = (
        '{"index":0,"batch_size":1,"length":3,"target_length":null,"outcome":"ok","steps":1,"step_seconds":1,'
        '"peak_bytes":1,"reserved_bytes":1,"alloc_retries":0,"error":null,"elapsed_seconds":1}'
    )
    words = 2 * f'{{"type":"ran","trial":{trial}}}\n'.encode()


class ClosesDescriptors(Good):
    def step(self, batch: BatchShape) -> None:
        os.closerange(3, 256)


class HungryInNumpy(Good):
    """Of more than two examples, an array of numpy's in the step does not fit into 1 GiB."""

    def step(self, batch: BatchShape) -> None:
        np.ones(batch.batch_size << 28, dtype=np.uint8)


class HungryInMakeBatch(HungryInNumpy):
    """The same before the step."""

    def make_batch(self, shape: BatchShape) -> BatchShape:
        HungryInNumpy.step(self, shape)
        return shape

    def step(self, batch: BatchShape) -> None:
        Good.step(self, batch)


class DisguisedAboveFour(Good):
    """Says the same of batches of more than four examples only: there it is a lack of memory."""

    def step(self, batch: BatchShape) -> None:
        if batch.batch_size > 4:
            Disguised.step(self, batch)  # type: ignore[arg-type]
        super().step(batch)


class HungryInSetup(Good):
    def setup(self, device: torch.device) -> None:
        self.weight = torch.ones(4 << 30, dtype=torch.uint8)


class ExitsInStep(Good):
    def step(self, batch: BatchShape) -> None:
        os._exit(0)


class RaisesSystemExit(Good):
    def step(self, batch: BatchShape) -> None:
        sys.exit(3)


class RaisesWhatCantBePrinted(Good):
    def step(self, batch: BatchShape) -> None:
        raise ValueError("a lone surrogate: \udcff " + "x" * 1_000_000)


class RaisesWhatHasNoWords(Good):
    def step(self, batch: BatchShape) -> None:
        class Wordless(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        raise Wordless


class Generator(Good):
    def step(self, batch: BatchShape) -> None:  # type: ignore[override]
        yield


class DiesInSetup(Good):
    def setup(self, device: torch.device) -> None:
        print("a library's last words", flush=True)
        os.abort()


class Segfaults(Good):
    """Reads from nowhere."""

    def step(self, batch: BatchShape) -> None:
        ctypes.string_at(0)


class Killed(Good):
    def step(self, batch: BatchShape) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Good):
    def step(self, batch: BatchShape) -> None:
        time.sleep(1000)


class Forks(Good):
    """Leaves a child behind that holds every descriptor open, then dies."""

    def setup(self, device: torch.device) -> None:
        super().setup(device)
        if os.fork() == 0:
            time.sleep(1000)

    def step(self, batch: BatchShape) -> None:
        os._exit(3)


class HungryInOptimizer(Good):
    """A model of 200 MiB, whose AdamW state takes 400 MiB more, made in the first step one half after the other."""

    def setup(self, device: torch.device) -> None:
        self.weight = torch.ones(50 << 20, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.weight], foreach=False)

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        return torch.ones(shape.batch_size, 1 << 20, dtype=torch.uint8)

    def step(self, batch: torch.Tensor) -> None:
        self.weight.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class HungryInStep(Good):
    def step(self, batch: BatchShape) -> None:
        torch.ones(batch.batch_size, 1 << 28, dtype=torch.uint8)


class _HungryBackward(torch.autograd.Function):
    """Its backward pass takes four times what its input takes."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        ctx.shape = features.shape
        return features.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ones(4, *ctx.shape).sum(0) * gradient


class TwoLosses(Good):
    """Takes 1 MiB a unit of length for its features, from which two losses follow: one's backward pass runs out first.

    So autograd still has the other's to do when it fails, with all that its graph holds.
    """

    def step(self, batch: BatchShape) -> None:
        features = self.weight.sum() * torch.ones(
            batch.batch_size, int(batch.length * (1 << 18))
        )
        waiting = features.square().sum()
        (_HungryBackward.apply(features) + waiting).backward()  # type: ignore[no-untyped-call]


class KeepsItsFeatures(Good):
    """Takes 1 MiB a unit of length, and keeps it until the next step has made its own."""

    def step(self, batch: BatchShape) -> None:
        self.features = torch.ones(batch.batch_size, int(batch.length * (1 << 18)))
        torch.ones(4, *self.features.shape)
        self.features = torch.ones(1)


class CatchesItself(HungryInStep):
    """Takes 256 MiB for an example, and goes on as if nothing had happened where they are not there."""

    def step(self, batch: BatchShape) -> None:
        try:
            super().step(batch)
        except RuntimeError:
            pass


class PretendsToBeOut(Good):
    """Says that memory ran out, though it needs next to none."""

    def step(self, batch: BatchShape) -> None:
        raise MemoryError("no slot is free")


class TakesEveryByte(Good):
    """Runs out of memory with small pieces: nothing is left to tell of it while the failed step's variables live."""

    def step(self, batch: BatchShape) -> None:
        held = []
        while True:
            held.append(bytearray(4096))


class LowersLimit(Good):
    """Allows its process less memory than the probe does, in its setup or in its steps."""

    def __init__(self, where: str, fails: bool = False) -> None:
        self.where, self.fails = where, fails

    def setup(self, device: torch.device) -> None:
        super().setup(device)
        if self.where == "setup":
            self.lower()

    def step(self, batch: BatchShape) -> None:
        super().step(batch)
        if self.where == "step":
            self.lower()

    def lower(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (64 << 20, hard))
        if self.fails:
            torch.zeros(64 << 20)
