"""A built workload on a limited device: runs trials and single steps, and judges their outcomes."""

from __future__ import annotations

import contextlib
import gc
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchtune.errors import NoStepError, linked_errors
from batchtune.probe.attempt import OOM_COUNTED, Agree, Attempt, alone
from batchtune.probe.devices import Meter
from batchtune.probe.failures import (
    OomVerdict,
    compilations,
    error_verdict,
    lowered_limit,
    noting_ooms,
    process_limits,
)
from batchtune.probe.parameters import drop_gradients
from batchtune.probe.replay import RequestRecorder
from batchtune.probe.requests import Ran
from batchtune.results import BatchShape
from batchtune.workloads.loading import first_line, user_traceback

if TYPE_CHECKING:
    from batchtune.workloads import Workload

# A failure that leaves more than this part of the limit in use costs the worker.
_HELD_SHARE = 0.002
# After so many trials in a row whose steps were equal, one timed step may be enough.
_EQUAL_TRIALS = 3
_LEAK_HINT = (
    "Something keeps tensors from step to step, such as a loss that is added to a list without .item() or .detach(). "
    "Fix it and run the same command again; the trials so far are kept. "
    "A cache that each step adds to looks the same: fill it in setup()."
)


@dataclass
class Session:
    """A built workload on a limited device."""

    _workload: Workload
    _meter: Meter
    _agree: Agree = alone
    _has_stepped: bool = False
    _limits: dict[str, int] = field(default_factory=process_limits)
    # The last ones in a row whose equal steps took equal time and memory.
    _equal_trials: int = 0
    _recorder: RequestRecorder | None = None
    # In use after the setup, then after the last step or trial that passed.
    _rest_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._rest_bytes = self._meter.in_use()

    def measure(
        self, shape: BatchShape, *, noting: bool = False, timing: bool = False
    ) -> Ran:
        """Run one trial from an empty cache, so that what the allocator reserves follows from the shape.

        The last trial's gradients are freed, too: on the emulated device, they made 1.1 trials of each length fail.
        If the steps passed only because the allocator emptied its cache, or because something caught its error, the
        trial runs once more: neither what earlier trials left between the pages nor what a library tries only the
        first time may count against this shape. `noting` and `timing` as in `RunTrial`.
        """
        self._empty()
        may_be_brief = self._equal_trials >= _EQUAL_TRIALS and not timing
        attempt = self._attempt(shape, noting=noting, is_brief=may_be_brief)
        again = bool(attempt.retries or attempt.caught_oom)
        if attempt.error is None and self._agree(again, attempt.caught_oom):
            self._empty()
            attempt = self._attempt(shape, is_brief=may_be_brief)
        gc.collect()
        if attempt.has_equal_steps:
            self._equal_trials += 1
        elif len(attempt.seconds) > 1:
            self._equal_trials = 0
        return self._ran(attempt)

    def step(
        self,
        shape: BatchShape,
        *,
        release: bool = False,
        noting: bool = False,
        recording: bool = False,
    ) -> Ran:
        """Make one batch and run one step, as in training; if `release`, empty the allocator's cache first.

        If it is the first of this process, what libraries keep lies where it lies in a training that begins so.
        """
        if not self._has_stepped:
            self._meter.free_workspaces()
        if release:
            self._free()
        if recording:
            if self._recorder is None:
                self._recorder = RequestRecorder(self._meter.torch_device.index)
            self._recorder.begin()
        attempt = self._attempt(shape, single=True, noting=noting)
        # A library may have caught it, and gone on with a smaller workspace.
        may_pass = attempt.ooms > 0 and not attempt.caught
        if attempt.error is None and self._agree(may_pass):
            with noting_ooms(attempt.caught):
                self._attempt(shape, single=True)
        ran = self._ran(attempt)
        if recording and self._recorder is not None:
            ran = replace(ran, recorded=self._recorder.take())
        return ran

    def _attempt(
        self,
        shape: BatchShape,
        *,
        single: bool = False,
        noting: bool = False,
        is_brief: bool = False,
    ) -> Attempt:
        meter = self._meter
        workload = self._workload
        if not single:
            workload = getattr(workload, "for_trials", workload)
        attempt = Attempt(
            workload,
            meter,
            shape,
            single=single,
            is_brief=is_brief,
            agree=self._agree,
        )
        retries_before, ooms_before = meter.retries_and_ooms()
        compilations_before = compilations()
        watch = noting_ooms(attempt.caught) if noting else contextlib.nullcontext()
        try:
            with watch:
                attempt.run()
        except BaseException as error:  # also sys.exit() and the like: nothing that a step raises ends the worker
            # No memory may be left, or a device that no longer answers after a sticky error.
            with contextlib.suppress(Exception):
                attempt.peaks.append(meter.peak())
            has_run_out = meter.retries_and_ooms()[1] > ooms_before
            if has_run_out and not attempt.caught and isinstance(error, NoStepError):
                attempt.caught.append(OOM_COUNTED)
            # Only text leaves this block: the exception holds the failed step's frames, and they its tensors. A script
            # that catches its OOM skips the optimizer's step: the OOM is what failed.
            if not attempt.caught or not isinstance(error, NoStepError):
                attempt.error, attempt.verdict, attempt.traceback = _described(error)
        retries, ooms = meter.retries_and_ooms()
        attempt.retries = retries - retries_before
        attempt.ooms = ooms - ooms_before
        attempt.compilations = compilations() - compilations_before
        lowered = lowered_limit(self._limits)
        if lowered is not None:
            attempt.error = lowered
            attempt.verdict = None
        if attempt.in_use:
            self._has_stepped = True
        return attempt

    def _empty(self) -> None:
        """Free what the last step left for the next one: its gradients and the cache, if there is a cache."""
        if self._meter.reserved() is not None:
            drop_gradients()
        self._meter.release()

    def _free(self) -> None:
        """Free what a failure may have left behind, and the allocator's cache."""
        drain_autograd()
        gc.collect()
        self._meter.release()

    def _ran(self, attempt: Attempt) -> Ran:
        passed = attempt.judged()[0] == "ok"
        if not passed:
            self._free()
        trial = attempt.trial()
        # Any error but a plain OOM costs the worker. So does an OOM in its very first step: the optimizer's state may
        # be incomplete, and the next step would fail because of that.
        is_plain_oom = attempt.verdict == "oom" and (
            self._has_stepped or attempt.stage != "step"
        )
        is_harmless = attempt.error is None or (is_plain_oom and self._meter.healthy())
        # Steps go on with what earlier ones left, as training does.
        is_worn = not attempt.single and self._meter.worn()
        in_use = self._meter.in_use()
        if passed:
            self._rest_bytes = in_use
        # What a failure left in use and can't be freed would count against the next shapes.
        held_bytes = in_use - self._rest_bytes
        holds_more = held_bytes > _HELD_SHARE * self._meter.device.limit_bytes
        return Ran(
            trial=trial,
            stage=None if passed else attempt.stage,
            traceback=attempt.traceback,
            hint=None if attempt.leak is None else _LEAK_HINT,
            renew=attempt.leak is not None or not is_harmless or holds_more or is_worn,
        )


def drain_autograd() -> None:
    """Free what a failed backward pass left in this thread: torch keeps its queue until the next one begins."""
    import torch

    with (
        contextlib.suppress(Exception),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.autograd.backward(torch.ones(1, device="cpu", requires_grad=True).sum())


def _described(error: BaseException) -> tuple[str, OomVerdict | None, str | None]:
    """Return an exception's message, its verdict, and its traceback.

    The failed step's variables are freed first: otherwise no memory may be left to write a text.
    """
    try:
        for cause in linked_errors(error, contexts=True):
            traceback.clear_frames(cause.__traceback__)
        return first_line(error), error_verdict(error), user_traceback(error)
    except MemoryError:
        return "MemoryError, and no memory to say where", "oom", None
