"""Workloads that several ranks train together, and that go wrong on one of them."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import distributed, nn

from batchtune import BatchShape
from batchtune.workloads.training import wrapped

WIDTH = 64
ROWS_OF_A_MIB = (1 << 20) // (4 * WIDTH)


class Shared:
    """A layer that all ranks train; a batch of B examples has B MiB, and so have its output and its gradient.

    The rank `ballast_rank` holds `ballast_mib` more than the others. The rank `fault_rank` has the `fault` in its step
    with a batch of `fault_size` examples.
    """

    def __init__(
        self,
        parallel: str = "ddp",
        ballast_rank: int = -1,
        ballast_mib: int = 0,
        fault: str = "",
        fault_rank: int = 1,
        fault_size: int = 3,
    ) -> None:
        self.parallel = parallel
        self.ballast = (ballast_rank, ballast_mib)
        self.fault = fault
        self.fault_at = (fault_rank, fault_size)

    def setup(self, device: torch.device) -> None:
        self.model = wrapped(nn.Linear(WIDTH, WIDTH), self.parallel)
        rank, mib = self.ballast
        if distributed.get_rank() == rank:
            self.held = torch.ones(mib << 18)

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        return torch.ones(shape.batch_size * ROWS_OF_A_MIB, WIDTH)

    def step(self, batch: torch.Tensor) -> None:
        here = (distributed.get_rank(), len(batch) // ROWS_OF_A_MIB)
        if self.fault and here == self.fault_at:
            getattr(self, self.fault)()
        self.model.zero_grad()
        self.model(batch).square().mean().backward()
        with torch.no_grad():  # no optimizer of torch's, whose import takes seconds
            for parameter in self.model.parameters():
                parameter -= 0.001 * parameter.grad

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(1000)

    def hang_for_good(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    def fail(self) -> None:
        raise ValueError("tokens and labels differ")

    def run_out(self) -> None:
        torch.ones(1 << 40)


class CatchesOnOneRank(Shared):
    """Catches its out-of-memory error as some scripts do, and leaves the other ranks waiting for its gradients."""

    def step(self, batch: torch.Tensor) -> None:
        try:
            super().step(batch)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise


class UnevenSteps(Shared):
    """Its steps take longer on one rank alone, and on the other they leave memory behind, seven in a row."""

    def setup(self, device: torch.device) -> None:
        super().setup(device)
        self.kept: list[torch.Tensor] = []

    def step(self, batch: torch.Tensor) -> None:
        super().step(batch)
        if distributed.get_rank() == 0:
            time.sleep(0.06 if len(self.kept) % 3 else 0.001)
        self.kept.append(torch.ones(1 << 14 if distributed.get_rank() else 1))
        if len(self.kept) == 7:
            self.kept.clear()


class TellsItsVariables(Shared):
    """Says which of some variables it has."""

    NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "OMP_NUM_THREADS", "WORLD_SIZE")

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        if shape.batch_size > 1:
            names = [*self.NAMES, "LOCAL_RANK"]
            raise ValueError(
                " ".join(
                    f"{name}={os.environ[name]}" for name in names if name in os.environ
                )
            )
        return super().make_batch(shape)


class TellsWhenItHangs(Shared):
    """Makes a file when its fault begins."""

    def __init__(self, path: str, fault: str) -> None:
        super().__init__(fault=fault)
        self.path = path

    def hang(self) -> None:
        with open(self.path, "w"):
            super().hang()


class ByLength(Shared):
    """An example of length L has L / 100 MiB."""

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        examples = shape.batch_size * shape.length / 100
        return torch.ones(int(examples * ROWS_OF_A_MIB), WIDTH)
