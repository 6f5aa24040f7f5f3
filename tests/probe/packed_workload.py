"""Packed workloads whose memory is known: a row holds exactly a·Σ L + b·Σ L² + c·n bytes; and wrong ones."""

from __future__ import annotations

import torch
from known_workload import descend

from batchtune import BatchShape


class Packed:
    packed = True

    def __init__(
        self, a: float = 40_000.0, b: float = 100.0, c: float = 10_000.0
    ) -> None:
        self.a, self.b, self.c = a, b, c

    def setup(self, device: torch.device) -> None:
        self.model = torch.nn.Linear(64, 64).to(device)
        self.momentum: dict[torch.nn.Parameter, torch.Tensor] = {}

    def size(self, shape: BatchShape) -> float:
        return (
            self.a * shape.tokens
            + self.b * shape.squared_tokens
            + self.c * shape.batch_size
        )

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        return torch.ones(int(self.size(shape)), dtype=torch.uint8)

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch[:64].float()).square().mean().backward()
        descend(self.model, self.momentum)


class Pads(Packed):
    """Says that it packs, but pads."""

    def size(self, shape: BatchShape) -> float:
        return self.a * shape.batch_size * shape.length
