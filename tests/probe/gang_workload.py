"""Workloads that several ranks train together, and that go wrong on one of them."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

from batchtune.workloads.builtin import wrapped

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import uncompiled  # noqa: F401

WIDTH = 64
ROWS_OF_A_MIB = (1 << 20) // (4 * WIDTH)


class Shared:
    """A layer that all ranks train; a batch of B examples has B MiB, and so have its output and its gradient.

    The rank `ballast_rank` holds `ballast_mib` more than the others. The rank `fault_rank` has the `fault` in its step
    with a batch of `fault_size` examples.
    """

    def __init__(
        self,
        parallel="ddp",
        ballast_rank=-1,
        ballast_mib=0,
        fault="",
        fault_rank=1,
        fault_size=3,
    ):
        self.parallel = parallel
        self.ballast = (ballast_rank, ballast_mib)
        self.fault = fault
        self.fault_at = (fault_rank, fault_size)

    def setup(self, device):
        self.model = wrapped(nn.Linear(WIDTH, WIDTH), self.parallel)
        rank, mib = self.ballast
        if distributed.get_rank() == rank:
            self.held = torch.ones(mib << 18)

    def make_batch(self, shape):
        return torch.ones(shape.batch_size * ROWS_OF_A_MIB, WIDTH)

    def step(self, batch):
        here = (distributed.get_rank(), len(batch) // ROWS_OF_A_MIB)
        if self.fault and here == self.fault_at:
            getattr(self, self.fault)()
        self.model.zero_grad()
        self.model(batch).square().mean().backward()
        with torch.no_grad():  # no optimizer of torch's, whose import takes seconds
            for parameter in self.model.parameters():
                parameter -= 0.001 * parameter.grad

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang_for_good(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)


class TellsWhenItHangs(Shared):
    """Is killed with a batch of three examples; makes a file and hangs with one of four."""

    def __init__(self, path):
        super().__init__(fault="kill")
        self.path = path

    def step(self, batch):
        if len(batch) == 4 * ROWS_OF_A_MIB and distributed.get_rank() == 1:
            open(self.path, "w").close()
            time.sleep(1000)
        super().step(batch)


class ByLength(Shared):
    """An example of length L has L / 100 MiB."""

    def make_batch(self, shape):
        examples = shape.batch_size * shape.length / 100
        return torch.ones(int(examples * ROWS_OF_A_MIB), WIDTH)
