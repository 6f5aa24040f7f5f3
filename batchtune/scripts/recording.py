"""The mode `record` of an unchanged script: its loaders' batches pass through, and each step is recorded.

Who looks ahead trains on earlier batches than the last one it got: accelerate fetches one ahead, and the Trainer of
Transformers all of an accumulation. So batches wait in a queue until they are trained on.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from batchtune.errors import BatchtuneError
from batchtune.results import TRAINING_FILE, RecordedBatch
from batchtune.scripts.laps import Lap
from batchtune.scripts.training_log import TrainingLog, sizes_of


def wrap(
    loader: Any, begin: Callable[[], Iterator[Any]], options: Mapping[str, Any]
) -> Iterator[Any]:
    """Return a training loader's iterator, whose batches are recorded.

    `options` has the fields `run` (the run folder), `per_unit`, `target_per_unit` and `axis`, as `Recorder`. If the
    file can't be written, the training goes on without.
    """
    global _delivered
    if _delivered is None:
        try:
            path = Path(options["run"]) / TRAINING_FILE
            log = TrainingLog(path, options["per_unit"], options["target_per_unit"])
        except BatchtuneError as error:
            print(f"Warning: batchtune records nothing: {error}", file=sys.stderr)
            return begin()
        _delivered = Delivered(log, options["axis"])
        _delivered.watch_the_end()
    _delivered.begin_epoch()
    return Passing(begin(), _delivered)


class Delivered:
    """The batches that a loop got and has not trained on, as far as is known.

    At the end of the first step, those of the step and those that the loop looks ahead by are all that it got; at the
    end of the second, one step's more. So the first step is written with the second.

    Attributes:
        looks_ahead: How many batches the loop is ahead at the end of a step; None until that is known.
    """

    def __init__(self, log: TrainingLog, axis: int = 1) -> None:
        self._log = log
        self._axis = axis
        self._queue: list[RecordedBatch] = []
        self._first: tuple[int, Lap] | None = None  # how many the loop had got
        self._before_forward: int | None = None
        self.looks_ahead: int | None = None

    def watch_the_end(self) -> None:
        """Record an error that ends the process, and the last steps."""
        atexit.register(self.end_epoch)
        others = sys.excepthook

        def on_error(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
        ) -> None:
            self.failed(error)
            others(kind, error, trace)

        sys.excepthook = on_error

    def begin_epoch(self) -> None:
        """Begin anew: what is left of the last epoch was trained on, or never will be."""
        self.end_epoch()
        if self.looks_ahead is None and self._before_forward is None:
            self._note_forward()
        self._log.restart()

    def _note_forward(self) -> None:
        """Note how many batches the loop has got when a model is first called."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        def on_forward(*_: Any) -> None:
            if self._queue:
                self._before_forward = len(self._queue)
                hook.remove()

        hook = register_module_forward_pre_hook(on_forward)

    def end_epoch(self) -> None:
        """Write the steps that were made after the last batch was asked for; their times are not known."""
        remaining = self._queue
        self._queue = []
        first = self._first
        self._first = None
        if first is not None:
            count = first[0]
            if self._log.has_stepped:
                count = (len(remaining) + 1) // 2
            self._log.add(remaining[:count], first[1])
            remaining = remaining[count:]
        if self._log.has_stepped and remaining:
            self._log.add(remaining, None)

    def end_step(self) -> None:
        """Write the step that the loop has made since it last asked for a batch, if it has."""
        lap = self._log.end_step()
        if lap is None:
            return
        if self.looks_ahead is None:
            if self._first is None:
                self._first = (len(self._queue), lap)
                return
            count, first_lap = self._first
            self._first = None
            self.looks_ahead = self._ahead(count, len(self._queue) - count)
            self._write(count - self.looks_ahead, first_lap)
        self._write(len(self._queue) - self.looks_ahead, lap)

    def _ahead(self, first: int, second: int) -> int:
        """Return how far the loop looks ahead that got so many batches for the first step, then for the second.

        The first optimizer steps may be skipped, as mixed precision does where gradients overflow: then too many
        batches seem to be ahead. But it can't be more than it had when it called its model, less the step's own: all
        of them if it gets them at once, else the one.
        """
        ahead = first - second
        if self._before_forward is not None:
            own = second if self._before_forward > second else 1
            ahead = min(ahead, self._before_forward - own)
        return max(0, ahead)

    def _write(self, count: int, lap: Lap) -> None:
        self._log.add(self._queue[:count], lap)
        self._queue = self._queue[count:]

    def add(self, batch: Any) -> None:
        """Note that the loop gets a batch."""
        sizes = sizes_of(batch, self._axis)
        if sizes is not None:
            self._queue.append(sizes)

    def failed(self, error: BaseException) -> None:
        """Record a step that ran out of memory, with the batches that it may have been."""
        if self._first is not None:
            count, lap = self._first
            self._first = None
            self._write(count + 1 - (self._before_forward or 1), lap)
        count = len(self._queue) - (self.looks_ahead or 0)
        self._log.add_oom(self._queue[:count], error)
        self._queue = []


_delivered: Delivered | None = None


class Passing(Iterator[Any]):
    """A loader's iterator, as it is, whose batches are noted."""

    def __init__(self, inner: Iterator[Any], delivered: Delivered) -> None:
        self._inner = inner
        self._delivered = delivered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        self._delivered.end_step()
        batch = next(self._inner)
        self._delivered.add(batch)
        return batch
