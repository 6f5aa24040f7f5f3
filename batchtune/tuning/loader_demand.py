"""How long the training step computes with each batch of a loader, and how long it waits for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import replace

from batchtune.cost.fitting import needs_targets
from batchtune.cost.loader_queue import QueueObservation, fit_queue, predict_waits
from batchtune.cost.loader_simulation import QueueSetting
from batchtune.lengths import FloatArray
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.protocol import Opened, Taken
from batchtune.results import (
    BUSY_IDLE,
    MORE_THAN_NEEDED,
    PROBE_FILE,
    SWEEP_FILE,
    Arguments,
    Demand,
    LengthsSummary,
    LoaderQueue,
    LoaderRow,
    Probe,
    Sweep,
    read_result,
)
from batchtune.tuning.costs import Costs, costs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How long the step computes with batches: the same for each, by their examples, or by their shapes.

    Attributes:
        costs: Of the probe, where batches' shapes are known in its unit.
        per_example: The epoch's estimated seconds / its examples.
        lengths: The data that the run is about; None for a number that the user gave.
    """

    source: Literal["probe", "step-ms"]
    per_batch: float | None = None
    per_example: float | None = None
    costs: Costs | None = None
    lengths: LengthsSummary | None = None

    @property
    def device_name(self) -> str | None:
        """The device that was probed."""
        return None if self.costs is None else self.costs.device_name

    def of(self, taken: Sequence[Taken], *, exact: bool) -> tuple[FloatArray, Literal["shape", "example", "batch"]]:
        """Return the seconds of a step with each delivered batch, and what decides them.

        `exact`: the lengths of batches are in the unit of the run. A batch whose examples are
        unknown takes an average step.
        """
        number = sum(len(one.waits) for one in taken)
        if self.per_batch is not None:
            return np.full(number, self.per_batch), "batch"
        examples = [count for one in taken for count in one.examples]
        lengths = [length for one in taken for length in one.lengths]
        known = [count for count in examples if count is not None]
        step_seconds = None if self.costs is None else self.costs.step_seconds
        if exact and step_seconds is not None and None not in examples and None not in lengths:
            return step_seconds(np.array(examples, dtype=np.float64), np.array(lengths, dtype=np.float64)), "shape"
        mean = float(np.mean(known)) if known else 1.0
        counts = np.array([mean if count is None else count for count in examples], dtype=np.float64)
        return counts * (self.per_example or 0.0), "example"

    def demand(self, taken: Sequence[Taken], *, exact: bool) -> Demand:
        """Return the record of it for the batches that were delivered, at least one."""
        seconds, per = self.of(taken, exact=exact)
        return Demand(source=self.source, per=per, step_seconds=float(seconds.mean()), device_name=self.device_name)


def steps_of_run(folder: Path, step_seconds: float | None) -> tuple[Steps | None, str | None]:
    """Return the step times that the user gave, or those of a run folder; without any, a sentence that says why.

    Raises:
        ResultError: A file of the run can't be read.
    """
    if step_seconds is not None:
        return Steps(source="step-ms", per_batch=step_seconds), None
    probe = read_result(folder / PROBE_FILE, Probe) if (folder / PROBE_FILE).exists() else None
    sweep = read_result(folder / SWEEP_FILE, Sweep) if (folder / SWEEP_FILE).exists() else None
    if probe is None:
        return None, (
            f"No step times are known: {folder} holds no {PROBE_FILE}. Probe first, or give --step-ms, to see whether "
            "the step waits for batches."
        )
    costs, row = costs_of(probe), None if sweep is None else sweep.recommended_row
    if costs.step_seconds is None:
        return None, "The probe's step times can't be used: its trials differ too much. Give --step-ms."
    if probe.models.step_seconds is not None and needs_targets(probe.models.step_seconds):
        costs = dataclasses.replace(costs, step_seconds=None)  # the targets of batches are not known
    per_example = None
    if sweep is not None and row is not None and row.estimated_epoch_seconds is not None:
        per_example = row.estimated_epoch_seconds / sweep.lengths.count
    if per_example is None:
        return None, (
            f"Step times per example are not known: {folder} holds no {SWEEP_FILE} with a recommended row. Run "
            "`batchtune sweep-buckets` first, or give --step-ms."
        )
    return Steps(source="probe", per_example=per_example, costs=costs, lengths=probe.lengths), None


class IdleModel:
    """The idle share and the epoch's time of rows, from their measurements; `steps` is None if steps are unknown."""

    def __init__(self, steps: Steps | None, kind: LoaderKind, processors: int, opened: Opened) -> None:
        self.steps, self._kind, self._processors, self._opened = steps, kind, processors, opened
        self._observed: dict[str, QueueObservation] = {}
        self._receive_seconds = 0.0

    def learn(self, row: LoaderRow, epochs: Sequence[Taken], *, paced: bool = False) -> None:
        """Take in a measured setting, in place of an earlier measurement.

        `paced`: its consumer computed as long as the step takes, which shows the cost of receiving batches.
        """
        longest = max(epochs, key=lambda taken: len(taken.waits))
        seconds = sum(longest.waits[1:]) + sum(longest.steps[:-1])
        if seconds and len(longest.waits) > row.workers:  # the first batches of all workers come together
            steps = [step for taken in epochs for step in taken.steps]
            self._observed[f"{row.name} with steps" if paced else row.name] = QueueObservation(
                setting=self._setting(row.arguments),
                batches=len(longest.waits),
                batches_per_second=(len(longest.waits) - 1) / seconds,
                processors=None if paced else row.processors,
                step_seconds=float(np.mean(steps)) if paced else 0.0,
            )

    def learn_receiving(self, row: LoaderRow, epochs: Sequence[Taken]) -> None:
        """Take in the waits of a consumer that left its workers more than enough time: each receives a batch.

        Where workers compute in Python these are long: to hand over a tensor, a thread of theirs needs the
        interpreter's lock, for which it waits up to 5 ms.
        """
        self.learn(row, epochs, paced=True)
        waits = [wait for taken in epochs for wait in taken.waits[row.workers :]]
        self._receive_seconds = float(np.mean(waits)) if waits else 0.0

    @property
    def record(self) -> LoaderQueue | None:
        """The queue that fits all measurements, if it can be fitted."""
        return fit_queue(list(self._observed.values()), self._processors) if self._kind.name == "torch" else None

    def steps_of(self, epochs: Sequence[Taken]) -> FloatArray:
        """Return the seconds of a step with each delivered batch."""
        assert self.steps is not None
        return self.steps.of(epochs, exact=self._opened.exact)[0]

    def keeps_up(self, row: LoaderRow, epochs: Sequence[Taken]) -> bool:
        """Return whether a row delivers clearly more than the step takes, so that it only waits to receive batches."""
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
        return start + batches * float(self.steps_of(epochs).mean()) / max(1e-9, 1 - row.idle)

    def epoch_batches(self, epochs: Sequence[Taken]) -> int | None:
        """Return the batches of an epoch, by the loader's own number or by an epoch that came to its end."""
        complete = (len(taken.waits) for taken in epochs if taken.complete and taken.waits)
        return self._opened.batches or next(complete, None)

    def epoch_examples(self, epochs: Sequence[Taken]) -> int | None:
        """Return the examples of an epoch that came to its end."""
        complete = next((taken.examples for taken in epochs if taken.complete and taken.waits), None)
        return None if complete is None or None in complete else sum(count or 0 for count in complete)

    def _idle(self, row: LoaderRow, epochs: Sequence[Taken]) -> float:
        """Return the idle share of a setting, given its own rate."""
        steps, rate = self.steps_of(epochs), row.batches_per_second or 1e-9
        if not row.workers:  # nothing overlaps
            return 1 / rate / (1 / rate + float(steps.mean()))
        relative = np.array([length or 1.0 for taken in epochs for length in taken.total_lengths])
        queue = LoaderQueue(  # of this setting alone
            batch_seconds=row.workers / rate,
            busy=min(1.0, (row.processors or 0.0) / row.workers),
            receive_seconds=self._receive_seconds,
            processors=self._processors,
            relative_error=0.0,
        )
        measured = self._observed.get(row.name)
        return predict_waits(queue, self._setting(row.arguments), relative, steps, measured=measured).idle

    def _setting(self, arguments: Arguments) -> QueueSetting:
        return QueueSetting(
            workers=self._kind.workers(arguments),
            prefetch_factor=self._kind.prefetched(arguments),
            in_order=arguments.get("in_order") is not False,
        )
