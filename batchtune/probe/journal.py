"""`trials.jsonl`: one line a trial, flushed as it happens, so that nothing measured is ever lost."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from batchtune.errors import ResultError
from batchtune.files import read_regular, unwritable, write_whole
from batchtune.results import LARGEST_BYTES, Trial

_START_OVER = "Start over with --force, or give another folder with --run."


def read_trials(path: Path) -> list[Trial]:
    """The trials of a journal; none where there is no file.

    A last line that was cut short (the process was killed, the disk was full) is taken off: its trial is run again.

    Raises:
        ResultError: A line other than the last is no trial, or the file can't be read.
    """
    if path.is_symlink():  # trials would be added to what it leads to
        raise ResultError(f"{path} is a link, and batchtune adds to no file outside the run folder", _START_OVER)
    if not path.exists():
        return []
    data = read_regular(path, LARGEST_BYTES, _START_OVER)
    lines = data.split(b"\n")
    cut = lines.pop()  # empty after a whole last line
    trials = []
    for number, line in enumerate(lines, 1):
        try:
            trial = msgspec.json.decode(line, type=Trial)
            for problem in trial.problems(number - 1):
                raise msgspec.ValidationError(problem)
            trials.append(trial)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ResultError(
                f"{path}, line {number}: no trial: {error}",
                "Start over with --force, or take the line out.",
            ) from error
    if cut:
        write_whole(path, b"".join(line + b"\n" for line in lines), follow=False)
    return trials


def append_trial(path: Path, trial: Trial) -> None:
    """Adds a trial, on disk before this returns.

    Raises:
        ResultError: The file can't be written, on a full disk for example; its earlier lines stay.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o666), "ab") as journal:
            journal.write(msgspec.json.encode(trial) + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
    except OSError as error:
        raise unwritable(path, error) from error
