"""A made device that notes its steps, and alters what they reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from batchtune.probe.devices.law import MadeDevice
from batchtune.probe.requests import Ran
from batchtune.results import BatchShape, Device


class Noted(NamedTuple):
    worker: int
    shape: BatchShape
    release: bool


class NotedDevice(MadeDevice):
    """Notes each step in `steps`; `alter` changes its reply, and is told how many came before."""

    def __init__(
        self,
        alter: Callable[[Ran, int], Ran] = lambda reply, number: reply,
        **made: Any,
    ) -> None:
        super().__init__(**made)
        self.alter = alter
        self.steps: list[Noted] = []
        self.starts: list[int] = []  # how many steps had run before each

    def start(self) -> Device:
        self.starts.append(len(self.steps))
        return super().start()

    @property
    def shapes(self) -> list[BatchShape]:
        return [step.shape for step in self.steps]

    @property
    def released(self) -> list[bool]:
        return [step.release for step in self.steps]

    def step(self, shape: BatchShape, *, release: bool = False) -> Ran:
        reply = super().step(shape, release=release)
        self.steps.append(Noted(self.worker, shape, release))
        return self.alter(reply, len(self.steps) - 1)


def planned(
    replies: dict[BatchShape, list[Ran | None]],
) -> Callable[[BatchShape, int], Ran | None]:
    """Plan the replies to the first, second, ... run of a shape; None: by the law, as all others."""

    def fault(shape: BatchShape, run: int) -> Ran | None:
        return replies[shape].pop(0) if replies.get(shape) else None

    return fault
