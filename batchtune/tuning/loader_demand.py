"""What the training step needs of a loader: how long it computes with each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from batchtune.cost.fitting import needs_targets
from batchtune.lengths import FloatArray
from batchtune.loaders.protocol import Taken
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    Demand,
    LengthsSummary,
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

        `exact`: the lengths of batches are in the unit of the run. None of a batch whose examples can't be told: then
        that of an average batch.
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
    """Return the step times that the user gave, or those of a run folder; and why there are none, a full sentence.

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
        costs = replace(costs, step_seconds=None)  # the targets of batches are not known
    per_example = None
    if sweep is not None and row is not None and row.estimated_epoch_seconds is not None:
        per_example = row.estimated_epoch_seconds / sweep.lengths.count
    if per_example is None:
        return None, (
            f"Step times per example are not known: {folder} holds no {SWEEP_FILE} with a recommended row. Run "
            "`batchtune sweep-buckets` first, or give --step-ms."
        )
    return Steps(source="probe", per_example=per_example, costs=costs, lengths=probe.lengths), None
