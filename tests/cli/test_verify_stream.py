"""`batchtune verify --stream`, on a device made by a law."""

import shutil

import pytest
from cli.conftest import flat, result_in, run_here_in

from batchtune.configs import read_stream_yaml

STEPS = ["--steps", 14]


@pytest.fixture(scope="session")
def swept(verified, made_once):
    """The folder of `verified`, with a sweep of its stream in the run folder."""

    def make(folder):
        shutil.copytree(verified, folder, dirs_exist_ok=True)
        options = ["--shard-size", 50, "--workers", 2]
        options += ["--buffer-size", 32, "--num-buckets", 2]
        run_here_in(folder, "sweep-stream", "lengths.csv", *options, code=0)

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
    why = "Verifying batchtune-run/stream.yaml, as the folder holds no sampler.yaml."
    assert why in ran.stderr
    verified = "Verified: 14 batches of the stream without running out of memory"
    assert verified in flat(ran.stdout)
    found = result_in(run.parent, "verify")
    config = read_stream_yaml(run / "stream.yaml")
    assert found["bucket_batch_sizes"] == config.bucket_batch_sizes
    assert found["buffer_size"] == 32
    assert found["epoch_batches"] == config.evidence.batches
    # On one rank, both are the time of all steps: of the epoch that ran, and the mean of three.
    assert found["estimated_epoch_seconds"] == pytest.approx(
        config.evidence.estimated_epoch_seconds, rel=0.002
    )


def test_other_lengths_or_shards_are_refused(batchtune, run, tmp_path):
    shorter = ("lengths.csv", "--max-length", 10)
    ran = batchtune("verify", "--stream", *STEPS, *shorter, code=1)
    assert "is of other lengths" in ran.stderr
    header, *rows = (tmp_path / "lengths.csv").read_text().splitlines()
    for name, part in (("a.csv", rows[:300]), ("b.csv", rows[300:])):
        (tmp_path / name).write_text("\n".join([header, *part]) + "\n")
    ran = batchtune("verify", "--stream", *STEPS, "a.csv", "b.csv", code=1)
    assert "stream.json is of 12 other shards; these are 2" in ran.stderr
