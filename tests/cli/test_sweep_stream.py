"""`batchtune sweep-stream`, as a user types it."""

import json

import numpy as np
from cli.conftest import result_in
from manifests.samples import shard
from msgspec.structs import replace
from report_records import made_probe
from ruamel.yaml import YAML

from batchtune.manifests import load_lengths
from batchtune.results import write_result

LIMIT = ["--max-batch-length", 100]
SMALL = [*LIMIT, "--buffer-size", "32,128", "--num-buckets", "4"]


def write_shards(folder, count=4, samples=100):
    random = np.random.default_rng(3)
    paths = []
    for number in range(count):
        members = []
        for sample in range(samples):
            content = json.dumps(
                {"duration": round(float(random.gamma(6, 2)) + 0.5, 2)}
            )
            members.append((f"{number}-{sample:05d}.json", content.encode()))
        paths.append(folder / f"train-{number:03d}.tar")
        paths[-1].write_bytes(shard(members))
    return paths


def test_shards_are_tuned_and_both_files_written(succeed, tmp_path):
    write_shards(tmp_path)
    ran = succeed(
        "sweep-stream",
        "train-{000..003}.tar",
        *SMALL,
        "--workers",
        2,
        "--world-size",
        2,
    )
    assert "BucketedStream" in ran.stdout
    found = result_in(tmp_path, "stream")
    assert (
        found["shards"]["count"],
        found["shards"]["assumed"],
        found["shards"]["repeated_ids"],
    ) == (4, False, 0)
    config = YAML(typ="safe").load(tmp_path / "batchtune-run" / "stream.yaml")
    row = found["rows"][found["recommended"]]
    if row["algorithm"] != "speechbrain":
        assert (config["algorithm"], config["buffer_size"]) == (
            row["algorithm"],
            row["buffer_size"],
        )
    assert config["batches_per_epoch"] == found["batches_per_rank"]


def test_the_same_stream_gives_the_same_bytes(succeed, tmp_path):
    write_shards(tmp_path)
    seen = []
    for _ in range(2):
        succeed("sweep-stream", "train-{000..003}.tar", *SMALL)
        seen.append(
            [
                (tmp_path / "batchtune-run" / name).read_bytes()
                for name in ("stream.json", "stream.yaml")
            ]
        )
    assert seen[0] == seen[1]


def test_current_settings_in_samples_are_a_row(succeed, tmp_path):
    write_shards(tmp_path)
    now = "target_batch_numel=16000*45,max_batch_numel=16000*60,sample_rate=16000,buffersize=64"
    succeed("sweep-stream", "train-{000..003}.tar", *SMALL, "--current", now)
    found = result_in(tmp_path, "stream")
    assert (
        found["current"]["target_batch_numel"],
        found["current"]["max_batch_numel"],
    ) == (45, 60)
    assert found["current_fits"] is True
    assert found["current_settings"]["source"] == "--current"


def test_a_damaged_shard_is_an_error_or_counted(batchtune, succeed, tmp_path):
    damaged = write_shards(tmp_path)[2]
    damaged.write_bytes(damaged.read_bytes()[:50_500])
    ran = batchtune("sweep-stream", "train-{000..003}.tar", *SMALL, code=1)
    assert "train-002.tar" in ran.stderr
    assert not (tmp_path / "batchtune-run").exists()
    succeed("sweep-stream", "train-{000..003}.tar", *SMALL, "--skip-invalid")
    assert result_in(tmp_path, "stream")["shards"]["broken"] == 1


def test_a_stream_is_for_the_ranks_that_were_probed(succeed, tmp_path):
    shards = write_shards(tmp_path)
    lengths = load_lengths([str(path) for path in shards])
    made = made_probe()
    device = replace(made.device, world_size=4)
    run = tmp_path / "batchtune-run"
    run.mkdir()
    probe = replace(made, device=device, lengths=lengths.summary())
    write_result(run / "probe.json", probe)
    succeed("sweep-stream", "train-{000..003}.tar", *SMALL)
    assert result_in(tmp_path, "stream")["settings"]["world_size"] == 4
