"""The main job from end to end, as a process."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from cli.conftest import FAULTY, KNOWN, Run, command, run_here_in, write_manifest
from made_once import MadeOnce

from batchtune import sampler_from_config
from batchtune.exports.run_configs import read_sampler_yaml
from batchtune.results import Probe, read_result

MIB = 1 << 20
# One example of 20 s takes 52 MiB, of 10 s 18, of 5 s 7.
WORKLOAD = ["--workload", KNOWN, "--set", f"a={MIB}", "--set", f"b={0.08 * MIB}", "--device", "cpu"]
MEMORY = ["--memory", "460MiB"]


@pytest.fixture(scope="session")
def tuned(made_once: MadeOnce) -> Path:
    """A folder with the manifest, what a tune left in batchtune-run, and what it said; not to be written to."""

    def make(folder: Path) -> None:
        write_manifest(folder / "lengths.csv")
        ran = run_here_in(folder, "tune", "lengths.csv", *WORKLOAD, *MEMORY)
        assert ran.returncode == 0, ran.stderr
        (folder / "stdout").write_text(ran.stdout)
        (folder / "stderr").write_text(ran.stderr)

    return made_once("tuned", make)


@pytest.fixture
def run(tuned: Path, tmp_path: Path, manifest: Path) -> Path:
    """A copy of its run folder, in the folder where `batchtune` runs."""
    shutil.copytree(tuned / "batchtune-run", tmp_path / "batchtune-run")
    return tmp_path / "batchtune-run"


def test_tune_makes_a_config_that_a_dataloader_runs(tuned: Path) -> None:
    run = tuned / "batchtune-run"
    assert {path.name for path in run.iterdir()} == {
        "run.json",
        "trials.jsonl",
        "probe.json",
        "sweep.json",
        "sampler.yaml",
    }
    sweep = json.loads((run / "sweep.json").read_text())
    lengths = [(5.0, 10.0, 20.0)[number % 3] for number in range(36)]
    loader = torch.utils.data.DataLoader(lengths, batch_sampler=sampler_from_config(run / "sampler.yaml", lengths))  # type: ignore[arg-type]
    batches = [batch.tolist() for batch in loader]
    evidence = read_sampler_yaml(run / "sampler.yaml").evidence
    assert len(batches) == sweep["rows"][sweep["recommended"]]["batches"] == evidence.batches
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)
    frontier = {
        point["length"]: point["batch_size"] for point in json.loads((run / "probe.json").read_text())["frontier"]
    }
    assert all(len(batch) <= frontier[max(batch)] for batch in batches)


@pytest.mark.slow
def test_reused_trials_and_a_changed_workload_are_reported(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    workload = tmp_path / "mine.py"
    workload.write_text(Path(KNOWN.rpartition(":")[0]).read_text())
    arguments = ["probe-oom", manifest, "--workload", "mine.py:Known", *WORKLOAD[2:], *MEMORY]
    assert "are reused" not in batchtune(*arguments).stderr
    workload.write_text(workload.read_text() + "# edited\n")
    again = batchtune(*arguments).stderr
    assert "Warning: mine.py has changed since this run began" in again
    assert "mine.py has changed" in json.loads((tmp_path / "batchtune-run" / "probe.json").read_text())["warnings"][0]


def test_the_ending_of_the_file_tells_the_reports_format(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60).returncode == 0
    assert batchtune("report", "-o", "report.html").returncode == 0
    assert (tmp_path / "report.html").read_text().lower().startswith("<!doctype html")


@pytest.mark.slow
def test_a_run_is_continued_and_quiet_says_nothing(batchtune: Run, manifest: Path, run: Path) -> None:
    told = batchtune("tune", manifest, *WORKLOAD, *MEMORY).stderr
    assert "of an earlier run" in told
    assert "has changed" not in told
    ran = batchtune("tune", manifest, *WORKLOAD, *MEMORY, "--quiet")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_without_a_terminal_there_is_no_bar_and_no_colour(tuned: Path) -> None:
    stdout, stderr = (tuned / "stdout").read_text(), (tuned / "stderr").read_text()
    assert "\x1b" not in stdout + stderr
    assert "\r" not in stderr


@pytest.mark.slow
def test_the_steps_one_by_one_give_the_same_as_tune(
    batchtune: Run, manifest: Path, tmp_path: Path, tuned: Path
) -> None:
    (tmp_path / "steps").mkdir()
    for name in ("run.json", "trials.jsonl"):
        shutil.copy(tuned / "batchtune-run" / name, tmp_path / "steps")
    assert batchtune("probe-oom", manifest, *WORKLOAD, *MEMORY, "--run", "steps").returncode == 0
    # The confirmation ran anew, and its peaks are measurements too: the margin may be a little different.
    assert frontier(tmp_path / "steps") == frontier(tuned / "batchtune-run")
    shutil.copy(tuned / "batchtune-run" / "probe.json", tmp_path / "steps")
    assert batchtune("probe-oom", manifest, *WORKLOAD, *MEMORY, "--run", "steps").returncode == 0
    assert batchtune("sweep-buckets", manifest, "--run", "steps").returncode == 0
    for name in ("probe.json", "sweep.json", "sampler.yaml", "trials.jsonl"):
        assert (tmp_path / "steps" / name).read_bytes() == (tuned / "batchtune-run" / name).read_bytes()


def test_interrupted_and_started_again_it_repeats_no_trial(
    batchtune: Run, manifest: Path, tmp_path: Path, tuned: Path
) -> None:
    arguments = ["probe-oom", manifest, *WORKLOAD, *MEMORY, "--run", "cut"]
    process = subprocess.Popen(command(*arguments), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "cut" / "trials.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.02)  # polls another process; nothing depends on how long
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in stderr
    probe_file = tmp_path / "cut" / "probe.json"
    assert not probe_file.exists() or read_result(probe_file, Probe).unfinished
    before = journal.read_bytes()

    assert batchtune(*arguments).returncode == 0
    assert journal.read_bytes().startswith(before)
    assert shapes(journal) == shapes(tuned / "batchtune-run" / "trials.jsonl")
    assert frontier(tmp_path / "cut") == frontier(tuned / "batchtune-run")


def test_terminated_it_leaves_no_child_of_the_workload(manifest: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("probe-oom", manifest, "--workload", f"{FAULTY}:ForksAndHangs", "--device", "cpu", "--memory", "1GiB"),
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    child = tmp_path / "child"
    while not child.exists() or not child.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    deadline = time.monotonic() + 10
    while alive(int(child.read_text())):
        assert time.monotonic() < deadline, "a child of the workload outlives the probe"
        time.sleep(0.02)


def test_a_second_probe_in_the_same_folder_is_refused(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    arguments = ["probe-oom", manifest, "--workload", f"{FAULTY}:Hangs", "--device", "cpu", "--memory", "1GiB"]
    process = subprocess.Popen(command(*arguments), cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (tmp_path / "batchtune-run" / "run.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    before = {path.name: path.read_bytes() for path in (tmp_path / "batchtune-run").iterdir()}
    ran = batchtune(*arguments)
    after = {path.name: path.read_bytes() for path in (tmp_path / "batchtune-run").iterdir()}
    process.send_signal(signal.SIGINT)
    process.wait()
    assert ran.returncode == 1
    assert "another batchtune is at work" in ran.stderr
    assert before == after


def test_a_workload_that_cant_be_built_costs_no_earlier_run(batchtune: Run, manifest: Path, run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert batchtune("tune", manifest, "--workload", f"{FAULTY}:RaisesInSetup", "--force").returncode == 1
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def shapes(journal: Path) -> list[tuple[int, float]]:
    return [(trial["batch_size"], trial["length"]) for trial in map(json.loads, journal.read_text().splitlines())]


def frontier(run: Path) -> list[tuple[float, int, str]]:
    points = json.loads((run / "probe.json").read_text())["frontier"]
    return [(point["length"], point["batch_size"], point["closed_by"]) for point in points]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
