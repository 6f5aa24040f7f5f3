"""Which examples each worker reads, next to WebDataset itself; advice on how to write shards."""

import random
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.results import StreamedWith
from batchtune.streams.simulated import sample_random, shuffled, worker_streams
from batchtune.streams.sweep import advised_shards

SIZES = (3, 5, 1, 4, 2, 6, 3, 3, 0, 5, 2, 4, 7)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Real shards; each example is its place, counted over all of them."""
    folder, place = tmp_path_factory.mktemp("shards"), 0
    for number, size in enumerate(SIZES):
        with tarfile.open(folder / f"{number:03}.tar", "w") as shard:
            for _ in range(size):
                shard.addfile(tarfile.TarInfo(f"{place:06}.txt"))
                place += 1
    return sorted(map(str, folder.iterdir()))


def sharded(**settings):
    return StreamedWith(**{"shuffle_shards": 0, "shuffle_buffer": 0, **settings})


def epochs_of_webdataset(
    urls,
    sharding,
    who,
    monkeypatch,
):
    """What a worker that lives for three epochs reads."""
    wds = pytest.importorskip("webdataset")
    rank, worker = who
    environment = {
        "RANK": rank,
        "WORLD_SIZE": sharding.world_size,
        "WORKER": worker,
        "NUM_WORKERS": sharding.workers,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    data = wds.WebDataset(
        urls,
        shardshuffle=sharding.shuffle_shards,
        detshuffle=True,
        seed=7,
        nodesplitter=wds.split_by_node,
        empty_check=False,
    )
    ours = random.Random()
    data = data.shuffle(sharding.shuffle_buffer, rng=ours)
    epochs = []
    for epoch in range(3):
        ours.setstate(sample_random(7, epoch, rank, worker).getstate())
        epochs.append([int(example["__key__"]) for example in data])
    return epochs


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # WebDataset closes no shard
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "sharding",
    [
        sharded(),
        sharded(shuffle_shards=100, shuffle_buffer=1000),
        sharded(world_size=2, workers=3, shuffle_shards=100),
        sharded(world_size=3, shuffle_shards=2, shuffle_buffer=5),
        sharded(workers=2, shuffle_shards=1, shuffle_buffer=10),
        sharded(world_size=2, workers=2, shuffle_buffer=4),
        sharded(world_size=4, workers=4, shuffle_shards=3, shuffle_buffer=2),
    ],
    ids=str,
)
def test_each_worker_reads_as_in_webdataset(urls, sharding, monkeypatch):
    ours = [worker_streams(sharding, SIZES, seed=7, epoch=epoch) for epoch in range(3)]
    assert len(ours[0]) == sharding.world_size
    for rank, workers in enumerate(ours[0]):
        assert len(workers) == sharding.readers_per_rank
        for worker in range(len(workers)):
            real = epochs_of_webdataset(urls, sharding, (rank, worker), monkeypatch)
            assert [epoch[rank][worker].tolist() for epoch in ours] == real
    for epoch in ours:
        read = np.concatenate([worker for workers in epoch for worker in workers])
        assert sorted(read) == list(range(sum(SIZES)))


@given(
    count=st.integers(0, 300),
    buffer_size=st.integers(0, 400),
    seed=st.integers(0, 99),
)
def test_shuffling_is_webdatasets(count, buffer_size, seed):
    filters = pytest.importorskip("webdataset.filters")
    theirs = random.Random(seed)
    ours = random.Random(seed)
    real = iter(range(count))
    if buffer_size > 0:  # `.shuffle` leaves the stage out otherwise
        real = filters.shuffle(buffer_size, rng=theirs)(real)
    assert shuffled(np.arange(count), buffer_size, ours).tolist() == list(real)
    assert ours.getstate() == theirs.getstate()


# Advice


def test_no_more_shards_are_advised_than_help():
    shards = {(2_853, 4): 16, (1_000, 8): 8, (100, 64): 100, (1, 4): 1}
    for (count, readers), most in shards.items():
        assert advised_shards(count, None, readers).shards == most


@given(
    count=st.integers(1, 10**6),
    mean_bytes=st.none() | st.integers(1, 10**7),
    readers=st.integers(1, 128),
)
def test_advised_shards_keep_every_worker_busy(count, mean_bytes, readers):
    advice = advised_shards(count, mean_bytes and mean_bytes * count, readers)
    assert 0 <= advice.shards * advice.maxcount - count < advice.maxcount
    assert advice.shards >= min(count, readers)
    assert (advice.maxsize_bytes is None) == (mean_bytes is None)
    possible = count > (readers - 1) * -(-count // readers)
    assert advice.shards % readers == 0 or not possible
