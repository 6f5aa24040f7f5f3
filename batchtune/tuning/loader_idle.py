"""How long the training step waits with each setting of a loader: the queue of its workers, held against the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from batchtune.cost.loader_queue import QueueObservation, fit_queue, predict_waits
from batchtune.cost.loader_simulation import QueueSetting
from batchtune.lengths import FloatArray
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.protocol import Opened, Taken
from batchtune.results import BUSY_IDLE, MORE_THAN_NEEDED, Arguments, LoaderQueue, LoaderRow
from batchtune.tuning.loader_demand import Steps


class IdleModel:
    """The idle share and the epoch's time of rows, from what was measured of them.

    Args:
        steps: How long the step takes; None: not known.
        kind: Of the loader.
        processors: Of this rank.
        opened: What the worker told of the loader.
    """

    def __init__(self, steps: Steps | None, kind: LoaderKind, processors: int, opened: Opened) -> None:
        self.steps, self._kind, self._processors, self._opened = steps, kind, processors, opened
        self._observed: dict[str, QueueObservation] = {}
        self._receive_seconds = 0.0

    @property
    def has_steps(self) -> bool:
        """Whether it is known how long a step takes."""
        return self.steps is not None

    def learn(self, row: LoaderRow, epochs: Sequence[Taken]) -> None:
        """Take in a measured setting; a later measurement of the same takes its place."""
        self._note(row.name, row, epochs, 0.0)

    def learn_receiving(self, row: LoaderRow, epochs: Sequence[Taken]) -> None:
        """Take in how long a consumer waited that left its workers more than enough time: so long it receives a batch.

        That is no small time where workers compute in Python: to hand over a tensor, a thread of theirs needs the
        interpreter's lock, for which it waits up to 5 ms.
        """
        self.learn_paced(row, epochs)
        waits = [wait for taken in epochs for wait in taken.waits[row.workers :]]
        self._receive_seconds = float(np.mean(waits)) if waits else 0.0

    def learn_paced(self, row: LoaderRow, epochs: Sequence[Taken]) -> None:
        """Take in how a consumer fared that computed as long as the step takes: that shows what receiving costs."""
        steps = [step for taken in epochs for step in taken.steps]
        self._note(f"{row.name} with steps", row, epochs, float(np.mean(steps)))

    def _note(self, name: str, row: LoaderRow, epochs: Sequence[Taken], step: float) -> None:
        longest = max(epochs, key=lambda taken: len(taken.waits))
        seconds = sum(longest.waits[1:]) + sum(longest.steps[:-1])
        if seconds:
            self._observed[name] = QueueObservation(
                setting=self._setting(row.arguments),
                batches=len(longest.waits),
                batches_per_second=(len(longest.waits) - 1) / seconds,
                processors=None if step else row.processors,
                step_seconds=step,
            )

    @property
    def record(self) -> LoaderQueue | None:
        """The queue that fits all that was measured; None where it can't be fitted."""
        return fit_queue(list(self._observed.values()), self._processors) if self._kind.name == "torch" else None

    def steps_of(self, epochs: Sequence[Taken]) -> FloatArray:
        """Return the seconds of a step with each delivered batch."""
        assert self.steps is not None
        return self.steps.of(epochs, exact=self._opened.exact)[0]

    def keeps_up(self, row: LoaderRow, epochs: Sequence[Taken]) -> bool:
        """Return whether a row delivers clearly more than the step takes; what it still waits is not for batches."""
        if self.steps is None or not row.workers:
            return row.idle is not None and row.idle <= BUSY_IDLE
        return (row.batches_per_second or 0.0) * float(self.steps_of(epochs).mean()) > MORE_THAN_NEEDED

    def priced(self, row: LoaderRow, epochs: Sequence[Taken]) -> LoaderRow:
        """Return a row that works, with its idle share and the time of an epoch, as far as they are known."""
        if self.steps is not None:
            row = replace(row, gpu_idle=self._idle(row, epochs))
        return replace(row, estimated_epoch_seconds=self.epoch_seconds(row, epochs))

    def epoch_seconds(self, row: LoaderRow, epochs: Sequence[Taken]) -> float | None:
        """Return the time of an epoch: its steps and waits, or the loader's own time where no steps are known."""
        batches = self.epoch_batches(epochs)
        if batches is None or not row.batches_per_second:
            return None
        start = row.first_batch_seconds or 0.0
        if self.steps is None or row.idle is None:
            return start + (batches - 1) / row.batches_per_second
        step = float(self.steps_of(epochs).mean())
        return start + batches * step / max(1e-9, 1 - row.idle)

    def epoch_batches(self, epochs: Sequence[Taken]) -> int | None:
        """Return how many batches an epoch has, as the loader says or one that came to its end; None: not known."""
        return self._opened.batches or next(
            (len(taken.waits) for taken in epochs if taken.complete and taken.waits), None
        )

    def epoch_examples(self, epochs: Sequence[Taken]) -> int | None:
        """Return how many examples such an epoch has."""
        complete = next((taken.examples for taken in epochs if taken.complete and taken.waits), None)
        return None if complete is None or None in complete else sum(count or 0 for count in complete)

    def _idle(self, row: LoaderRow, epochs: Sequence[Taken]) -> float:
        """Return the idle share of a setting, whose own rate is what its workers can do."""
        steps = self.steps_of(epochs)
        if not row.workers:  # nothing overlaps
            wait = 1 / (row.batches_per_second or 1e-9)
            return wait / (wait + float(steps.mean()))
        relative = np.array([length or 1.0 for taken in epochs for length in taken.total_lengths])
        rate = row.batches_per_second or 1e-9
        queue = LoaderQueue(  # of this setting alone
            batch_seconds=row.workers / rate,
            busy=min(1.0, (row.processors or 0.0) / row.workers),
            receive_seconds=self._receive_seconds,
            processors=self._processors,
            relative_error=0.0,
        )
        setting, measured = self._setting(row.arguments), self._observed.get(row.name)
        found = predict_waits(queue, setting, relative, steps, measured=measured)
        return found.idle

    def _setting(self, arguments: Arguments) -> QueueSetting:
        return QueueSetting(
            workers=self._kind.workers(arguments),
            prefetch_factor=self._kind.prefetched(arguments),
            in_order=arguments.get("in_order") is not False,
        )
