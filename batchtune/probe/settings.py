"""The settings of a probe: one record from the command line to the worker and to `run.json`."""

from __future__ import annotations

from typing import Any

from batchtune.errors import UsageError, shortened
from batchtune.probe.devices import DEVICE_FORMS, is_device
from batchtune.results import ProbedWith

_TIMES_AS_MANY = 5
_RECORDED = (
    *("device", "memory_bytes", "memory_fraction", "num_lengths", "max_lengths", "tolerance", "max_batch_size"),
    *("seed", "reserve_bytes", "ddp"),
)


class ProbeSettings(ProbedWith, frozen=True, kw_only=True):
    """The workload, the device, and how closely to measure. `ProbedWith` has the rest.

    Attributes:
        workload: `builtin:NAME`, `path/to/file.py:NAME` or `package.module:NAME`.
        options: Passed to it.
        num_lengths: How many lengths span the data, the shortest and the longest among them.
        max_lengths: How many to probe in all, with those that are added where tables need them; None: five times as
            many as span the data.
        tolerance: How far below the true limit a batch size may be, as a share of it; one example at least.
        wait_seconds: Longest to wait for another probe of the device to end; infinite: as long as it takes.

    Raises:
        UsageError: A value is out of range.
    """

    workload: str
    options: dict[str, Any]
    num_lengths: int = 12
    max_lengths: int | None = None
    tolerance: float = 0.01
    trial_timeout_seconds: float = 300.0
    setup_timeout_seconds: float = 600.0
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not is_device(self.device):
            raise UsageError(f"there is no device {shortened(self.device)}", f"Say --device {DEVICE_FORMS}.")
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(f"the memory fraction must be above 0 and at most 1, got {self.memory_fraction}")
        if not 0 <= self.tolerance < 1:
            raise UsageError(f"the tolerance must be at least 0 and below 1, got {self.tolerance}")
        if self.reserve_bytes < 0:
            raise UsageError(f"the memory to keep free must be at least 0, got {self.reserve_bytes}")
        if self.num_lengths < 2:
            raise UsageError(f"at least 2 lengths must be probed, got {self.num_lengths}")
        if self.most_lengths < self.num_lengths:
            raise UsageError(
                f"--max-lengths must be no less than the {self.num_lengths} of --num-lengths, got {self.max_lengths}"
            )
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise UsageError(f"the largest batch size must be at least 1, got {self.max_batch_size}")
        if not self.trial_timeout_seconds > 0:
            raise UsageError(f"the time limit of a trial must be positive, got {self.trial_timeout_seconds}")
        if not self.setup_timeout_seconds > 0:
            raise UsageError(f"--setup-timeout must be above 0 seconds, got {self.setup_timeout_seconds:g}")
        if not self.wait_seconds >= 0:
            raise UsageError(f"--wait must be at least 0 seconds, got {self.wait_seconds:g}")

    @property
    def most_lengths(self) -> int:
        """How many lengths to probe in all."""
        return _TIMES_AS_MANY * self.num_lengths if self.max_lengths is None else self.max_lengths

    def recorded(self) -> dict[str, Any]:
        """Return the settings that trials depend on, as `run.json` and `probe.json` carry them."""
        return {**{name: getattr(self, name) for name in _RECORDED}, "max_lengths": self.most_lengths}
