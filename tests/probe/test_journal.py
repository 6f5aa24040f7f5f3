import os

import msgspec
import pytest
from probe.made_device import SearchedDevice, quadratic_peak

from batchtune.errors import ResultError
from batchtune.results import BatchShape
from batchtune.run_folder import append_trial, read_trials

TRIALS = [
    SearchedDevice(quadratic_peak(), 10**12).trial(BatchShape(size, 2.5), size - 1)
    for size in (1, 2, 3)
]


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "run" / "trials.jsonl"
    for trial in TRIALS:
        append_trial(path, trial)
    return path


def test_a_cut_journal_continues_after_its_whole_lines(tmp_path):
    # Letters of several bytes: a cut may go through one.
    told = msgspec.structs.replace(
        TRIALS[1], outcome="oom", error="mémoire épuisée · 記憶體不足"
    )
    trials = [TRIALS[0], told]
    path = tmp_path / "trials.jsonl"
    for trial in trials:
        append_trial(path, trial)
    whole = path.read_bytes()
    for end in range(0, len(whole) + 1, 5):  # also within letters of 2 and 3 bytes
        path.unlink()  # to overwrite a file waits for the disk
        path.write_bytes(whole[:end])
        kept = read_trials(path, print)
        assert kept == trials[: whole[:end].count(b"\n")]
        for trial in trials[len(kept) :]:
            append_trial(path, trial)
        assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_named(journal):
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b'{"index": 1, "batch_size": "many"}\n' + lines[2])
    with pytest.raises(ResultError, match="line 2"):
        read_trials(journal)


def test_a_line_that_was_taken_out_is_noticed(journal):
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[2])
    with pytest.raises(ResultError, match="line 2"):
        read_trials(journal)


def test_a_full_disk_is_told_and_what_was_written_stays(journal, monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("batchtune.run_folder.open_to_append", lambda path: full)
    with pytest.raises(ResultError, match="No space left on device") as caught:
        append_trial(journal, TRIALS[0])
    assert "run the same command again" in caught.value.hint
    assert read_trials(journal) == TRIALS
