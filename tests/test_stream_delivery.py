"""Real shards, read by WebDataset in a real DataLoader, give the batches that sweeps simulate and `verify` runs."""

import io
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import run_here
from manifests.samples import shard
from msgspec import structs

from batchtune.configs import read_stream_yaml
from batchtune.exports.run_configs import render_stream_yaml
from batchtune.manifests import load_stream
from batchtune.results import StreamSweep, read_result, write_result
from batchtune.streams.simulated import sample_random, stored_stream, stream_epoch

SHARDS, EXAMPLES, SEED, SHARDS_SHUFFLED = 12, 15, 3, 4
SIZES = {4: 15, 8: 8, 12: 5, 20: 3, 30: 2}


@pytest.fixture(scope="session")
def swept(made_once):
    """A folder with 12 shards of arrays with 1 to 30 rows, and the run folder of their sweep."""

    def make(folder):
        draw = np.random.default_rng(0)
        for place in range(SHARDS):
            members = []
            for number, length in enumerate(draw.integers(1, 31, EXAMPLES)):
                stream = io.BytesIO()
                np.save(stream, np.zeros((length, 2), dtype=np.float32))
                members.append((f"{place:03}{number:03}.npy", stream.getvalue()))
            (folder / f"train-{place:03}.tar").write_bytes(shard(members))
        options = ["--max-batch-length", 60, "--buffer-size", 40, "--num-buckets", 4]
        options += ["--seed", SEED, "--shuffle-shards", SHARDS_SHUFFLED, "--json"]
        run = folder / "run"
        ran = run_here("sweep-stream", *shards(folder), *options, "--run", run)
        assert ran.returncode == 0, ran.stderr

    return made_once("swept-stream", make)


def shards(folder):
    return sorted(map(str, folder.glob("*.tar")))


def copied(swept, folder, algorithm, **settings):
    """A copy of the run folder, with another algorithm, table and way of the shards to workers."""
    run = Path(shutil.copytree(swept / "run", folder / "run"))
    sweep = read_result(run / "stream.json", StreamSweep)
    write_result(
        run / "stream.json",
        structs.replace(sweep, settings=structs.replace(sweep.settings, **settings)),
    )
    config = structs.replace(
        read_stream_yaml(run / "stream.yaml"),
        algorithm=algorithm,
        bucket_boundaries=list(map(float, SIZES)),
        bucket_batch_sizes=list(SIZES.values()),
        max_padding_ratio=0.1 if algorithm == "pivot" else None,
    )
    (run / "stream.yaml").write_text(render_stream_yaml(config))
    return run


def length_of(example):
    return float(example["npy"].shape[0])


def worker_and_shape(examples):
    from torch.utils.data import get_worker_info

    return [get_worker_info().id, len(examples), max(map(length_of, examples))]


def delivered(swept, run, *, workers, shuffle_buffer=0, **options):
    """The worker and the shape of each batch that a DataLoader delivers, by what it decoded."""
    import webdataset
    from torch.utils.data import DataLoader

    from batchtune import BucketedStream

    stage = BucketedStream.from_config(
        run / "stream.yaml", length_of=length_of, collate_fn=worker_and_shape, **options
    )
    stream = webdataset.WebDataset(
        shards(swept),
        shardshuffle=SHARDS_SHUFFLED,
        detshuffle=True,
        seed=SEED,
        nodesplitter=webdataset.split_by_node,
    )
    if shuffle_buffer:
        stream = stream.shuffle(shuffle_buffer, rng=sample_random(SEED, 0, 0, 0))
    return list(
        DataLoader(stream.decode().compose(stage), batch_size=None, num_workers=workers)
    )


def simulated(swept, run):
    config = read_stream_yaml(run / "stream.yaml")
    epoch = stream_epoch(
        stored_stream(load_stream(shards(swept)), run, SEED), config, 0
    )
    return np.column_stack([epoch.batch_sizes, epoch.lengths]).tolist()


@pytest.mark.process
@pytest.mark.parametrize(("workers", "shuffle_buffer"), [(1, 30), (2, 0)])
def test_workers_deliver_the_simulated_batches_in_turn(
    swept, tmp_path, workers, shuffle_buffer
):
    sharding = {"workers": workers, "shuffle_buffer": shuffle_buffer}
    for algorithm in ("bucket", "pivot"):
        run = copied(swept, tmp_path / algorithm, algorithm, **sharding)
        batches = delivered(swept, run, **sharding)
        numbers = [number for number, *_ in batches]
        rounds = min(map(numbers.count, range(workers)))
        in_turn = rounds * workers
        assert numbers[:in_turn] == [*range(workers)] * rounds
        expected = simulated(swept, run)
        shapes = [shape for _, *shape in batches]
        # How soon a loader notices that one of its workers has ended is a matter of time.
        assert shapes[:in_turn] == expected[:in_turn]
        assert sorted(shapes[in_turn:]) == sorted(expected[in_turn:])


@pytest.mark.process
def test_ranks_get_the_simulated_batches(swept, tmp_path, monkeypatch):
    run = copied(swept, tmp_path, "bucket", world_size=2, workers=1, shuffle_buffer=0)
    of_rank = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        batches = delivered(swept, run, workers=1, rank=rank, world_size=2)
        of_rank.append([shape for _, *shape in batches])
    assert of_rank[0] != of_rank[1]
    assert simulated(swept, run) == [
        shape for step in itertools.zip_longest(*of_rank) for shape in step if shape
    ]
