"""The lines of `training.jsonl`, the steps of a real training, and what reports say about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

import msgspec

from batchtune.errors import ResultError
from batchtune.files import reading
from batchtune.records import (
    Amount,
    Bytes,
    Cost,
    CostBytes,
    CostCount,
    CostShare,
    Count,
    Record,
    StepSeconds,
)
from batchtune.results.shared import MALFORMED, BatchShape, Result, check_meta
from batchtune.units import format_size

_START = b'{"meta":'
_MOST_BYTES = 1 << 34
# A packed step has the lengths of all its sequences.
_LONGEST_LINE_BYTES = 16 << 20
_HINT = "Move it away, and record the training again."


class TrainingStart(Result, frozen=True, kw_only=True):
    """The line that begins a recording in `training.jsonl`, written by rank 0.

    Attributes:
        recording: Its name: the same in all lines of one training, and different in those of others.
        tuned: Whether batchtune made its batches (`batchtune run`).
    """

    FORMAT: ClassVar[str] = "batchtune/training"

    device: str
    recording: str = ""
    tuned: bool = False


class TrainingStep(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `training.jsonl`: one optimizer step, or the one that ran out of memory.

    Attributes:
        rank: Of the process, from 0.
        recording: As in the line that begins the recording.
        batches: What it trained on: several where gradients are accumulated. After an OOM the batches that were at
            hand, one of which was too large.
        seconds: Since the end of the step before, including the wait for data; None where something else came between,
            and for the first step of a process, which includes one-time work.
        peak_bytes: Most memory in use meanwhile; None where unknown, and for the first step.
        oom: The message of the out-of-memory error; None if the step passed.
        refused: `batchtune run` ended the training here: the steps of its recording do not count.
    """

    rank: Count
    batches: list[BatchShape]
    recording: str = ""
    seconds: StepSeconds | None = None
    peak_bytes: Bytes | None = None
    oom: str | None = None
    refused: bool = False


@dataclass(slots=True)
class Recording:
    """One training of `training.jsonl`, of all ranks; `damaged_lines` came between its start and the next one's."""

    start: TrainingStart
    steps: list[TrainingStep] = field(default_factory=list)
    damaged_lines: int = 0


def read_training(path: Path) -> list[Recording]:
    """Return the recordings of `training.jsonl`, oldest first, at least one.

    Damaged lines, and those without a start, are left out and counted. Raises ResultError if the file can't be read,
    or is too new.
    """
    if not path.exists():
        raise ResultError(
            f"{path} does not exist", "`batchtune record -- COMMAND` writes it."
        )
    recordings: list[Recording] = []
    current: dict[str, Recording] = {}
    # Of ranks that were faster than the one that writes the start.
    early: dict[str, list[TrainingStep]] = {}
    with reading(path, _MOST_BYTES, _HINT) as file:
        for number, line in enumerate(_lines(file, path), 1):
            try:
                if line.startswith(_START):
                    check_meta(line, TrainingStart, f"{path}, line {number}")
                    start = msgspec.json.decode(line, type=TrainingStart)
                    recording = Recording(start, early.pop(start.recording, []))
                    recordings.append(recording)
                    current[start.recording] = recording
                    continue
                step = msgspec.json.decode(line, type=TrainingStep)
            except MALFORMED:  # written when the power or the disk ended
                if recordings:
                    recordings[-1].damaged_lines += 1
                continue
            if step.recording in current:
                steps = current[step.recording].steps
                steps.append(step)
                if step.refused:
                    steps.clear()
            else:
                early.setdefault(step.recording, []).append(step)
    if not recordings:
        raise ResultError(f"{path} holds no start of a recording", _HINT)
    recordings[-1].damaged_lines += sum(map(len, early.values()))
    return recordings


def last_recording(path: Path) -> Recording:
    """Return the last recording of `training.jsonl` with steps, or the last of all. Raises as `read_training`."""
    recordings = read_training(path)
    with_steps = [recording for recording in recordings if recording.steps]
    return (with_steps or recordings)[-1]


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not empty. Raises ResultError for one that no recorder has written."""
    while line := file.readline(_LONGEST_LINE_BYTES):
        if len(line) == _LONGEST_LINE_BYTES:
            raise ResultError(
                f"{path} has a line of more than {format_size(_LONGEST_LINE_BYTES)}: batchtune writes no such line",
                _HINT,
            )
        line = line.strip()
        if line:
            yield line


class Training(Record, frozen=True, kw_only=True):
    """The last recording of `training.jsonl`, and what the probe predicts of its batches.

    Steps are those of all ranks.

    Attributes:
        steps: Optimizer steps that passed.
        ooms: Steps that ran out of memory.
        first_oom: The message of the first of them; None without one.
        mean_step_seconds: Of the steps with a time.
        predicted_step_seconds: The mean of the same steps, by the probe's times; None without them.
        peak_bytes: The largest; None if unknown.
        predicted_peak_bytes: The largest of its batches, by the probe's model; None without one.
        epoch_batches: Its batches for as many examples as the data set has; None if that is not known.
        damaged_lines: How many damaged lines are left out.
        padding_ratio: Padded cells / all cells, assuming that its examples are on average as long as those of the data
            set.
    """

    device: str
    steps: Count
    ooms: CostCount
    first_oom: str | None
    damaged_lines: Count = 0
    mean_step_seconds: Cost | None = None
    peak_bytes: CostBytes | None = None
    predicted_step_seconds: Amount | None = None
    predicted_peak_bytes: Bytes | None = None
    epoch_batches: Cost | None = None
    padding_ratio: CostShare | None = None
