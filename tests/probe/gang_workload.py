"""Workloads that several ranks train together, and that go wrong on one of them."""

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

    Rank 1 holds `ballast_mib` more than the others; if it `hangs`, it does so for good in a batch of three examples.
    """

    def __init__(self, ballast_mib=0, hangs=False):
        self.ballast_mib = ballast_mib
        self.hangs = hangs

    def setup(self, device):
        self.model = wrapped(nn.Linear(WIDTH, WIDTH), "ddp")
        if distributed.get_rank() == 1:
            self.held = torch.ones(self.ballast_mib << 18)

    def make_batch(self, shape):
        return torch.ones(shape.batch_size * ROWS_OF_A_MIB, WIDTH)

    def step(self, batch):
        if self.hangs and len(batch) == 3 * ROWS_OF_A_MIB and distributed.get_rank():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        self.model.zero_grad()
        self.model(batch).square().mean().backward()
        with torch.no_grad():  # no optimizer of torch's, whose import takes seconds
            for parameter in self.model.parameters():
                parameter -= 0.001 * parameter.grad


class ByLength(Shared):
    """An example of length L has L / 100 MiB."""

    def make_batch(self, shape):
        examples = shape.batch_size * shape.length / 100
        return torch.ones(int(examples * ROWS_OF_A_MIB), WIDTH)
