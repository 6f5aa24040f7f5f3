"""The writer of `training.jsonl`: sees each optimizer step end, measures it, and appends its line."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from batchtune.files import unwritable
from batchtune.results import (
    RUN_FILE,
    RecordedBatch,
    Run,
    TrainingStart,
    TrainingStep,
    meta_of,
    read_result,
)
from batchtune.scripts.laps import Lap, Laps, open_laps
from batchtune.workloads.loading import first_line

_DEEPEST = 4  # levels of containers in a batch


def sizes_of(batch: Any, axis: int = 1) -> RecordedBatch | None:
    """Return the sizes of a batch's tensors, as `RecordedBatch` says; None without a tensor of two axes.

    Tensors are found in mappings, sequences and the attributes of objects. One with fewer axes than `axis` counts with
    its last.
    """
    sizes = []
    for shape in _shapes(batch, _DEEPEST):
        size = shape[min(axis, len(shape) - 1)]
        if size and shape[0]:
            sizes.append((size, shape[0]))
    if not sizes:
        return None
    length, batch_size = max(sizes)
    others = [size for size, _ in sizes if size != length]
    return RecordedBatch(
        batch_size=batch_size,
        length=length,
        target_length=max(others, default=None),
    )


def _shapes(batch: Any, depth: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the tensors with two axes or more."""
    if batch is None or isinstance(batch, str | bytes | int | float):
        return
    if hasattr(batch, "ndim"):
        if batch.ndim > 1:
            yield tuple(batch.shape)
        return
    parts: Iterable[Any] = getattr(batch, "__dict__", {}).values()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    if depth:
        for part in parts:
            yield from _shapes(part, depth - 1)


class TrainingLog:
    """One process's recording. A step ends where the loop is done with a batch and an optimizer has stepped.

    Several optimizers' steps on the same batches (a GAN's) are one. If the file can't be written any more, recording
    ends with a warning, and the training goes on.
    """

    def __init__(
        self, path: Path, per_unit: float | None, target_per_unit: float | None
    ) -> None:
        """Open the file. Raises ResultError if it can't be written, or the run folder's `run.json` not read."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.path = path
        known = _units_in(path.parent)
        self._per_unit = per_unit or known[0]
        self._target_per_unit = target_per_unit or known[1]
        self._rank = int(os.environ.get("RANK", 0))
        self._file: int | None = _open_to_append(path)
        self._laps: Laps | None = None
        self._has_stepped = False
        self._is_first = True
        # Of a GPU, until their times are known.
        self._waiting: deque[tuple[TrainingStep, Lap | None]] = deque()
        self._hook: Any = register_optimizer_step_post_hook(self._on_optimizer_step)
        atexit.register(self.close)

    def _on_optimizer_step(self, *_: Any) -> None:
        self._has_stepped = True

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last step ended."""
        return self._has_stepped

    def restart(self) -> None:
        """Begin a step here: what came before, such as a validation, belongs to none."""
        self._has_stepped = False
        if self._laps is None:
            self._start()
        else:
            self._laps.restart()

    def _start(self) -> None:
        """Open the stopwatch, not before training begins: then it is known whether it uses a GPU."""
        self._laps = open_laps()
        start = TrainingStart(
            meta=meta_of(TrainingStart),
            device=self._laps.device,
            per_unit=self._per_unit,
            target_per_unit=self._target_per_unit,
            rank=self._rank,
        )
        self._append(start)

    def end_step(self) -> Lap | None:
        """Return what was measured of the step if an optimizer has stepped, and begin the next."""
        if not self._has_stepped or self._laps is None:
            return None
        self._has_stepped = False
        return self._laps.lap()

    def add(self, batches: list[RecordedBatch], lap: Lap | None) -> None:
        """Write a step, on a GPU as soon as its time is known; without a lap it was not measured."""
        step = TrainingStep(
            rank=self._rank,
            batches=batches,
            seconds=None,
            peak_bytes=None if lap is None else lap.peak_bytes,
            warm_up=self._is_first,
        )
        self._is_first = False
        self._waiting.append((step, lap))
        self._write_known()

    def add_oom(self, batches: list[RecordedBatch], error: BaseException) -> None:
        """Write that memory ran out with these batches at hand, if that is what an error says."""
        from batchtune.probe.failures import error_verdict

        if error_verdict(error) != "oom":
            return
        self._write_known()
        step = TrainingStep(
            rank=self._rank,
            batches=batches,
            seconds=None,
            peak_bytes=None,
            oom=first_line(error),
        )
        self._append(step)

    def _write_known(self, *, wait: bool = False) -> None:
        while self._waiting:
            step, lap = self._waiting[0]
            if lap is not None:
                if not (wait or lap.is_known()):
                    return
                step = msgspec.structs.replace(step, seconds=round(lap.seconds(), 7))
            self._waiting.popleft()
            self._append(step)

    def _append(self, line: TrainingStart | TrainingStep) -> None:
        """Append a line by one write, which the system does whole even if the process is killed meanwhile."""
        if self._file is None:
            return
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            print(
                f"Warning: batchtune records no further: {unwritable(self.path, error)}",
                file=sys.stderr,
            )
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        """Write what is left, and end the recording."""
        self._hook.remove()
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # the GPU is of no use after an error
            self._write_known(wait=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _units_in(folder: Path) -> tuple[float, float]:
    """Return the sizes of the units that the folder's probe found in a training script's batches; 1 if it has none."""
    path = folder / RUN_FILE
    script = read_result(path, Run).device.script if path.exists() else None
    if script is None:
        return 1.0, 1.0
    return script.per_unit, script.target_per_unit or 1.0


def _open_to_append(path: Path) -> int:
    """Open a file to append lines, after a line that was cut short too. Raises ResultError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o666)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
        return file
    except OSError as error:
        raise unwritable(path, error) from error
