"""The time and the peak memory of a training's steps, read as they pass, without waiting for a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

from batchtune.probe.devices import backend_for

_STATUS_BYTES = 8192
_RESIDENT = re.compile(rb"^(?:VmHWM|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


class Lap(Protocol):
    """What was measured between two ends of steps; on a GPU it is known only after a while."""

    @property
    def peak_bytes(self) -> int | None:
        """Most memory in use; None if unknown."""
        ...

    def is_known(self) -> bool:
        """Return whether the time is known by now."""
        ...

    def seconds(self) -> float:
        """Return the time; waits until it is known."""
        ...


class Laps(Protocol):
    """A stopwatch for steps."""

    device: str

    def restart(self) -> None:
        """Begin a lap here: what came before belongs to no step."""
        ...

    def lap(self) -> Lap:
        """End a lap and begin the next."""
        ...


def open_laps() -> Laps:
    """Return the stopwatch of the device that this process uses: the current GPU if it has used one."""
    import torch

    cuda: Any = torch.cuda
    return CudaLaps(cuda) if cuda.is_initialized() else CpuLaps()


@dataclass(frozen=True, slots=True)
class _CpuLap:
    elapsed: float
    peak_bytes: int | None

    def is_known(self) -> bool:
        return True

    def seconds(self) -> float:
        return self.elapsed


class CpuLaps(Laps):
    """Steps on the CPU: the peak is that of the resident memory that is no file's (Linux only).

    The kernel keeps it (`VmHWM`), and resets it when 5 is written to `clear_refs` (man 5 proc): 12 µs for both.
    """

    def __init__(self) -> None:
        self.device = backend_for("cpu").identify("cpu").name
        self._status: int | None = None
        with contextlib.suppress(OSError):  # another system than Linux
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self.restart()

    def restart(self) -> None:
        """Reset the peak and the clock."""
        if self._status is not None:
            os.pwrite(self._clear, b"5", 0)
        self._since = time.perf_counter()

    def lap(self) -> Lap:
        """Read the peak and the clock, and reset them."""
        peak = None
        if self._status is not None:
            status = os.pread(self._status, _STATUS_BYTES, 0)
            highest, *files = (int(kb) << 10 for kb in _RESIDENT.findall(status))
            peak = highest - sum(files)
        elapsed = time.perf_counter() - self._since
        self.restart()
        return _CpuLap(elapsed, peak)


@dataclass(frozen=True, slots=True)
class _CudaLap:
    began: Any
    ended: Any
    peak_bytes: int | None

    def is_known(self) -> bool:
        known: bool = self.ended.query()
        return known

    def seconds(self) -> float:
        self.ended.synchronize()
        milliseconds: float = self.began.elapsed_time(self.ended)
        return milliseconds / 1000


class CudaLaps(Laps):
    """Steps on a GPU: events in the stream are read once the GPU has passed them; torch's allocator knows the peak."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._device = cuda.current_device()
        self.device = cuda.get_device_name(self._device)
        self.restart()

    def restart(self) -> None:
        """Reset the peak, and mark the place in the stream."""
        self._cuda.reset_peak_memory_stats(self._device)
        self._began = self._mark()

    def lap(self) -> Lap:
        """Read the peak, reset it, and mark the place in the stream."""
        # As `max_memory_allocated`, which takes 100 µs to flatten and sort all the statistics.
        statistics = self._cuda.memory_stats_as_nested_dict(self._device)
        peak: int = statistics["allocated_bytes"]["all"]["peak"]
        began = self._began
        self.restart()
        return _CudaLap(began, self._began, peak)

    def _mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event
