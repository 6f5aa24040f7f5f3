"""A workload of known memory that stops in mid-step for as long as a test wants it to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from known_workload import Known


class Held(Known):
    """While there is a file `hold` in the folder, a step leaves a child process behind, says so with a file `held`, and
    goes on only when `hold` is gone.
    """

    def __init__(self, folder: str, a: float, b: float) -> None:
        super().__init__(a, b)
        self.folder = Path(folder)

    def step(self, batch: torch.Tensor) -> None:
        if (self.folder / "hold").exists():
            self.hold()
        super().step(batch)

    def hold(self) -> None:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        (self.folder / "held").touch()
        while (self.folder / "hold").exists():
            time.sleep(0.01)
