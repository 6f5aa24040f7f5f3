"""`batchtune verify --stream`, on a device made by a law."""

import json
import shutil

import pytest
from cli.conftest import flat, run_here_in

from batchtune.configs import read_stream_yaml

STEPS = ["--steps", 14]


@pytest.fixture(scope="session")
def swept(verified, made_once):
    """The folder of `verified`, with a sweep of its stream in the run folder."""

    def make(folder):
        shutil.copytree(verified, folder, dirs_exist_ok=True)
        options = [
            "--shard-size",
            50,
            "--workers",
            2,
            "--buffer-size",
            32,
            "--num-buckets",
            2,
            "--json",
        ]
        ran = run_here_in(folder, "sweep-stream", "lengths.csv", *options)
        assert ran.returncode == 0, ran.stderr

    return made_once("swept-stream-cli", make)


@pytest.fixture
def run(swept, tmp_path):
    """A copy of its run folder, in the folder where `batchtune` runs."""
    shutil.copytree(swept, tmp_path, dirs_exist_ok=True)
    (tmp_path / "batchtune-run" / "verify.json").unlink()
    return tmp_path / "batchtune-run"


def test_a_stream_alone_needs_no_option(succeed, run):
    (run / "sampler.yaml").unlink()
    ran = succeed("verify", "lengths.csv", *STEPS)
    assert (
        "Verifying batchtune-run/stream.yaml, as the folder holds no sampler.yaml."
        in ran.stderr
    )
    assert "Verified: 14 batches of the stream without running out of memory" in flat(
        ran.stdout
    )
    found, config = (
        json.loads((run / "verify.json").read_text()),
        read_stream_yaml(run / "stream.yaml"),
    )
    assert found["bucket_batch_sizes"] == config.bucket_batch_sizes
    assert (found["buffer_size"], found["epoch_batches"]) == (
        32,
        config.evidence.batches,
    )
    # On one rank, both are the time of all steps: of the epoch that ran, and the mean of three.
    assert found["estimated_epoch_seconds"] == pytest.approx(
        config.evidence.estimated_epoch_seconds, rel=0.002
    )


def test_other_lengths_or_shards_are_refused(batchtune, run, tmp_path):
    shorter = batchtune("verify", "--stream", "lengths.csv", *STEPS, "--max-length", 10)
    assert (shorter.returncode, "is of other lengths" in shorter.stderr) == (1, True)
    header, *rows = (tmp_path / "lengths.csv").read_text().splitlines()
    for name, part in (("a.csv", rows[:300]), ("b.csv", rows[300:])):
        (tmp_path / name).write_text("\n".join([header, *part]) + "\n")
    parted = batchtune("verify", "--stream", "a.csv", "b.csv", *STEPS, code=1)
    assert "stream.json is of 12 other shards; these are 2" in parted.stderr
