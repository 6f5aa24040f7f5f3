"""A caller's part in a probe: its progress, its notes, and what measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchtune.probe.supervisor import Supervisor
from batchtune.results import Device, Trial
from batchtune.shapes import BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """The progress of a probe: before and after each trial, and before each step of the confirmation.

    Attributes:
        trial: The outcome of the shape; None before it is known.
        done, total: Lengths whose largest batch is known, and all of them; steps while confirming.
        seconds_left: A guess, from the time that trials took so far; None at the beginning.
        confirming: Whether the shapes at the limit are run in turns.
        shortening: Whether the longest example does not fit, and the longest that does is searched for.
    """

    shape: BatchShape
    trial: Trial | None
    done: int
    total: int
    seconds_left: float | None
    device: Device
    confirming: bool = False
    shortening: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHooks:
    """A caller's hooks; `measurer` takes the place of worker processes on the device that the settings name."""

    on_progress: Callable[[ProbeProgress], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda text: None
    measurer: Supervisor | None = None
