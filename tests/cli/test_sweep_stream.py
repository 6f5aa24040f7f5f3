"""`batchtune sweep-stream`, as a user types it."""

import json

import numpy as np
import pytest
from cli.conftest import contents, result_in
from manifests.samples import shard
from msgspec.structs import replace
from report_records import made_probe
from ruamel.yaml import YAML

from batchtune.manifests import load_lengths
from batchtune.results import write_result

SWEEP = ["sweep-stream", "train-{000..003}.tar", "--max-batch-length", 100]
SWEEP += ["--buffer-size", "32,128", "--num-buckets", "4"]


@pytest.fixture
def shards(tmp_path):
    """Four shards of 100 samples, in the folder where `batchtune` runs."""
    durations = np.random.default_rng(3).gamma(6, 2, (4, 100)) + 0.5
    paths = []
    for number, of_shard in enumerate(durations.round(2).tolist()):
        members = [
            (f"{number}-{sample:05d}.json", json.dumps({"duration": duration}).encode())
            for sample, duration in enumerate(of_shard)
        ]
        paths.append(tmp_path / f"train-{number:03d}.tar")
        paths[-1].write_bytes(shard(members))
    return paths


@pytest.mark.usefixtures("shards")
def test_shards_are_tuned_and_both_files_written(succeed, tmp_path):
    ran = succeed(*SWEEP, "--workers", 2, "--world-size", 2)
    assert "BucketedStream" in ran.stdout
    found = result_in(tmp_path, "stream")
    shards = found["shards"]
    assert (shards["count"], shards["assumed"], shards["repeated_ids"]) == (4, False, 0)
    config = YAML(typ="safe").load(tmp_path / "batchtune-run" / "stream.yaml")
    row = found["rows"][found["recommended"]]
    for name in ("algorithm", "buffer_size"):
        assert config[name] == row[name]
    assert config["batches_per_epoch"] == found["batches_per_rank"]


@pytest.mark.usefixtures("shards")
def test_the_same_stream_gives_the_same_bytes(succeed, tmp_path):
    succeed(*SWEEP)
    before = contents(tmp_path / "batchtune-run")
    succeed(*SWEEP)
    assert contents(tmp_path / "batchtune-run") == before


@pytest.mark.usefixtures("shards")
def test_current_settings_in_samples_are_a_row(succeed, tmp_path):
    now = "target_batch_numel=16000*45,max_batch_numel=16000*60,sample_rate=16000,buffersize=64"
    succeed(*SWEEP, "--current", now)
    found = result_in(tmp_path, "stream")
    current = found["current"]
    assert (current["target_batch_numel"], current["max_batch_numel"]) == (45, 60)
    assert found["current_fits"] is True
    assert found["current_settings"]["source"] == "--current"


def test_a_damaged_shard_is_an_error_or_counted(batchtune, succeed, tmp_path, shards):
    shards[2].write_bytes(shards[2].read_bytes()[:50_500])
    assert "train-002.tar" in batchtune(*SWEEP, code=1).stderr
    assert not (tmp_path / "batchtune-run").exists()
    succeed(*SWEEP, "--skip-invalid")
    assert result_in(tmp_path, "stream")["shards"]["broken"] == 1


def test_a_stream_is_for_the_ranks_that_were_probed(succeed, tmp_path, shards):
    lengths = load_lengths(list(map(str, shards))).summary()
    device = replace(made_probe().device, world_size=4)
    run = tmp_path / "batchtune-run"
    run.mkdir()
    probe = replace(made_probe(), device=device, lengths=lengths)
    write_result(run / "probe.json", probe)
    succeed(*SWEEP)
    assert result_in(tmp_path, "stream")["settings"]["world_size"] == 4
