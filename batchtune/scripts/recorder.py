"""`batchtune.Recorder`: records training from within its own script, to `training.jsonl` in the run folder."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from batchtune.errors import ResultError
from batchtune.files import open_to_append, unwritable
from batchtune.probe.devices import backend_for
from batchtune.probe.devices.cuda import PeakCounter
from batchtune.results import (
    RUN_FILE,
    TRAINING_FILE,
    BatchShape,
    Run,
    TrainingStart,
    TrainingStep,
    meta_of,
    read_result,
)
from batchtune.scripts import place_in_group
from batchtune.workloads import training_gpu

# Measures training steps without waiting for a GPU, and appends each to `training.jsonl`.

_RESIDENT = re.compile(rb"^(VmHWM|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


class TrainingLog:
    """One process's part of a recording.

    If the file can't be written any more, recording ends with a warning, and the training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        # Steps whose time the GPU has not reached yet, with the marks of their begin and end.
        self._waiting: deque[tuple[TrainingStep, Any, Any]] = deque()

    def open(self, *, tuned: bool = False) -> None:
        """Begin a recording, on the GPU if this process has used one; `tuned` as in `TrainingStart`.

        Raises ResultError if it can't be written.
        """
        self._rank, world_size = place_in_group() or (0, 1)
        self._recording = secrets.token_hex(8)
        if world_size > 1:
            self._recording = _of_all_ranks()
        self._clock = Clock()
        self._is_first = True
        self._file = open_to_append(self._path)
        if self._rank == 0:
            device = self._clock.device
            self._write(
                TrainingStart(meta=meta_of(TrainingStart), device=device, tuned=tuned)
            )

    def begin_step(self) -> None:
        """Begin a step here: what came before, such as a validation, belongs to none."""
        self._clock.take_peak()
        self._began = self._clock.mark()

    def end_step(self, batches: list[BatchShape]) -> None:
        """Note that a step ended, which begins the next; it is written as soon as its time is known."""
        peak = self._clock.take_peak()
        began = self._began
        self._began = self._clock.mark()
        if self._is_first:  # it includes what is done only once
            self._is_first = False
            self.write(batches)
        else:
            step = TrainingStep(rank=self._rank, batches=batches, peak_bytes=peak)
            self._waiting.append((step, began, self._began))
            self._write_timed()

    def write(self, batches: list[BatchShape], *, oom: str | None = None) -> None:
        """Write a step whose time and memory were not measured, or that ran out of memory."""
        self._write(TrainingStep(rank=self._rank, batches=batches, oom=oom))

    def refuse(self) -> None:
        """Take back the steps of this recording."""
        self._waiting.clear()
        self._write(TrainingStep(rank=self._rank, batches=[], refused=True))

    def close(self) -> None:
        """Write what is left, without the times that the GPU has not reached."""
        with contextlib.suppress(
            RuntimeError
        ):  # the GPU answers no more after an error
            self._write_timed()
        while self._waiting:
            self._write(self._waiting.popleft()[0])
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_timed(self) -> None:
        """Write the steps whose times are known by now."""
        while self._waiting:
            step, began, ended = self._waiting[0]
            seconds = self._clock.seconds(began, ended)
            if seconds is None:
                return
            self._waiting.popleft()
            self._write(msgspec.structs.replace(step, seconds=seconds))

    def _write(self, line: TrainingStart | TrainingStep) -> None:
        """Append a line by one call, which the system does whole even if the process is killed meanwhile.

        The line's end comes first, as the one before may be cut short.
        """
        if self._file is None:
            return
        line = msgspec.structs.replace(line, recording=self._recording)
        try:
            os.write(self._file, b"\n" + msgspec.json.encode(line))
        except OSError as error:
            reason = unwritable(self._path, error)
            print(f"Warning: batchtune records no further: {reason}", file=sys.stderr)
            os.close(self._file)
            self._file = None


def _of_all_ranks() -> str:
    """Return what the ranks of one training have in common, and the ranks of no other at the same time."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    shared = [os.environ.get(name, "") for name in names]
    if "MASTER_PORT" not in os.environ:  # one process has started all of them
        shared = [socket.gethostname(), str(os.getppid())]
    return hashlib.sha256(" ".join(shared).encode()).hexdigest()[:16]


class Clock:
    """Times on the GPU that trains, read from events once it has passed them; without one, on the CPU."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self.device = backend_for("cpu").identify("cpu").name
        self._gpu: int | None = None
        if self._cuda.is_initialized():
            self._gpu = self._cuda.current_device()
        with contextlib.suppress(Exception):  # an optimizer that is not like torch's
            self._gpu = training_gpu()
        if self._gpu is not None:
            self.device = self._cuda.get_device_name(self._gpu)
            self._peaks = PeakCounter(self._gpu)

    def mark(self) -> Any:
        """Return the time now, or an event in the GPU's current stream."""
        if self._gpu is None:
            return time.perf_counter()
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._gpu))
        return event

    def seconds(self, began: Any, ended: Any) -> float | None:
        """Return the time between two marks; None if the GPU has not passed them."""
        if self._gpu is None:
            return float(ended - began)
        if not ended.query():
            return None
        return float(began.elapsed_time(ended)) / 1000

    def take_peak(self) -> int | None:
        """Return the most memory since the last call that torch allocated, on the CPU that is no file's (Linux)."""
        if self._gpu is not None:
            peak, _ = self._peaks.read()
            self._peaks.reset()
            return peak
        with contextlib.suppress(OSError):
            # Unbuffered and as bytes: half of the time, in each step.
            with open("/proc/self/status", "rb", buffering=0) as file:
                status = file.read()
            with open("/proc/self/clear_refs", "wb", buffering=0) as file:
                file.write(b"5")  # man 5 proc
            kilobytes = {name: int(kb) for name, kb in _RESIDENT.findall(status)}
            of_files = kilobytes[b"RssFile"] + kilobytes[b"RssShmem"]
            return (kilobytes[b"VmHWM"] - of_files) * 1024
        return None


Method = TypeVar("Method", bound=Callable[..., None])


def _harmless(method: Method) -> Method:
    """Let a method of `Recorder` do nothing once it has failed: that ends no training."""

    @functools.wraps(method)
    def call(recorder: Recorder, *arguments: Any) -> None:
        if recorder._has_failed:
            return
        try:
            method(recorder, *arguments)
        except ResultError:
            raise
        except Exception as error:
            recorder._has_failed = True
            reason = f"{type(error).__name__}: {error}"
            print(f"Warning: batchtune records no further: {reason}", file=sys.stderr)

    return cast(Method, call)


class Recorder:
    """Records each optimizer step: its batches' shapes, time and peak memory, or that it ran out of memory.

    As a context manager around a loop of your own:

        with batchtune.Recorder("batchtune-run") as recorder:
            for batch in recorder.watch(loader):
                ...

    or `recorder.lightning_callback()`, `recorder.transformers_callback()`, `recorder.follow(brain)` for SpeechBrain;
    anything else can call `begin()` for each epoch, `start(batch)` and `stop()` around each batch. Nothing waits for a
    GPU. torch's own peak statistics are reset after each step.

    If a loop gets more than one batch before it first calls its model, it fetches one ahead, as accelerate and
    Transformers' Trainer do: its steps then have all batches but the last one.

    Args:
        run: The run folder.
        per_unit: How many positions of a tensor's axis make one unit of the manifest's lengths, such as 16000 for
            samples and seconds; by default what the run folder's probe found in the training script, or 1.
        axis: The axis of the length in the batch's tensors; for tensors with fewer axes, their last one.
    """

    # Whether batchtune makes the batches, as in `batchtune run`.
    tuned = False

    def __init__(
        self,
        run: str | Path = "batchtune-run",
        *,
        per_unit: float | None = None,
        axis: int = 1,
    ) -> None:
        folder = Path(run)
        self._per_unit = per_unit or 1.0
        self._target_per_unit = 1.0
        self._packs = False
        path = folder / RUN_FILE
        script = read_result(path, Run).device.script if path.exists() else None
        if script is not None:
            self._per_unit = per_unit or script.per_unit
            self._target_per_unit = script.target_per_unit or 1.0
            self._packs = script.packed
        self._axis = axis
        self._log = TrainingLog(folder / TRAINING_FILE)
        self._hooks: list[Any] = []  # none while the log is closed
        # That the loop got since the last step; None: the row of a packed one is unknown.
        self._batches: list[BatchShape | None] = []
        self._unknown = 0
        self._ahead = 0  # how many of them are of the next step
        self._has_stepped = False
        self._has_failed = False

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches, an epoch. Raises ResultError as `begin` does."""
        self.begin()
        yield from self.watched(loader)

    def watched(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch that has begun."""
        for batch in loader:
            self.start(batch)
            yield batch
            self.stop()

    @_harmless
    def begin(self) -> None:
        """Begin an epoch: what came before belongs to no step. Raises ResultError if the file can't be written."""
        self._end_epoch()
        if not self._hooks:
            self._open()
        self._log.begin_step()

    def _open(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._log.open(tuned=self.tuned)
        self._hooks = [
            register_module_forward_pre_hook(self._on_forward),
            register_optimizer_step_post_hook(self._on_optimizer_step),
        ]
        atexit.register(self.close)
        show = sys.excepthook

        def on_error(kind: Any, error: BaseException, trace: Any) -> None:
            self.failed(error)
            show(kind, error, trace)

        sys.excepthook = on_error

    @_harmless
    def _on_forward(self, *_: Any) -> None:
        if self._batches:
            self._ahead = min(1, len(self._batches) - 1)
            self._hooks[0].remove()

    @_harmless
    def _on_optimizer_step(self, *_: Any) -> None:
        self._has_stepped = True

    @_harmless
    def start(self, batch: Any) -> None:
        """Note that the loop gets a batch; one without a tensor of two axes does not count.

        Its length is the largest size along the axis, its target length the largest of the other sizes along it. A
        packed batch has the lengths that its offsets, positions or numbers of sequences show.
        """
        from batchtune.scripts.trees import hides_row, leaves_of, packed_row, sizes

        leaves = leaves_of(batch)
        row = packed_row(leaves)
        if row is not None and (self._packs or row.size > 1):
            self._packs = True
            lengths = np.maximum(1, np.rint(row / self._per_unit)).astype(int)
            self._batches.append(BatchShape.packed(lengths.tolist()))
            return
        if row is None and hides_row(leaves):
            self._batches.append(None)
            return
        batch_sizes: dict[int, int] = {}
        for leaf in leaves.values():
            axes = sizes(leaf)
            if len(axes) > 1 and all(axes):
                batch_sizes[axes[min(self._axis, len(axes) - 1)]] = axes[0]
        if batch_sizes:
            length, *others = sorted(batch_sizes, reverse=True)
            target_length = others[0] / self._target_per_unit if others else None
            units = length / self._per_unit
            shape = BatchShape(batch_sizes[length], units, target_length)
            if self._packs:  # it shows no sequences: to the model it is a single one
                shape = BatchShape.packed([max(1, round(units))])
            self._batches.append(shape)

    @_harmless
    def stop(self) -> None:
        """Note that the batch is done, and with it a step if an optimizer has stepped."""
        if self._has_stepped:
            self._has_stepped = False
            self._log.end_step(self._take_batches())

    def _take_batches(self) -> list[BatchShape]:
        """Return the batches of the step that was made, or failed, and keep the one ahead."""
        return self._take(max(1, len(self._batches) - self._ahead))

    def _take(self, count: int) -> list[BatchShape]:
        """Return the known ones of so many batches, and count the others."""
        taken = self._batches[:count]
        self._batches = self._batches[count:]
        known = [shape for shape in taken if shape is not None]
        self._unknown += len(taken) - len(known)
        return known

    @_harmless
    def failed(self, error: BaseException) -> None:
        """Record the batch that failed, if the error says that memory ran out."""
        from batchtune.probe.failures import error_verdict
        from batchtune.workloads import first_line

        if self._batches and error_verdict(error) == "oom":
            self._log.write(self._take_batches(), oom=first_line(error))
        self._batches = []

    def _end_epoch(self) -> None:
        """Write the step that was made after the last batch was asked for; its time is not known."""
        if self._has_stepped and self._batches:
            self._log.write(self._take(len(self._batches)))
        self._has_stepped = False
        self._batches = []

    @_harmless
    def close(self) -> None:
        """End the recording."""
        self._end_epoch()
        if self._unknown:
            print(
                f"Warning: batchtune left out {self._unknown:,} packed batches: the lengths of their sequences could "
                "not be read without waiting for the GPU. Use `batchtune record -- COMMAND`, or watch the loader.",
                file=sys.stderr,
            )
            self._unknown = 0
        self._log.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @_harmless
    def refuse(self) -> None:
        """Take the recording back: batchtune ends this training, and an earlier recording stays the last one."""
        self._log.refuse()

    def lightning_callback(self) -> Any:
        """Return a callback for the Trainer of Lightning, which may be imported as `pytorch_lightning`."""
        package = "lightning.pytorch"
        if package not in sys.modules:
            package = "pytorch_lightning"
        base: Any = import_module(package).Callback
        recorder = self

        class Recording(base):  # type: ignore[misc]  # of either package
            """Records a fit."""

            def on_train_epoch_start(self, *_: Any) -> None:
                recorder.begin()

            def on_train_batch_start(
                self, trainer: Any, module: Any, batch: Any, index: int
            ) -> None:
                recorder.start(batch)

            def on_train_batch_end(self, *_: Any) -> None:
                recorder.stop()

        return Recording()

    def transformers_callback(self) -> Any:
        """Return a callback for the Trainer of Transformers, which sees the batches as the model does."""
        import torch

        base: Any = import_module("transformers").TrainerCallback
        recorder = self

        def on_forward(module: Any, arguments: Any, named: Any) -> None:
            if torch.is_grad_enabled():  # not in an evaluation
                recorder.start([arguments, named])

        class Recording(base):  # type: ignore[misc]  # an optional package
            """Records a training."""

            def on_train_begin(self, *_: Any, model: Any, **named: Any) -> None:
                recorder.close()
                recorder.begin()
                recorder._hooks.append(
                    model.register_forward_pre_hook(on_forward, with_kwargs=True)
                )

            def on_epoch_begin(self, *_: Any, **named: Any) -> None:
                recorder.begin()

            def on_step_end(self, *_: Any, **named: Any) -> None:
                recorder.stop()

        return Recording()

    def follow(self, brain: Any) -> None:
        """Record what a SpeechBrain `Brain` trains on from now on, around its `fit_batch`."""
        self.begin()
        own_fit_batch = brain.fit_batch

        def fit_batch(batch: Any) -> Any:
            self.start(batch)
            loss = own_fit_batch(batch)
            self.stop()
            return loss

        brain.fit_batch = fit_batch


# The mode `record` of an unchanged script: the batches of its training loaders pass through a `Recorder`.


def wrap(
    loader: Any, begin: Callable[[], Iterator[Any]], options: Mapping[str, Any]
) -> Iterator[Any]:
    """Return a training loader's iterator, whose batches are recorded.

    `options["recorder"]` are the arguments of `Recorder`. If the file can't be written, the training goes on without.
    """
    try:
        recorder = recorder_of(**options["recorder"])
        recorder.tuned = options.get("mode") == "run"
        recorder.begin()
    except Exception as error:
        print(f"Warning: batchtune records nothing: {error}", file=sys.stderr)
        return begin()
    return Recorded(begin(), recorder)


class Recorded(Iterator[Any]):
    """A loader's iterator whose batches are recorded, with the attributes that its loader asks it for."""

    def __init__(self, own: Iterator[Any], recorder: Any) -> None:
        self._own = own
        self._batches = recorder.watched(own)

    def __next__(self) -> Any:
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@cache
def recorder_of(**options: Any) -> Any:
    """Return this process's recorder."""
    return Recorder(**options)
