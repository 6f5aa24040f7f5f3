"""What a recorded training showed, against what the probe and the sweep predict."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from batchtune.reports import RunResults
from batchtune.reports.section import Cells, Section, Table, V, known, make_table
from batchtune.results import (
    BatchShape,
    LengthsSummary,
    Probe,
    Training,
    TrainingStep,
    last_recording,
)
from batchtune.units import (
    counted,
    format_number,
    format_percent,
    format_seconds,
    format_size,
)


def read_recording(
    path: Path, probe: Probe | None, lengths: LengthsSummary | None
) -> Training:
    """Return what the last recording of `training.jsonl` shows. Raises ResultError if the file can't be read."""
    recording = last_recording(path)
    ooms = [step.oom for step in recording.steps if step.oom is not None]
    figures: dict[str, Any] = {
        "device": recording.start.device,
        "steps": len(recording.steps) - len(ooms),
        "ooms": len(ooms),
        "first_oom": next(iter(ooms), None),
        "damaged_lines": recording.damaged_lines,
    }
    timed = [step for step in recording.steps if step.seconds is not None]
    timed_shapes = _shapes(timed)
    if timed_shapes:
        figures["mean_step_seconds"] = fmean(step.seconds or 0.0 for step in timed)
        figures["peak_bytes"] = max(step.peak_bytes or 0 for step in timed) or None
    is_padded = all(shape.sequences is None for shape in timed_shapes)
    if timed_shapes and is_padded and probe is not None:
        figures |= _predictions(timed_shapes, probe, len(timed))
    # An epoch has steps without a time too, such as the first of a process.
    shapes = _shapes([step for step in recording.steps if step.oom is None])
    if shapes and lengths is not None:
        epochs = sum(shape.batch_size for shape in shapes) / lengths.count
        padded_length = sum(shape.padded_length for shape in shapes)
        padding_ratio = 1 - epochs * lengths.total / padded_length
        figures["epoch_batches"] = len(shapes) / epochs
        figures["padding_ratio"] = max(0.0, padding_ratio)
    return Training(**figures)


def _shapes(steps: Iterable[TrainingStep]) -> list[BatchShape]:
    """Return the batches of the steps."""
    return list(itertools.chain.from_iterable(step.batches for step in steps))


def _predictions(
    shapes: Sequence[BatchShape], probe: Probe, steps: int
) -> dict[str, float]:
    """Return what the probe predicts of steps of these batches, unless it needs targets that are not known."""
    from batchtune.epochs.cost_model import predict
    from batchtune.epochs.layout import EpochShapes
    from batchtune.epochs.measured_costs import costs_of

    with_targets = all(shape.target_length is not None for shape in shapes)
    batches = EpochShapes.of(shapes, with_targets=with_targets)
    predictions: dict[str, float] = {}
    step_seconds = costs_of(probe).step_seconds
    memory = probe.models.peak_bytes
    with contextlib.suppress(ValueError):
        if memory is not None:
            sizes = batches.batch_sizes
            largest = predict(memory, sizes, batches.lengths, batches.targets).max()
            predictions["predicted_peak_bytes"] = round(float(largest))
        if step_seconds is not None:
            total = batches.seconds(step_seconds).sum()
            predictions["predicted_step_seconds"] = float(total) / steps
    return predictions


def training_section(run: RunResults) -> Section:
    """Return what to report on `training.jsonl`."""
    training = run.training
    assert training is not None
    outcome = "without running out of memory"
    warnings = []
    if training.ooms:
        outcome = f"and out of memory {counted(training.ooms, 'time')}"
        warnings.append(
            f"The recorded training ran out of memory ({training.first_oom}): run `batchtune tune` again as before in "
            "this run folder, and it stays below those batches."
        )
    if training.damaged_lines:
        warnings.append(
            f"{counted(training.damaged_lines, 'line')} of training.jsonl can't be read: a disk was full, or the power "
            "failed. The report leaves that out."
        )
    sentence = f"Recorded training: {counted(training.steps, 'step')} on {training.device}, {outcome}"
    return Section(
        title="Recorded training",
        sentences=[f"{sentence}."],
        tables=[_comparison(run, training)],
        warnings=warnings,
    )


def _comparison(run: RunResults, training: Training) -> Table:
    """Lay out what was predicted next to what was measured: of its batches, and of an epoch as recommended."""
    batches: float | None = None
    padding: float | None = None
    if run.sweep is not None and run.sweep.recommended_row is not None:
        batches = run.sweep.recommended_row.batches
        padding = run.sweep.recommended_row.padding_ratio
    step_seconds = training.predicted_step_seconds
    peak_bytes = training.predicted_peak_bytes
    rows = [
        _row("a step", step_seconds, training.mean_step_seconds, format_seconds),
        _row("the largest peak", peak_bytes, training.peak_bytes, format_size),
        _row("batches of an epoch", batches, training.epoch_batches, format_number),
        _row("padding", padding, training.padding_ratio, format_percent),
    ]
    title = "Predicted (an epoch: as recommended) and measured in training"
    return make_table(title, rows, left=["of"])


def _row(
    name: str, predicted: V | None, measured: V | None, words: Callable[[V], str]
) -> Cells:
    return {
        "of": name,
        "predicted": known(predicted, words),
        "measured": known(measured, words),
    }
