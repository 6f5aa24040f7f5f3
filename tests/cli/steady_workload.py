"""Training steps that pass in a probe and go wrong in training."""

from __future__ import annotations

import os
import time

import torch

from batchtune import BatchShape


class Steady:
    """Holds 1 MiB a unit of length; a step takes 10 µs a unit, or so many times longer as SLOWER says."""

    def setup(self, device: torch.device) -> None:
        self.kept: list[torch.Tensor] = []
        self.weight = torch.ones(4, requires_grad=True)

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        self.padded = shape.padded_length
        return torch.ones(int(shape.padded_length * (1 << 20)), dtype=torch.uint8)

    def step(self, batch: torch.Tensor) -> None:
        self.weight.sum().backward()
        if "LEAK_BYTES" in os.environ:
            self.kept.append(
                torch.ones(int(os.environ["LEAK_BYTES"]), dtype=torch.uint8)
            )
        until = time.perf_counter() + 1e-5 * self.padded * float(
            os.environ.get("SLOWER", 1)
        )
        while time.perf_counter() < until:
            pass


class Broken(Steady):
    def step(self, batch: torch.Tensor) -> None:
        raise IndexError("token 50001 is not in the vocabulary")


class Hangs(Steady):
    """Says that it has begun the sixth step, then does no more."""

    def setup(self, device: torch.device) -> None:
        super().setup(device)
        self.steps = 0

    def step(self, batch: torch.Tensor) -> None:
        self.steps += 1
        if self.steps == 6:
            with open("sixth", "w") as file:
                file.write("step")
            time.sleep(1000)
        super().step(batch)
