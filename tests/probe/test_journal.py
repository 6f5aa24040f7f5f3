import os

import pytest
from made_trials import made_trial

from batchtune.errors import ResultError
from batchtune.results import BatchShape
from batchtune.run_folder import append_trial, read_trials

TRIALS = [made_trial(BatchShape(1, 2.5), index=index) for index in range(3)]


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "run" / "trials.jsonl"
    for trial in TRIALS:
        append_trial(path, trial)
    return path


@pytest.mark.parametrize("line", [b'{"index": 1, "batch_size": "many"}\n', b""])
def test_a_damaged_or_missing_line_in_the_middle_is_named(journal, line):
    first, _, last = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + line + last)
    with pytest.raises(ResultError, match="line 2"):
        read_trials(journal)


def test_a_full_disk_is_told_and_what_was_written_stays(journal, monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("batchtune.run_folder.open_to_append", lambda path: full)
    message = r"No space left on device.*\n.*run the same command again"
    with pytest.raises(ResultError, match=message):
        append_trial(journal, TRIALS[0])
    assert read_trials(journal) == TRIALS
