"""What a recorded training showed, against what the probe and the sweep predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchtune.reports import RunResults
from batchtune.reports.section import Section, Table, known, make_table
from batchtune.results import (
    TRAINING_FILE,
    BatchShape,
    LengthsSummary,
    Probe,
    Training,
    TrainingStart,
    TrainingStep,
    read_training,
)
from batchtune.units import (
    counted,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    format_size,
)

# Batches may be padded a little beyond the longest example, but no further.
_PADDED_BEYOND = 1.5


@dataclass(slots=True)
class _Recording:
    """What the lines of one recording say; `timed` are the batches of the steps with a time."""

    device: str
    ranks: set[int] = field(default_factory=set)
    steps: int = 0
    ooms: list[str] = field(default_factory=list)
    shapes: list[BatchShape] = field(default_factory=list)
    timed: list[BatchShape] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def add(self, step: TrainingStep, start: TrainingStart) -> None:
        """Take in a step."""
        if step.oom is not None:
            self.ooms.append(step.oom)
            return
        shapes = [batch.shape(start) for batch in step.batches]
        self.steps += 1
        self.shapes += shapes
        if step.seconds is not None and not step.warm_up:
            self.seconds.append(step.seconds)
            self.timed += shapes
        if step.peak_bytes is not None and not step.warm_up:
            self.peaks.append(step.peak_bytes)


def read_recording(
    path: Path, probe: Probe | None, lengths: LengthsSummary | None
) -> Training:
    """Return what the last recording of `training.jsonl` shows. Raises ResultError if the file can't be read."""
    recordings: list[_Recording] = []
    cut_lines = 0
    for line in read_training(path):
        if isinstance(line, TrainingStart):
            start = line
            if not recordings or start.rank in recordings[-1].ranks:
                recordings.append(_Recording(start.device))
            recordings[-1].ranks.add(start.rank)
        elif isinstance(line, TrainingStep):
            recordings[-1].add(line, start)
        else:
            cut_lines += 1
    last = recordings[-1]
    training = Training(
        recordings=len(recordings),
        ranks=len(last.ranks),
        device=last.device,
        steps=last.steps,
        ooms=len(last.ooms),
        first_oom=last.ooms[0] if last.ooms else None,
        cut_lines=cut_lines,
        batches=len(last.shapes),
        examples=sum(shape.batch_size for shape in last.shapes),
        mean_step_seconds=_mean(last.seconds),
        peak_bytes=max(last.peaks, default=None),
    )
    if probe is not None:
        training = _with_predictions(training, last, probe)
    if lengths is not None:
        training = _with_epoch(training, last, lengths)
    return training


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _with_predictions(
    training: Training, recording: _Recording, probe: Probe
) -> Training:
    """Return the same with what the probe's models say of its batches, if their targets are known where they count."""
    from batchtune.epochs.cost_model import needs_targets, predict
    from batchtune.epochs.measured_costs import costs_of

    has_targets = all(shape.target_length is not None for shape in recording.shapes)
    model = probe.models.step_seconds
    step_seconds = costs_of(probe).step_seconds
    if step_seconds is not None and model is not None and recording.timed:
        if has_targets or not needs_targets(model):
            total = float(step_seconds(*_columns(recording.timed)).sum())
            predicted = total / len(recording.seconds)
            training = replace(
                training,
                predicted_step_seconds=predicted,
                time_ratio=sum(recording.seconds) / total,
            )
    memory = probe.models.peak_bytes
    if memory is not None and recording.shapes:
        if has_targets or not needs_targets(memory):
            peaks = predict(memory, *_columns(recording.shapes))
            training = replace(training, predicted_peak_bytes=round(float(peaks.max())))
    return training


def _columns(shapes: Sequence[BatchShape]) -> tuple[Any, Any, Any]:
    """Return batch sizes, lengths and target lengths, 0 where unknown; shape (batches,) each."""
    import numpy as np

    return (
        np.array([shape.batch_size for shape in shapes], dtype=np.float64),
        np.array([shape.length for shape in shapes]),
        np.array([shape.target_length or 0.0 for shape in shapes]),
    )


def _with_epoch(
    training: Training, recording: _Recording, lengths: LengthsSummary
) -> Training:
    """Return the same with what an epoch of the data set would be."""
    longest = max((shape.length for shape in recording.shapes), default=0.0)
    too_long = longest > _PADDED_BEYOND * lengths.max
    if too_long or not training.examples:
        return replace(training, too_long=too_long)
    epochs = training.examples / lengths.count
    epoch_seconds = None
    timed_examples = sum(shape.batch_size for shape in recording.timed)
    if timed_examples:
        # Ranks train at the same time.
        seconds = sum(recording.seconds) / training.ranks
        epoch_seconds = seconds * lengths.count / timed_examples
    padded_length = sum(shape.padded_length for shape in recording.shapes)
    return replace(
        training,
        epoch_seconds=epoch_seconds,
        epoch_batches=training.batches / epochs,
        padding_ratio=max(0.0, 1 - epochs * lengths.total / padded_length),
    )


def training_section(run: RunResults) -> Section:
    """Return what to report on `training.jsonl`."""
    training = run.training
    assert training is not None
    return Section(
        title="Recorded training",
        sentences=list(_sentences(training)),
        tables=[_comparison(run, training)],
        warnings=list(_warnings(training)),
    )


def _sentences(training: Training) -> Iterator[str]:
    """Say what was recorded, and how the times compare."""
    outcome = "without running out of memory"
    if training.ooms:
        outcome = f"and out of memory {counted(training.ooms, 'time')}"
    recorded = (
        f"Recorded training: {counted(training.steps, 'step')} on {training.device}"
    )
    if training.ranks > 1:
        recorded += f" in {training.ranks} ranks"
    time = ""
    if training.mean_step_seconds is not None:
        time = f"; a step takes {format_seconds(training.mean_step_seconds)}"
    if training.predicted_step_seconds is not None and training.time_ratio is not None:
        predicted = format_seconds(training.predicted_step_seconds)
        ratio = format_ratio(training.time_ratio)
        time += f" measured against {predicted} predicted ({ratio} times)"
    yield f"{recorded}, {outcome}{time}."
    if training.recordings > 1:
        yield f"{TRAINING_FILE} holds {training.recordings} recordings; this is the last."


def _comparison(run: RunResults, training: Training) -> Table:
    """Lay out what was predicted next to what was measured: of its batches, and of an epoch as recommended."""
    row = run.sweep.recommended_row if run.sweep is not None else None
    recommended: dict[str, str | None] = {}
    if row is not None:
        recommended = {
            "seconds": known(row.estimated_epoch_seconds, format_seconds),
            "batches": format_number(row.batches),
            "padding": format_percent(row.padding_ratio),
        }
    rows = [
        {
            "of": "a step",
            "predicted": known(training.predicted_step_seconds, format_seconds),
            "measured": known(training.mean_step_seconds, format_seconds),
        },
        {
            "of": "the largest peak",
            "predicted": known(training.predicted_peak_bytes, format_size),
            "measured": known(training.peak_bytes, format_size),
        },
        {
            "of": "an epoch (predicted: as recommended)",
            "predicted": recommended.get("seconds"),
            "measured": known(training.epoch_seconds, format_seconds),
        },
        {
            "of": "its batches",
            "predicted": recommended.get("batches"),
            "measured": known(training.epoch_batches, format_number),
        },
        {
            "of": "its padding",
            "predicted": recommended.get("padding"),
            "measured": known(training.padding_ratio, format_percent),
        },
    ]
    return make_table("Predicted and measured in training", rows, left=["of"])


def _warnings(training: Training) -> Iterator[str]:
    """Yield what went wrong, with its remedy."""
    if training.ooms:
        yield (
            f"The recorded training ran out of memory ({training.first_oom}): run `batchtune tune` again as before in "
            "this run folder, and it stays below those batches."
        )
    if training.too_long:
        yield (
            "The recorded batches are longer than the longest example, as if they counted another unit: record with "
            "--per-unit."
        )
    if training.cut_lines:
        yield f"{counted(training.cut_lines, 'line')} of {TRAINING_FILE} cut short are left out."
