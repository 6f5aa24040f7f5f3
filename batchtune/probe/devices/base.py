"""Base classes of the devices: they declare every hook, with a default for devices that have no answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from batchtune.probe.protocol import Identified
from batchtune.results import Device, DoctorGpu, ProbedWith

if TYPE_CHECKING:
    import torch


class Meter(ABC):
    """One device, opened in the worker process: limits its memory, so that running out is real, and measures it.

    Open it, `hold` what training holds, `limit` it, set up the workload, `settle` it; then read it for each trial.
    """

    device: Device  # as it is recorded, complete once settled
    torch_device: torch.device

    @abstractmethod
    def limit(self) -> None:
        """Enforce `device.limit_bytes` from now on."""

    def hold(self, examples: int) -> None:
        """Take what training takes here besides its steps: a sampler over so many examples, a data loader."""
        return

    @abstractmethod
    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Compute and enforce the final limit, with the workload set up. Raises ProbeError if nothing is left.

        Keeps `reserve_bytes` free for the user, and `ddp_bytes` for one copy of the gradients.
        """

    @abstractmethod
    def reset(self) -> None:
        """Start a new peak."""

    @abstractmethod
    def peak(self) -> int | None:
        """Return the most bytes in use since the reset; None if the system can't tell."""

    @abstractmethod
    def in_use(self) -> int:
        """Return the bytes in use now."""

    def reserved(self) -> int | None:
        """Return the most bytes the allocator held since the reset, with its cache; None if it has no cache."""
        return None

    def retries_and_ooms(self) -> tuple[int, int]:
        """Return how often this process's allocator has emptied its cache to go on, and run out of memory."""
        return 0, 0

    def note_clock(self) -> None:
        """Note the device's clock for `surroundings`: called with a step in its queue, as an idle device lowers it."""
        return

    def surroundings(self) -> dict[str, Any]:
        """Return what a trial records of other programs since the last call, the clock, and memory outside torch."""
        return {}

    def synchronize(self) -> None:
        """Wait for all that was queued on the device."""
        return

    def release(self) -> None:
        """Give cached memory back to the device."""
        return

    def healthy(self) -> bool:
        """Return whether the device still answers, after an error."""
        return True

    def switches(self) -> dict[str, Any]:
        """Return the settings of this kind of device that affect memory and time, after the workload's setup."""
        return {}

    def worn(self) -> bool:
        """Return whether so much is held between trials that the next would not compare with the first."""
        return False


class DeviceBackend(ABC):
    """One kind of device."""

    OOM_MESSAGES: ClassVar[
        Sequence[str]
    ] = ()  # patterns of errors that mean out of memory
    DISGUISED_MESSAGES: ClassVar[
        Sequence[str]
    ] = ()  # patterns of those that do if a smaller shape passes
    VARIABLES: ClassVar[
        Sequence[str]
    ] = ()  # environment variables that affect memory or time; recorded
    WORKER_ENVIRONMENT: ClassVar[
        Mapping[str, str]
    ] = {}  # set before a worker process starts

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine has such a device that torch can use."""

    @abstractmethod
    def identify(self, device: str) -> Identified:
        """Return which device a `--device` value means, without using its memory. Raises ProbeError if missing."""

    @abstractmethod
    def open(self, device: str, settings: ProbedWith, limit_bytes: int | None) -> Meter:
        """Open the device with the settings' cap and fraction, or with the limit of a continued run.

        Raises ProbeError if it is missing, or has less memory free than the limit needs.
        """

    def is_broken_by_fork(self) -> bool:
        """Return whether an import used a device before this process was forked, which makes it unusable here."""
        return False

    def seen_by_torch(self) -> list[DoctorGpu]:
        """Describe the devices of this kind that torch sees; none if torch can't be used."""
        return []

    def seen_by_driver(self) -> tuple[list[DoctorGpu], str | None, str | None]:
        """Describe the devices that the driver knows; then the driver's version, and why it can't be asked."""
        return [], None, None
