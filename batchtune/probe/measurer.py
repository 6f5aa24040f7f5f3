"""The base class of everything that runs trials and steps: worker processes, or a device made by a law."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from batchtune.errors import ProbeError
from batchtune.probe.requests import Ran, Replay, Replayed, RunTrial
from batchtune.results import BatchShape, Device


class Measurer(ABC):
    """Measures batch shapes. Use as a context manager, and `start` it first.

    Attributes:
        worker: Number of the worker that ran last, from 1.
        packed: Whether the workload packs its batches; known once started.
    """

    worker: int
    packed: bool

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *raised: object) -> None:  # noqa: B027  # a hook: a made device holds nothing
        """Free what the measurer holds."""

    @abstractmethod
    def start(self) -> Device:
        """Build the workload in a worker of a fresh process, as training starts.

        Raises:
            WorkloadError: The workload can't be imported or built.
            ProbeError: The device can't be used, or the workload alone exceeds the limit.
        """

    @abstractmethod
    def reply_to(self, request: RunTrial, *, fresh: bool = False) -> Ran:
        """Run what is requested; if `fresh`, in a worker that has run nothing before.

        If the worker dies or hangs, that is the trial's outcome (`crash`, `oom`, `timeout`). Raises as `start`.
        """

    def measure(
        self,
        shape: BatchShape,
        index: int,
        *,
        fresh: bool = False,
        timing: bool = False,
    ) -> Ran:
        """Run one trial, the journal's entry `index`; `fresh` as in `reply_to`."""
        ran = self.reply_to(RunTrial(shape=shape, timing=timing), fresh=fresh)
        return ran.with_trial(index=index, timing=timing)

    def step(
        self,
        shape: BatchShape,
        others: Sequence[BatchShape] = (),
        *,
        release: bool = False,
        recording: bool = False,
    ) -> Ran:
        """Run one step of a new batch with the allocator's cache as it is, or emptied first if `release`.

        An optimizer step that takes several batches has `others` after this one, or more like it; if it fails, the
        trial is that of the batch that failed. `recording` as in `RunTrial`.
        """
        request = RunTrial(
            shape=shape,
            others=tuple(others),
            single=True,
            release=release,
            recording=recording,
        )
        return self.reply_to(request)

    def replay(self, request: Replay) -> Replayed | None:
        """Replay recorded steps in a process without the workload, whose worker ends; None where that is impossible."""
        return None


def setup_exceeds_limit(workload: str, reason: str) -> ProbeError:
    """Return the error for a workload that runs out of memory in its setup."""
    return ProbeError(
        f"the memory limit is too small: {workload} ran out of it in its setup, before any batch ({reason})",
        "Give more with --memory, or take a smaller model with --set.",
    )
