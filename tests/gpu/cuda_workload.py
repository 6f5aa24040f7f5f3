"""Workloads for the CUDA tests."""

from __future__ import annotations

import torch

from batchtune import BatchShape

MIB = 1 << 20


class Known:
    """Holds 1 MiB for each unit of padded length, in blocks that the allocator does not round, and really trains."""

    def setup(self, device: torch.device) -> None:
        self.device = device
        self.model = torch.nn.Linear(256, 256, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        return torch.ones(int(shape.batch_size * shape.length), MIB, dtype=torch.uint8, device=self.device)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(batch[:16, :256].float()).square().mean().backward()
        self.optimizer.step()


class Sticky(Known):
    """Breaks the CUDA context for good with an assertion on the device."""

    def step(self, batch: torch.Tensor) -> None:
        table = torch.zeros(4, device=self.device)
        table[torch.full((4,), 1000, device=self.device)].sum().item()


class StickyAboveFour(Known):
    """Fails in a way that only looks like a lack of memory, and only for more than four examples."""

    def step(self, batch: torch.Tensor) -> None:
        if batch.shape[0] > 4:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
        super().step(batch)
