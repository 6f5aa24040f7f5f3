"""A made device that notes its steps, and alters what they reply."""

from __future__ import annotations

from typing import NamedTuple

from batchtune.probe.devices.law import MadeDevice
from batchtune.results import BatchShape


class Noted(NamedTuple):
    worker: int
    shape: BatchShape
    release: bool
    others: tuple = ()


class NotedDevice(MadeDevice):
    """Notes each step in `steps`; `alter` changes its reply, and is told how many came before."""

    def __init__(
        self,
        alter=lambda reply, number: reply,
        **made,
    ):
        super().__init__(**made)
        self.alter = alter
        self.steps = []
        self.starts = []  # how many steps had run before each

    def start(self):
        self.starts.append(len(self.steps))
        return super().start()

    @property
    def shapes(self):
        return [step.shape for step in self.steps]

    @property
    def released(self):
        return [step.release for step in self.steps]

    def step(self, shape, others=(), *, release=False, **how):
        reply = super().step(shape, others, release=release, **how)
        self.steps.append(Noted(self.worker, shape, release, tuple(others)))
        return self.alter(reply, len(self.steps) - 1)


def planned(
    replies,
):
    """Plan the replies to the first, second, ... run of a shape; None: by the law, as all others."""

    def fault(shape, run):
        return replies[shape].pop(0) if replies.get(shape) else None

    return fault
