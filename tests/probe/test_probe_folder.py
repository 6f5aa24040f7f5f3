"""The whole probe on a made device: its run folder, how it goes on in it, and what ends it with a message."""

import os
import shutil

import pytest
from made_trials import made_trial, ran
from memory_laws import Law, LawDevice, probe_on, warns
from msgspec.structs import replace

from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    TRIALS_FILE,
    BatchShape,
    Probe,
    read_result,
)
from batchtune.run_folder import append_trial, read_trials

LENGTHS = Lengths.of([5.0, 10.0, 20.0] * 12)
PADDED = Law(lambda size, length, target: size * length)
SETTINGS = ProbeSettings(workload="train.py:Mine", options={}, num_lengths=3)


def probed(device, folder, settings=SETTINGS, **how):
    return probe_on(device, folder, settings, **how)


def padded(fitting=7.0, lengths=LENGTHS):
    return LawDevice(PADDED, lengths, fitting=fitting)


@pytest.fixture
def run(tmp_path):
    """The folder of a finished probe."""
    probed(padded(), tmp_path / "run")
    return tmp_path / "run"


def test_killed_after_any_trial_it_goes_on_as_if_it_had_not_been(run, tmp_path):
    """With each number of whole lines, and half of the next one: no trial is run twice, and the answer is the same."""
    lines = (run / TRIALS_FILE).read_bytes().splitlines(keepends=True)
    expected = read_result(run / PROBE_FILE, Probe)
    assert len(lines) > 4
    for kept in range(len(lines) + 1):
        begun = b"".join(lines[:kept])
        cut_short = b"".join(line[:40] for line in lines[kept : kept + 1])
        folder = tmp_path / str(kept)
        folder.mkdir()
        shutil.copy(run / RUN_FILE, folder)
        (folder / TRIALS_FILE).write_bytes(begun + cut_short)
        notes = []
        probe = probed(padded(), folder, on_note=notes.append)
        assert ("was cut short" in str(notes)) == bool(cut_short)
        trials = read_trials(folder / TRIALS_FILE)
        shapes = [trial.shape for trial in trials]
        assert shapes == [trial.shape for trial in expected.trials]
        assert (folder / TRIALS_FILE).read_bytes().startswith(begun)
        assert probe.frontier == expected.frontier


@pytest.mark.parametrize(
    ("lengths", "changed", "message"),
    [
        (Lengths.of([5.0, 10.0]), {}, "other lengths"),
        (LENGTHS, {"memory_bytes": 500 << 20}, "something else: memory_bytes"),
    ],
)
def test_a_folder_of_something_else_is_left_alone_unless_forced(
    run, lengths, changed, message
):
    other = replace(SETTINGS, **changed)
    before = (run / PROBE_FILE).read_bytes()
    with pytest.raises(ResultError, match=message):
        probed(padded(lengths=lengths), run, other)
    assert (run / PROBE_FILE).read_bytes() == before
    forced = probed(padded(lengths=lengths), run, other, force=True)
    assert forced.lengths == lengths.summary()


def test_a_folder_in_which_nothing_fitted_binds_to_nothing(tmp_path):
    with pytest.raises(ProbeError, match="even a batch of one of the shortest example"):
        probed(padded(fitting=0.1), tmp_path)
    assert not (tmp_path / PROBE_FILE).exists()
    probe = probed(padded(), tmp_path, replace(SETTINGS, workload="train.py:Other"))
    assert probe.workload.spec == "train.py:Other"
    assert probe.trials[0].index == 0


def test_examples_that_are_too_long_are_counted_and_told_before(tmp_path):
    notes = []
    said = []
    message = r"12 of 36 examples exceed 10.*\n.*--max-length 10\.0"
    with pytest.raises(ProbeError, match=message):
        probed(
            padded(fitting=0.7),
            tmp_path,
            on_note=notes.append,
            on_progress=said.append,
        )
    assert [note.split(",")[0] for note in notes] == [
        "Warning: the longest example (20) does not fit within 7.45 GiB"
    ]
    left = [progress.seconds_left for progress in said if progress.shortening]
    assert left[-1] == 0
    assert not (tmp_path / PROBE_FILE).exists()


# As cuBLAS does, both for a lack of memory and for a bug.
DISGUISED = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"
CAUGHT = "caught by the workload, whose step still returned: RuntimeError"


def failing(
    lengths,
    outcome,
    error,
    *,
    above=0,
    caught=False,
):
    """A device that fails with batches of more examples than `above`."""

    def fault(shape, run):
        if shape.batch_size <= above:
            return None
        return replace(ran(shape, outcome, error=error, caught=caught), renew=True)

    device = padded(lengths=Lengths.of(lengths), fitting=24.0)
    device.fault = fault
    return device


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ("crash", "the worker process was killed by SIGSEGV"),
        ("timeout", "no answer within 1 s"),
        ("oom", DISGUISED),
    ],
)
def test_what_fails_with_any_batch_is_the_workloads_own(tmp_path, outcome, error):
    message = rf"{error}.*\n.*did not run out of memory"
    with pytest.raises(WorkloadError, match=message):
        probed(failing([1.0, 2.0], outcome, error), tmp_path)
    assert not (tmp_path / PROBE_FILE).exists()


@pytest.mark.parametrize(("error", "caught"), [(DISGUISED, False), (CAUGHT, True)])
def test_an_oom_counts_in_disguise_and_if_it_is_caught(tmp_path, error, caught):
    device = failing([1.0] * 30, "oom", error, above=4, caught=caught)
    probe = probed(device, tmp_path)
    (point,) = probe.frontier
    assert (point.batch_size, point.closed_by) == (4, "oom")
    catches = "The workload catches out-of-memory errors itself: in "
    assert warns(probe, catches) == caught


# Its journal of trials


TRIALS = [made_trial(BatchShape(1, 2.5), index=index) for index in range(3)]


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / TRIALS_FILE
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
