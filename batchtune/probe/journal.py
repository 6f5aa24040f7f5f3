"""`trials.jsonl`: one line a trial, flushed as it happens, so that nothing measured is ever lost."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from batchtune.errors import ResultError
from batchtune.files import unwritable, write_whole
from batchtune.results import Trial


def read_trials(path: Path) -> list[Trial]:
    """The trials of a journal; none where there is no file.

    A last line that was cut short (the process was killed, the disk was full) is taken off: its trial is run again.

    Raises:
        ResultError: A line other than the last is no trial, or the file can't be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror or error}") from error
    lines = data.split(b"\n")
    cut = lines.pop()  # empty after a whole last line
    trials = []
    for number, line in enumerate(lines, 1):
        try:
            trial = msgspec.json.decode(line, type=Trial)
            if trial.index != number - 1 or trial.batch_size < 1 or not trial.length > 0:
                raise msgspec.ValidationError("index, batch_size or length can't be right here")
            trials.append(trial)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResultError(
                f"{path}, line {number}: no trial: {error}",
                "Start over with --force, or take the line out.",
            ) from error
    if cut:
        write_whole(path, b"".join(line + b"\n" for line in lines))
    return trials


def append_trial(path: Path, trial: Trial) -> None:
    """Adds a trial, on disk before this returns.

    Raises:
        ResultError: The file can't be written, on a full disk for example; its earlier lines stay.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as journal:
            journal.write(msgspec.json.encode(trial) + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
    except OSError as error:
        raise unwritable(path, error) from error
