"""Base classes of the devices: they declare every hook, with the answer of a device that knows nothing of it."""

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

    Open, `limit`, set the workload up, `settle`; then it is read for each trial.
    """

    device: Device  # as it is recorded, complete once settled
    torch_device: torch.device

    @abstractmethod
    def limit(self) -> None:
        """Enforce `device.limit_bytes` from now on."""

    @abstractmethod
    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Work out and enforce the final limit, once the workload is set up. Raises ProbeError if nothing is left.

        `reserve_bytes` are kept free because the user said so, `ddp_bytes` for one copy of the gradients.
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

    def outside(self) -> int | None:
        """Return the bytes that this process holds outside torch's allocator; None if unknown."""
        return None

    def clocks(self) -> tuple[int | None, list[str] | None]:
        """Return the clock in MHz, now, and why it is lower than it could be; None if unknown."""
        return None, None

    def retries(self) -> int:
        """Return how often the allocator has emptied its cache to go on, since the process started."""
        return 0

    def ooms(self) -> int:
        """Return how often the allocator has run out of memory, since the process started."""
        return 0

    def other_processors(self) -> float | None:
        """Return how many processors other programs took since the last call, on average; None: not relevant here."""
        return None

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
        """Return the settings of this kind of device that decide memory and time, after the workload's setup."""
        return {}

    def worn(self) -> bool:
        """Return whether so much is held at rest that the next trial would not compare with the first."""
        return False


class DeviceBackend(ABC):
    """One kind of device."""

    OOM_MESSAGES: ClassVar[Sequence[str]] = ()  # patterns of errors that mean a lack of memory
    DISGUISED_MESSAGES: ClassVar[Sequence[str]] = ()  # those that do if a smaller shape passes
    VARIABLES: ClassVar[Sequence[str]] = ()  # of the environment that change a step's memory or time; recorded
    WORKER_ENVIRONMENT: ClassVar[Mapping[str, str]] = {}  # what a worker process must find when it starts

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine has such a device that torch can use."""

    @abstractmethod
    def identify(self, device: str) -> Identified:
        """Return which device a `--device` value means, without using its memory. Raises ProbeError if missing."""

    @abstractmethod
    def open(self, device: str, settings: ProbedWith, limit_bytes: int | None) -> Meter:
        """Open the device with the settings' cap and fraction, or with the limit of a run that is being continued.

        Raises ProbeError if it is missing, or has less memory free than the limit needs.
        """

    def is_broken_by_fork(self) -> bool:
        """Return whether an import has used a device before this process was forked, so that this one can't use it."""
        return False

    def seen_by_torch(self) -> list[DoctorGpu]:
        """Describe the devices of this kind that torch sees; none if torch can't be used."""
        return []

    def seen_by_driver(self) -> tuple[list[DoctorGpu], str | None, str | None]:
        """Describe the devices that the driver knows; then the driver's version, and why it can't be asked."""
        return [], None, None
