"""A run folder from a stranger: nothing in it leads out of it, and nothing is read without end."""

import os

import pytest

from batchtune.errors import ResultError
from batchtune.results import BatchShape, Probe, Trial, read_result
from batchtune.run_folder import append_trial, read_trials

SWEEP = ["--max-batch-length", 60, "--num-buckets", 2, "--quiet"]


@pytest.fixture
def outside(tmp_path):
    """A file of the user's own."""
    path = tmp_path / "own"
    path.write_text("mine\n")
    return path


@pytest.mark.parametrize("name", ["sweep.json", "sampler.yaml"])
def test_what_is_written_takes_the_place_of_a_link(succeed, manifest, outside, name):
    run = outside.parent / "run"
    succeed("sweep-buckets", manifest, "--run", run, *SWEEP)
    (run / name).replace(outside)  # a link to a sound file: nothing else is wrong
    (run / name).symlink_to(outside)
    before = outside.read_bytes()
    succeed("sweep-buckets", manifest, "--run", run, *SWEEP, "--seed", 5)
    assert not (run / name).is_symlink()
    assert outside.read_bytes() == before != (run / name).read_bytes()


def test_no_trial_is_added_to_what_a_link_leads_to(tmp_path, outside):
    journal = tmp_path / "trials.jsonl"
    journal.symlink_to(outside)
    with pytest.raises(ResultError, match="is a link"):
        read_trials(journal)
    with pytest.raises(ResultError, match="can't be written"):
        append_trial(journal, Trial.of(BatchShape(1, 1.0), "oom"))
    assert outside.read_text() == "mine\n"


def test_a_pipe_a_device_and_a_huge_file_are_refused(tmp_path):
    names = ("pipe", "device", "huge")
    pipe, device, huge = (tmp_path / name for name in names)
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    huge.touch()
    os.truncate(huge, 1 << 40)
    for path, why in (
        (pipe, "not an ordinary file"),
        (device, "not an ordinary file"),
        (huge, "larger than 256 MiB"),
    ):
        with pytest.raises(ResultError, match=why):
            read_result(path, Probe)


def test_what_nests_without_end_is_one_message(tmp_path):
    path = tmp_path / "probe.json"
    meta = '{"format": "batchtune/probe", "version": 1, "batchtune": "1"}'
    path.write_text(f'{{"meta": {meta}, "x": ' + "[" * 10**5)
    with pytest.raises(ResultError, match=r"damaged: .*\nRemove it.* `batchtune tune`"):
        read_result(path, Probe)


def test_a_pipe_as_target_file_of_a_run_is_refused(
    batchtune, succeed, manifest, tmp_path
):
    targets = tmp_path / "targets"
    targets.write_text("1\n2\n3\n" * 12)
    given = ["--target-file", "targets", "--measure", "words"]
    succeed("sweep-buckets", manifest, *SWEEP, *given)
    targets.unlink()
    os.mkfifo(targets)
    ran = batchtune("report", "--manifest", manifest, code=1)
    assert "targets is not an ordinary file" in ran.stderr


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A run folder in which nothing can be written."""
    run = tmp_path / "batchtune-run"
    run.mkdir()
    run.chmod(0o500)
    if os.geteuid() == 0:  # root may write all the same
        monkeypatch.setattr(
            os, "access", lambda path, mode: path.name != run.name or not mode & os.W_OK
        )
    return run


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "absent.csv", "--workload", "absent.py:Step"),
        ("tune-loader", "absent.py:make"),
    ],
)
def test_a_read_only_run_folder_is_named_before_any_work(batchtune, read_only, command):
    why = "batchtune-run can't be written to: the folder, or its disk, is read-only"
    assert why in batchtune(*command, code=1).stderr
