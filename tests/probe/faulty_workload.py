"""Workloads that go wrong in one way each, for real."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from batchtune import BatchShape


class Good:
    def setup(self, device: torch.device) -> None:
        self.weight = torch.ones(4, requires_grad=True)

    def make_batch(self, shape: BatchShape) -> BatchShape:
        return shape

    def step(self, batch: BatchShape) -> None:
        (self.weight * batch.batch_size).sum().backward()


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
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")


class ForksAndHangs(Good):
    """Starts a child of its own, as a data loader does, and says which."""

    def step(self, batch: BatchShape) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        with open("child", "w") as file:
            file.write(str(child))
        time.sleep(1000)


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
    def step(self, batch: BatchShape) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Killed(Good):
    def step(self, batch: BatchShape) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Good):
    def step(self, batch: BatchShape) -> None:
        time.sleep(1000)


class Floods(Good):
    def step(self, batch: BatchShape) -> None:
        sys.stdout.write("x" * 1_000_000)
        sys.stdout.flush()
        super().step(batch)


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
