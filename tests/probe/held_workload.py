"""A workload of known memory that stops in mid-step for as long as a test wants it to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from known_workload import descend

from batchtune import BatchShape


class Held:
    """Holds exactly a·B·L + b·B·L² bytes and does a real optimizer step.

    While there is a file `hold` in the folder, a step leaves a child process behind, says so with a file `held`, and
    goes on only when `hold` is gone.
    """

    def __init__(self, folder: str, a: float, b: float) -> None:
        self.folder, self.a, self.b = Path(folder), a, b

    def setup(self, device: torch.device) -> None:
        self.model = torch.nn.Linear(64, 64).to(device)
        self.momentum: dict[torch.nn.Parameter, torch.Tensor] = {}

    def make_batch(self, shape: BatchShape) -> torch.Tensor:
        size = int(shape.batch_size * shape.length * (self.a + self.b * shape.length))
        return torch.ones(size, dtype=torch.uint8)

    def step(self, batch: torch.Tensor) -> None:
        if (self.folder / "hold").exists():
            self.hold()
        self.model(batch[:64].float()).square().mean().backward()
        descend(self.model, self.momentum)

    def hold(self) -> None:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        (self.folder / "held").touch()
        while (self.folder / "hold").exists():
            time.sleep(0.01)
