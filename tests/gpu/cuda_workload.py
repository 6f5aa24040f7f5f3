"""Workloads for the CUDA tests."""

import torch
from torch import nn

MIB = 1 << 20


class Known:
    """Holds 1 MiB for each unit of padded length, in blocks that the allocator does not round, and really trains."""

    def setup(self, device):
        self.device = device
        self.model = torch.nn.Linear(256, 256, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def make_batch(self, shape):
        return torch.ones(
            int(shape.batch_size * shape.length),
            MIB,
            dtype=torch.uint8,
            device=self.device,
        )

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        self.model(batch[:16, :256].float()).square().mean().backward()
        self.optimizer.step()


class CatchesItself(Known):
    """Takes its memory in the step, and goes on as if nothing had happened where it is not there."""

    def make_batch(self, shape):
        return shape

    def step(self, batch):
        try:
            super().step(super().make_batch(batch))
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)


class Compiled:
    """A small convolutional model, compiled or not; the options are those that real training code has."""

    def __init__(self, compile=True, bf16=False):
        self.compile, self.bf16 = compile, bf16

    def setup(self, device):
        self.device = device
        layers = [
            nn.Conv1d(64, 64, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(64, 64, 5, padding=2),
            nn.GELU(),
        ]
        model = nn.Sequential(*layers, nn.Conv1d(64, 64, 1)).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.model = torch.compile(model, dynamic=True) if self.compile else model

    def make_batch(self, shape):
        return torch.ones(
            shape.batch_size, 64, int(shape.length * 1000), device=self.device
        )

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model(batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
