"""The lines of `training.jsonl`, the steps of a real training, and what reports say about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec

from batchtune.errors import ResultError
from batchtune.files import read_regular
from batchtune.results.shared import (
    MALFORMED,
    Amount,
    BatchShape,
    Bytes,
    Cost,
    CostBytes,
    CostCount,
    CostShare,
    Count,
    Record,
    Result,
    StepSeconds,
    check_meta,
)

_START = b'{"meta":'
_MOST_BYTES = 1 << 34


class TrainingStart(Result, frozen=True, kw_only=True):
    """The line that begins a recording in `training.jsonl`, written by rank 0."""

    FORMAT: ClassVar[str] = "batchtune/training"

    device: str


class TrainingStep(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `training.jsonl`: one optimizer step, or the one that ran out of memory.

    Attributes:
        rank: Of the process, from 0.
        batches: What it trained on: several where gradients are accumulated. After an OOM the batches that were at
            hand, of which one was too large.
        seconds: From the end of the step before, so with the wait for data; None where something else came between,
            and for the first step of a process, which includes what is done only once.
        peak_bytes: Most memory in use meanwhile; None where unknown, and for the first step.
        oom: The message of the out-of-memory error; None if the step passed.
    """

    rank: Count
    batches: list[BatchShape]
    seconds: StepSeconds | None = None
    peak_bytes: Bytes | None = None
    oom: str | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """One training of `training.jsonl`, of all ranks."""

    start: TrainingStart
    steps: list[TrainingStep] = field(default_factory=list)


def read_training(path: Path) -> list[Recording]:
    """Return the recordings of `training.jsonl`, oldest first, at least one.

    Raises ResultError if the file can't be read, is too new, or a line is damaged.
    """
    if not path.exists():
        raise ResultError(
            f"{path} does not exist", "`batchtune record -- COMMAND` writes it."
        )
    hint = "Record the training again, or take the line out."
    recordings: list[Recording] = []
    lines = read_regular(path, _MOST_BYTES, hint).splitlines()
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        try:
            if line.startswith(_START):
                check_meta(line, TrainingStart, place)
                start = msgspec.json.decode(line, type=TrainingStart)
                recordings.append(Recording(start))
            elif line and recordings:
                step = msgspec.json.decode(line, type=TrainingStep)
                recordings[-1].steps.append(step)
        except MALFORMED as error:
            is_cut_short = number == len(lines) and not line.endswith(b"}")
            if recordings and is_cut_short:  # written when the power or the disk ended
                break
            raise ResultError(
                f"{place} is edited, damaged or cut short: {error}", hint
            ) from error
    if not recordings:
        raise ResultError(f"{path} holds no start of a recording", hint)
    return recordings


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
        padding_ratio: Padded cells / all cells, if its examples are on average as long as those of the data set.
    """

    device: str
    steps: Count
    ooms: CostCount
    first_oom: str | None
    mean_step_seconds: Cost | None = None
    peak_bytes: CostBytes | None = None
    predicted_step_seconds: Amount | None = None
    predicted_peak_bytes: Bytes | None = None
    epoch_batches: Cost | None = None
    padding_ratio: CostShare | None = None
