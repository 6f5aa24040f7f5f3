from pathlib import Path

import pytest
from probe.made_device import MadeDevice, quadratic_peak

from batchtune.errors import ResultError
from batchtune.probe.journal import append_trial, read_trials
from batchtune.shapes import BatchShape

TRIALS = [MadeDevice(quadratic_peak(), 10**12).measure(BatchShape(size, 2.5), size - 1) for size in (1, 2, 3)]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "trials.jsonl"
    for trial in TRIALS:
        append_trial(path, trial)
    return path


def test_trials_come_back_as_they_were(journal: Path) -> None:
    assert read_trials(journal) == TRIALS


def test_no_journal_is_no_trials(tmp_path: Path) -> None:
    assert read_trials(tmp_path / "trials.jsonl") == []


def test_a_last_line_that_was_cut_is_taken_off_wherever_it_was_cut(journal: Path) -> None:
    whole = journal.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        journal.write_bytes(whole[:end])
        assert read_trials(journal) == TRIALS[:2]
        append_trial(journal, TRIALS[2])
        assert journal.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_named(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b'{"index": 1, "batch_size": "many"}\n' + lines[2])
    with pytest.raises(ResultError, match="line 2"):
        read_trials(journal)


def test_a_line_that_was_taken_out_is_noticed(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[2])
    with pytest.raises(ResultError, match="line 2"):
        read_trials(journal)


def test_a_full_disk_is_told_and_what_was_written_stays(journal: Path) -> None:
    with pytest.raises(ResultError, match="No space left on device"):
        append_trial(Path("/dev/full"), TRIALS[0])
