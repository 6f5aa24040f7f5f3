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

    Rank 1 holds `ballast_mib` more than the others, and has the `fault` in its step with a batch of three examples.
    """

    def __init__(self, ballast_mib=0, fault=""):
        self.ballast_mib = ballast_mib
        self.fault = fault

    def setup(self, device):
        self.model = wrapped(nn.Linear(WIDTH, WIDTH), "ddp")
        if distributed.get_rank() == 1:
            self.held = torch.ones(self.ballast_mib << 18)

    def make_batch(self, shape):
        return torch.ones(shape.batch_size * ROWS_OF_A_MIB, WIDTH)

    def step(self, batch):
        here = (distributed.get_rank(), len(batch) // ROWS_OF_A_MIB)
        if self.fault and here == (1, 3):
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
