"""The main job from end to end, on a device made by a law; once on a real one, and as a process."""

import contextlib
import shutil
import signal
import subprocess
import time

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from cli.conftest import (
    FAULTY,
    LAW,
    WORKLOAD,
    command,
    contents,
    flat,
    interrupted_at,
    result_in,
    run_here_in,
    write_manifest,
)

from batchtune import sampler_from_config
from batchtune.results import Probe, read_result
from batchtune.run_folder import alone_in


@pytest.fixture(scope="session")
def tuned(made_once):
    """A folder with the manifest, and what a tune left in batchtune-run; not to be written to."""

    def make(folder):
        write_manifest(folder / "lengths.csv")
        run_here_in(folder, "tune", "lengths.csv", "--device", LAW, code=0)

    return made_once("tuned", make)


@pytest.fixture
def run(tuned, tmp_path, manifest):
    """A copy of its run folder, in the folder where `batchtune` runs."""
    shutil.copytree(tuned / "batchtune-run", tmp_path / "batchtune-run")
    return tmp_path / "batchtune-run"


@pytest.mark.process
def test_tune_makes_a_config_that_a_dataloader_runs(succeed, manifest, tmp_path):
    import torch

    succeed("tune", manifest, *WORKLOAD)
    run = tmp_path / "batchtune-run"
    files = {"run.json", "trials.jsonl", "probe.json", "sweep.json", "sampler.yaml"}
    assert set(contents(run)) == files
    sweep = result_in(tmp_path)
    config = run / "sampler.yaml"
    lengths = [5.0, 10.0, 20.0] * 12
    sampler = sampler_from_config(config, lengths)
    loader = torch.utils.data.DataLoader(lengths, batch_sampler=sampler)
    batches = [batch.tolist() for batch in loader]
    assert len(batches) == sweep["rows"][sweep["recommended"]]["batches"]
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)
    points = result_in(tmp_path, "probe")["frontier"]
    frontier = {point["length"]: point["batch_size"] for point in points}
    assert all(len(batch) <= frontier[max(batch)] for batch in batches)


def test_interrupted_and_started_again_it_repeats_no_trial(
    batchtune, succeed, manifest, tmp_path, tuned, plan
):
    arguments = ["probe-oom", manifest, "--device", LAW, "--run", "cut"]
    journal = tmp_path / "cut" / "trials.jsonl"
    plan(interrupted_at(0))
    assert batchtune(*arguments, code=130).stderr.endswith("Interrupted.\n")
    plan(interrupted_at(3))
    ran = batchtune(*arguments, code=130)
    assert "Interrupted. All measurements are kept" in ran.stderr
    assert read_result(tmp_path / "cut" / "probe.json", Probe).unfinished
    before = journal.read_bytes()
    assert before.count(b"\n") == 3

    plan(lambda shape, run: None)
    succeed(*arguments)
    assert journal.read_bytes().startswith(before)
    cut = read_result(tmp_path / "cut" / "probe.json", Probe)
    whole = read_result(tuned / "batchtune-run" / "probe.json", Probe)
    for one, other in zip(cut.trials, whole.trials, strict=True):
        assert one.shape == other.shape
    assert cut.frontier == whole.frontier


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_it_leaves_no_child_of_the_workload(number, manifest, tmp_path):
    hangs = ("--workload", f"{FAULTY}:ForksAndHangs", "--device", "cpu")
    process = subprocess.Popen(
        command("probe-oom", manifest, *hangs, "--memory", "1GiB"),
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        # Where tests run under nohup, it would be ignored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    child = tmp_path / "child"
    while not child.exists() or not child.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=30) == 130
    deadline = time.monotonic() + 10
    while alive(int(child.read_text())):
        assert time.monotonic() < deadline, "a child of the workload outlives the probe"
        time.sleep(0.02)


def test_a_line_of_the_journal_that_was_cut_short_is_reported(batchtune, run):
    with (run / "trials.jsonl").open("a") as journal:
        journal.write('{"index')
    said = flat(batchtune("report", "--full").stdout)
    assert "! The report leaves out 1 line of trials.jsonl, after line " in said


def test_a_second_probe_in_the_same_folder_is_refused(batchtune, manifest, run):
    before = contents(run)
    with alone_in(run):
        ran = batchtune("probe-oom", manifest, "--device", LAW, "--force", code=1)
    assert "another batchtune is at work" in ran.stderr
    assert contents(run) == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--keep", "same"], "the examples and steps of your training are not known"),
        (["--strategy", "packed"], "--strategy packed needs a token budget"),
        (["--verify-steps", 9], "how many steps --verify runs, which is not given"),
    ],
)
def test_what_the_sweep_would_refuse_costs_no_trial(
    batchtune, manifest, tmp_path, options, why
):
    ran = batchtune("tune", manifest, "--device", LAW, *options, code=2)
    assert why in ran.stderr
    assert not list(tmp_path.glob("**/trials.jsonl"))


def test_a_workload_that_cant_be_built_costs_no_earlier_run(batchtune, manifest, run):
    before = contents(run)
    too_large = LAW.replace("constant=100MiB", "constant=500MiB")
    ran = batchtune("tune", manifest, "--device", too_large, "--force", code=1)
    why = "the memory limit is too small: the workload ran out of it in its setup"
    assert why in ran.stderr
    assert contents(run) == before


def alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def test_lengths_that_were_kept_of_a_script_are_named(batchtune, tmp_path):
    run = tmp_path / "batchtune-run"
    run.mkdir()
    table = pyarrow.table({"length": [3, 2, 1]})
    pyarrow.parquet.write_table(table, run / "lengths.parquet")
    # It ends before the program is started.
    ran = batchtune("probe-oom", "--num-lengths", 1, "--", "true", code=2)
    assert "as an earlier run kept them in batchtune-run/lengths.parquet" in ran.stderr
