"""How long the training step computes with each batch of a loader, and how long it waits for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from batchtune.epochs.cost.fitting import needs_targets
from batchtune.epochs.measured_costs import Costs, costs_of
from batchtune.lengths import FloatArray
from batchtune.loaders.protocol import Opened, Taken
from batchtune.results import (
    MORE_THAN_NEEDED,
    PROBE_FILE,
    SWEEP_FILE,
    Demand,
    LengthsSummary,
    LoaderRow,
    Probe,
    Sweep,
    read_result,
)


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
        examples: list[int | None] = []
        lengths: list[float | None] = []
        for epoch in taken:
            examples += epoch.examples
            lengths += epoch.lengths
        if self.per_batch is not None:
            return np.full(len(examples), self.per_batch), "batch"
        step_seconds = None if self.costs is None else self.costs.step_seconds
        if exact and step_seconds is not None and None not in examples and None not in lengths:
            return step_seconds(np.array(examples, dtype=np.float64), np.array(lengths, dtype=np.float64)), "shape"
        known = [count for count in examples if count is not None]
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
    if not (folder / PROBE_FILE).exists():
        return None, (
            f"No step times are known: {folder} contains no {PROBE_FILE}. Probe first, or give --step-ms, to see "
            "whether the step waits for batches."
        )
    probe = read_result(folder / PROBE_FILE, Probe)
    costs = costs_of(probe)
    if costs.step_seconds is None:
        return None, "The probe's step times can't be used: its trials differ too much. Give --step-ms."
    if probe.models.step_seconds is not None and needs_targets(probe.models.step_seconds):
        costs = dataclasses.replace(costs, step_seconds=None)  # the targets of batches are not known
    per_example = _seconds_per_example(folder)
    if per_example is None:
        return None, (
            f"Step times per example are not known: {folder} contains no {SWEEP_FILE} with a recommended row. Run "
            "`batchtune sweep-buckets` first, or give --step-ms."
        )
    return Steps(source="probe", per_example=per_example, costs=costs, lengths=probe.lengths), None


def _seconds_per_example(folder: Path) -> float | None:
    """Return the estimated epoch seconds of the run's recommended row / its examples."""
    if not (folder / SWEEP_FILE).exists():
        return None
    sweep = read_result(folder / SWEEP_FILE, Sweep)
    row = sweep.recommended_row
    if row is None or row.estimated_epoch_seconds is None:
        return None
    return row.estimated_epoch_seconds / sweep.lengths.count


class StepModel:
    """Holds what a loader delivers against the step: whether that is enough, and the time of an epoch.

    Attributes:
        steps: None if no step times are known.
        opened: The loader.
    """

    def __init__(self, steps: Steps | None, opened: Opened) -> None:
        self.steps = steps
        self.opened = opened

    def steps_of(self, epochs: Sequence[Taken]) -> FloatArray:
        """Return the seconds of a step with each delivered batch."""
        assert self.steps is not None
        seconds, _ = self.steps.of(epochs, exact=self.opened.exact)
        return seconds

    def mean_step(self, epochs: Sequence[Taken]) -> float:
        """Return the mean seconds of a step with these batches."""
        return float(self.steps_of(epochs).mean())

    def has_time_to_spare(self, row: LoaderRow, epochs: Sequence[Taken]) -> bool:
        """Return whether workers deliver clearly more than the step takes, so that more of them don't help."""
        if self.steps is None or not row.workers or row.batches_per_second is None:
            return False
        return row.batches_per_second * self.mean_step(epochs) > MORE_THAN_NEEDED

    def least_idle(self, row: LoaderRow, epochs: Sequence[Taken]) -> float:
        """Return the lowest share of training that the step can wait at the row's rate; without workers it is exact."""
        step_seconds = self.mean_step(epochs)
        batch_seconds = 1 / max(row.batches_per_second or 0.0, 1e-9)
        wait_seconds = batch_seconds
        if row.workers:
            wait_seconds = max(0.0, batch_seconds - step_seconds)
        return wait_seconds / (wait_seconds + step_seconds)

    def epoch_seconds(self, row: LoaderRow, epochs: Sequence[Taken]) -> float | None:
        """Return the time of an epoch: its steps and measured waits, or the loader's own time without step times."""
        batches = self.epoch_batches(epochs)
        if batches is None or not row.batches_per_second:
            return None
        start = row.first_batch_seconds or 0.0
        if self.steps is None:
            return start + (batches - 1) / row.batches_per_second
        if row.gpu_idle is None:
            return None
        return start + batches * self.mean_step(epochs) / max(1e-9, 1 - row.gpu_idle)

    def epoch_batches(self, epochs: Sequence[Taken]) -> int | None:
        """Return the batches of an epoch, by the loader's own number or by an epoch that came to its end."""
        complete = (len(taken.waits) for taken in epochs if taken.complete and taken.waits)
        return self.opened.batches or next(complete, None)


def epoch_examples(epochs: Sequence[Taken]) -> int | None:
    """Return the examples of an epoch that came to its end; None without one, or if they can't be counted."""
    for taken in epochs:
        if taken.complete and taken.waits:
            examples = [count for count in taken.examples if count is not None]
            if len(examples) < len(taken.examples):
                return None
            return sum(examples)
    return None
