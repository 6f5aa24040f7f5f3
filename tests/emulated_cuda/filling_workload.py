"""A layer whose parameters, gradients and states of AdamW take 64 MiB each, and batches of 1 MiB for each example."""

from __future__ import annotations

import torch

from batchtune import BatchShape

MIB = 1 << 20


class Filling:
    """Trains on a few numbers of the batch."""

    def setup(self, device: torch.device) -> None:
        self.device = device
        self.layer = torch.nn.Linear(4096, 4096, bias=False, device=device)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), foreach=False)

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        return torch.ones(shape.batch_size, MIB, dtype=torch.uint8, device=self.device)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.layer(batch[:1, :4096].float()).square().mean().backward()
        self.optimizer.step()
