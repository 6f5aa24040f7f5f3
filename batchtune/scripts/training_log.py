"""Measures a training's steps without waiting for a GPU, and appends each to `training.jsonl`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from batchtune.files import open_to_append, unwritable
from batchtune.probe.devices import backend_for
from batchtune.probe.devices.cuda import PeakCounter
from batchtune.probe.parameters import training_gpu
from batchtune.results import BatchShape, TrainingStart, TrainingStep, meta_of
from batchtune.scripts.interposing import place_in_group

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
            meta = meta_of(TrainingStart)
            self._write(TrainingStart(meta=meta, device=device, tuned=tuned))

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
