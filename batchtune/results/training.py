"""The records of `training.jsonl`, the steps of a real training, and of what reports say about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec

from batchtune.errors import ResultError
from batchtune.results.shared import (
    Amount,
    BatchShape,
    Bytes,
    Cost,
    CostBytes,
    CostCount,
    CostRatio,
    CostShare,
    Count,
    Positive,
    Record,
    Result,
    Size,
    StepSeconds,
    check_meta,
)

_LONGEST_LINE = 16 << 20  # bytes; a step over 100,000 batches takes less
_HEADER = b'{"meta":'


class TrainingStart(Result, frozen=True, kw_only=True):
    """A line that begins a recording in `training.jsonl`: one for each process that trains.

    A process with a rank that the recording has already begins another recording.

    Attributes:
        device: Name of the device.
        per_unit: How many positions of a tensor's axis make one unit of the manifest's lengths: 16000 where a batch
            holds samples and the manifest seconds.
        target_per_unit: The same for targets.
        rank: Of the process, from 0.
    """

    FORMAT: ClassVar[str] = "batchtune/training"

    device: str
    per_unit: Positive
    target_per_unit: Positive
    rank: Count


class RecordedBatch(Record, frozen=True, kw_only=True):
    """The sizes of a batch's tensors, in positions of their axes.

    Attributes:
        length: The largest size along the axis of the length.
        target_length: The largest of the other sizes along that axis; None if all tensors have the same.
    """

    batch_size: Size
    length: Size
    target_length: Count | None

    def shape(self, start: TrainingStart) -> BatchShape:
        """Return the shape in the manifest's units, which the recording began with."""
        target_length = None
        if self.target_length is not None:
            target_length = self.target_length / start.target_per_unit
        return BatchShape(self.batch_size, self.length / start.per_unit, target_length)


class TrainingStep(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `training.jsonl`: one optimizer step, or the one that ran out of memory.

    Attributes:
        rank: As in the recording's first line.
        batches: What it trained on: several where gradients are accumulated. After an OOM the batches that were at
            hand, of which one was too large.
        seconds: From the end of the step before, so with the wait for data; None where something else came between.
        peak_bytes: Most memory in use meanwhile; None where unknown.
        warm_up: Whether it was the first of its process, whose time and memory include what is done only once.
        oom: The message of the out-of-memory error; None if the step passed.
    """

    rank: Count
    batches: list[RecordedBatch]
    seconds: StepSeconds | None
    peak_bytes: Bytes | None
    warm_up: bool = False
    oom: str | None = None

    @property
    def largest(self) -> RecordedBatch | None:
        """The batch with the largest padded length, which the peak is of; None without batches."""
        return max(
            self.batches,
            key=lambda batch: batch.batch_size * batch.length,
            default=None,
        )


class CutLine(Record, frozen=True, kw_only=True):
    """A line that was cut short: the process was killed, or the disk was full."""


TrainingLine = TrainingStart | TrainingStep | CutLine


def read_training(path: Path, *, after: int = 0) -> Iterator[TrainingLine]:
    """Yield the lines of `training.jsonl` after so many bytes, the first of them a start.

    Raises ResultError if the file can't be read, is too new, or a line is neither whole nor cut short.
    """
    hint = "Record the training again, or take the line out."
    try:
        with path.open("rb") as file:
            file.seek(after)
            for number, line in enumerate(
                iter(lambda: file.readline(_LONGEST_LINE), b""), 1
            ):
                place = f"{path}, line {number}"
                record = _line(line, place, hint)
                is_start = isinstance(record, TrainingStart)
                if number == 1 and not after and not is_start:
                    raise ResultError(f"{place}: not the start of a recording", hint)
                yield record
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror or error}") from error


def _line(line: bytes, place: str, hint: str) -> TrainingLine:
    """Return the record of a line. Raises ResultError if it is something else."""
    try:
        if line.startswith(_HEADER):
            check_meta(line, TrainingStart, place)
            return msgspec.json.decode(line, type=TrainingStart)
        return msgspec.json.decode(line, type=TrainingStep)
    except msgspec.ValidationError as error:
        raise ResultError(f"{place} is edited or damaged: {error}", hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return CutLine()


class Training(Record, frozen=True, kw_only=True):
    """The last recording of `training.jsonl`, and what the probe predicts of its batches.

    Steps, batches and examples are those of all ranks.

    Attributes:
        recordings: How many the file holds.
        steps: Optimizer steps that passed.
        ooms: Steps that ran out of memory.
        first_oom: The message of the first of them; None without one.
        cut_lines: Lines that were cut short, and are not counted.
        mean_step_seconds: Of the steps with a time, without the first of each process.
        predicted_step_seconds: The mean of the same steps, by the probe's times; None without them.
        time_ratio: Measured / predicted.
        peak_bytes: The largest of those steps; None if unknown.
        predicted_peak_bytes: The largest of its batches, by the probe's model; None without one.
        epoch_seconds: The time for as many examples as the data set has; None if that is not known.
        epoch_batches: Its batches for as many examples.
        padding_ratio: Padded cells / all cells, if its examples are on average as long as those of the data set.
        too_long: Whether its batches are much longer than any example, as where `per_unit` is wrong.
    """

    recordings: Size
    ranks: Size
    device: str
    steps: Count
    ooms: CostCount
    first_oom: str | None
    cut_lines: CostCount
    batches: Count
    examples: Count
    mean_step_seconds: Cost | None
    peak_bytes: CostBytes | None
    predicted_step_seconds: Amount | None = None
    time_ratio: CostRatio | None = None
    predicted_peak_bytes: Bytes | None = None
    epoch_seconds: Cost | None = None
    epoch_batches: Cost | None = None
    padding_ratio: CostShare | None = None
    too_long: bool = False
