"""`batchtune export` as a user runs it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cli.conftest import Run
from exports.stream_runs import made_stream
from report_records import made_sweep

from batchtune.exports import FRAMEWORKS, Tuned, export_of
from batchtune.exports.run_configs import render_sampler_yaml, sampler_config
from batchtune.results import SAMPLER_FILE, STREAM_FILE, SWEEP_FILE, write_result

TRAINING = """\
# my training
seed: 1234
dynamic_batch_sampler:
  max_batch_length: 100  # seconds
  num_buckets: 60
  shuffle: true
number_of_epochs: 10
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "batchtune-run"
    folder.mkdir()
    write_result(folder / SWEEP_FILE, made_sweep())
    (folder / SAMPLER_FILE).write_text(
        render_sampler_yaml(sampler_config(made_sweep())), encoding="utf-8"
    )
    return folder


def expected(framework: str, config: str = "batchtune-run/sampler.yaml") -> str:
    return export_of(framework).render(Tuned(sweep=made_sweep(), config=config))


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize(
    "output", [[], ["-o", "-"], ["-o", "x.yaml"]], ids=["stdout", "dash", "file"]
)
def test_as_json(batchtune: Run, tmp_path: Path, output: list[str]) -> None:
    ran = batchtune("export", "--to", "espnet", "--json", *output)
    document = json.loads(ran.stdout)
    assert list(document) == ["meta", "framework", "title", "file", "content"]
    assert (document["framework"], document["title"]) == ("espnet", "ESPnet")
    assert document["content"] == expected("espnet")
    assert document["file"] == (
        "x.yaml" if output == ["-o", "x.yaml"] else "batchtune_espnet.yaml"
    )
    assert (tmp_path / "x.yaml").exists() == (output == ["-o", "x.yaml"])


def test_the_frameworks_are_listed(batchtune: Run) -> None:
    lines = batchtune("export", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(FRAMEWORKS)
    assert [
        one["framework"]
        for one in json.loads(batchtune("export", "--list", "--json").stdout)
    ] == list(FRAMEWORKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name it with --to. Known frameworks: speechbrain,"),
        (["--to", "espnt"], "Did you mean 'espnet'?"),
        (["--to", "Lightning"], "Did you mean 'lightning'?"),
        (["--to", "keras"], "Known frameworks: speechbrain,"),
        (["--to", "nemo", "--patch", "x.yaml"], "--patch needs --to speechbrain"),
        (["--to", "speechbrain", "--key-path", "a.b"], "Add --patch FILE"),
    ],
)
@pytest.mark.usefixtures("run_folder")
def test_wrong_usage(batchtune: Run, arguments: list[str], message: str) -> None:
    ran = batchtune("export", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr


# --patch


@pytest.fixture
def training(run_folder: Path) -> Path:
    path = run_folder.parent / "train.yaml"
    path.write_text(TRAINING, encoding="utf-8")
    path.chmod(0o640)
    return path


def patched() -> str:
    from batchtune.exports.speechbrain import patch_speechbrain

    return patch_speechbrain(
        TRAINING, Tuned(sweep=made_sweep()), name="train.yaml"
    ).text


def test_a_training_file_is_patched_in_place(batchtune: Run, training: Path) -> None:
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert training.read_text(encoding="utf-8") == patched() != TRAINING
    assert stat.S_IMODE(training.stat().st_mode) == 0o640
    assert "--- train.yaml\n+++ train.yaml (tuned)\n@@" in ran.stderr
    assert "\n-  max_batch_length: 100" in ran.stderr
    assert sorted(path.name for path in training.parent.iterdir()) == [
        "batchtune-run",
        "train.yaml",
    ]


def test_patching_once_more_changes_nothing(batchtune: Run, training: Path) -> None:
    batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    before = training.stat()
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    assert (ran.returncode, ran.stderr) == (0, "train.yaml has these values already.\n")
    assert (training.stat().st_ino, training.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_the_patched_file_can_go_elsewhere(batchtune: Run, training: Path) -> None:
    ran = batchtune(
        "export", "--to", "speechbrain", "--patch", "train.yaml", "-o", "-", "--quiet"
    )
    assert (ran.stdout, ran.stderr) == (patched(), "")
    batchtune(
        "export", "--to", "speechbrain", "--patch", "train.yaml", "-o", "new.yaml"
    )
    assert (training.parent / "new.yaml").read_text(encoding="utf-8") == patched()
    assert training.read_text(encoding="utf-8") == TRAINING


@pytest.mark.usefixtures("run_folder", "training")
def test_a_patched_file_never_replaces_a_result(batchtune: Run, tmp_path: Path) -> None:
    result = tmp_path / "batchtune-run" / "sweep.json"
    before = result.read_bytes()
    ran = batchtune(
        "export", "--to", "speechbrain", "--patch", "train.yaml", "-o", result
    )
    assert ran.returncode == 2 and "is a file of a run folder" in ran.stderr
    assert result.read_bytes() == before


def test_a_file_that_can_not_be_patched_stays_as_it_is(
    batchtune: Run, training: Path
) -> None:
    missing = batchtune("export", "--to", "speechbrain", "--patch", "missing.yaml")
    assert missing.returncode == 1 and "missing.yaml does not exist" in missing.stderr
    training.write_bytes(b"\xff\xfe")
    damaged = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    assert damaged.returncode == 1 and "not UTF-8" in damaged.stderr
    assert training.read_bytes() == b"\xff\xfe"


@pytest.fixture
def stream_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "batchtune-run"
    folder.mkdir()
    write_result(folder / STREAM_FILE, made_stream())
    return folder


@pytest.mark.usefixtures("stream_folder")
def test_a_run_of_a_stream_is_exported(batchtune: Run) -> None:
    ran = batchtune("export", "--to", "webdataset")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == export_of("webdataset").render(Tuned(stream=made_stream()))
    listed = json.loads(batchtune("export", "--to", "nemo-tarred", "--json").stdout)
    assert (listed["title"], listed["file"]) == (
        "NeMo with tarred data",
        "tarred_train_ds.yaml",
    )
