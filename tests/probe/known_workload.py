"""A workload whose memory is known: it holds exactly a·B·L + b·B·L² bytes, and does a real optimizer step."""

from __future__ import annotations

import os
import sys

import torch

from batchtune import BatchShape


class Known:
    """Prints to both streams all the time, as real training code does."""

    def __init__(self, a: float = 20_000.0, b: float = 400.0) -> None:
        self.a, self.b = a, b

    def setup(self, device: torch.device) -> None:
        print("setting up", flush=True)
        self.model = torch.nn.Linear(64, 64).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        print("{not json", file=sys.stderr, flush=True)
        size = int(shape.batch_size * shape.length * (self.a + self.b * shape.length))
        return torch.ones(size, dtype=torch.uint8)

    def step(self, batch: torch.Tensor) -> None:
        os.write(1, b"step\n")
        loss = self.model(batch[:64].float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
