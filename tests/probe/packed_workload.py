"""Packed workloads whose memory is known: a row holds exactly a·Σ L + b·Σ L² + c·n bytes; and wrong ones."""

from __future__ import annotations

import torch
from known_workload import Known

from batchtune import BatchShape


class Packed(Known):
    packed = True

    def __init__(
        self, a: float = 40_000.0, b: float = 100.0, c: float = 10_000.0
    ) -> None:
        super().__init__(a, b)
        self.c = c

    def size(self, shape: BatchShape) -> float:
        per_token = self.a * shape.tokens + self.b * shape.squared_tokens
        return per_token + self.c * shape.batch_size

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        return torch.ones(int(self.size(shape)), dtype=torch.uint8)
