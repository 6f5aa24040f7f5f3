"""The exports of a stream, run by the libraries that they are for."""

import gc
import sys
import types
from collections import Counter
from functools import cache
from itertools import chain, islice

import numpy as np
import pytest
import torch
from buckets import speech
from exports.stream_runs import (
    cuts_of,
    executed,
    made_stream,
    prose,
    rendered_stream,
    stream_of,
)
from msgspec.structs import replace
from real_speechbrain import load_speechbrain

from batchtune.exports.run_configs import render_stream_yaml, stream_config
from batchtune.results import StreamSettings

# Libraries warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

RATE = 16_000
SAMPLES = np.random.default_rng(0).integers(10, 400, 240)
SHARDS = 4


@cache
def of_table():
    """Of these examples, in seconds; at most 4000 samples a batch."""
    return stream_of(speech.swept(SAMPLES / RATE, 4000 / RATE, num_buckets=(3,)))


def swept(*, batches=12, **settings):
    """With a buffer that holds some of a worker's."""
    made = of_table()
    rows = [replace(row, buffer_size=64, batches=2 * batches) for row in made.rows]
    chosen = {
        "world_size": 2,
        "workers": 2,
        "shuffle_shards": 4,
        "shuffle_buffer": 20,
        "seed": 3,
        **settings,
    }
    return replace(
        made, rows=rows, settings=StreamSettings(**chosen), batches_per_rank=batches
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Real shards; a sample is as long as its place in SAMPLES says."""
    webdataset = pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("shards")
    with webdataset.ShardWriter(
        f"{folder}/%02d.tar", maxcount=SAMPLES.size // SHARDS, verbose=0
    ) as writer:
        for place, samples in enumerate(SAMPLES.tolist()):
            writer.write(
                {
                    "__key__": f"{place:04d}",
                    "audio.pth": torch.full((samples,), place, dtype=torch.int16),
                }
            )
    return f"{folder}/{{00..{SHARDS - 1:02d}}}.tar"


@pytest.fixture
def closed():
    """Closes shards that a nominal epoch leaves open, as their warnings would show up in another test."""
    yield
    gc.collect()


@pytest.fixture
def config(tmp_path, closed):
    path = tmp_path / "stream.yaml"
    path.write_text(render_stream_yaml(stream_config(swept())), encoding="utf-8")
    return str(path)


def snippet(name, found, **fields):
    names = executed(rendered_stream(name, found, **fields))
    if name == "speechbrain-stream":
        names["AUDIO"] = "audio.pth"  # which the user has to set
    return names


def length_of(example):
    return len(example["audio.pth"]) / RATE


def keys(examples):
    return [int(example["__key__"]) for example in examples]


def fits(batch, found):
    """Whether a batch of these examples is within the table."""
    row = found.rows[0]
    bucket = int(np.searchsorted(row.boundaries, SAMPLES[batch].max() / RATE))
    return len(batch) <= row.batch_sizes[bucket]


# SpeechBrain


@pytest.fixture
def speechbrain(monkeypatch, closed):
    """What the snippet imports of SpeechBrain."""
    dataloader, iterators = load_speechbrain()[2:]
    # For workers, whose batches are pickled.
    batch = types.ModuleType("speechbrain.dataio.batch")
    vars(batch).update(iterators.PaddedBatch.__init__.__globals__)
    parents = (types.ModuleType(name) for name in ("speechbrain", "speechbrain.dataio"))
    for module in (*parents, dataloader, iterators, batch):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def ids(batches):
    return [sorted(int(key) for key in batch.id) for batch in batches]


@pytest.mark.usefixtures("speechbrain")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_speechbrains_loader_makes_tuned_batches(shards, workers):
    names = snippet("speechbrain-stream", swept())
    assert (names["TARGET_BATCH_NUMEL"], names["MAX_BATCH_NUMEL"]) == (3600, 4000)
    loader = names["train_loader"](shards, num_workers=workers)
    first, second = ids(loader), ids(loader)
    assert len(first) == len(second) == names["BATCHES_PER_EPOCH"] == 12
    assert first != second
    assert all(len(batch) * SAMPLES[batch].max() <= 4000 for batch in first + second)
    again = names["train_loader"](shards, num_workers=workers)
    assert [ids(again), ids(again)] == [first, second]
    whole = ids(again.loader)  # a pass over the shards
    assert sorted(key for batch in whole for key in batch) == list(range(SAMPLES.size))


@pytest.mark.parametrize(
    ("unit", "written"),
    [
        ("s", "600 * SAMPLE_RATE"),
        ("ms", "600 * SAMPLE_RATE / 1000"),
        ("samples", "600"),
        ("tokens", "600"),
        (None, "600"),
    ],
)
def test_numels_count_what_speechbrain_counts(unit, written):
    text = rendered_stream("speechbrain-stream", made_stream(unit=unit))
    assert f"\nMAX_BATCH_NUMEL = {written}\n" in text
    assert ("SAMPLE_RATE = 16000" in text) == (unit in ("s", "ms"))
    assert (
        "len_fn, which is len(signal) here, must return tokens"
        in text.replace("\n# ", " ")
    ) == (unit == "tokens")


def with_strangers(shards, folder):
    """The shards, and one with two examples of length 0 and one longer than all."""
    webdataset = pytest.importorskip("webdataset")
    strangers = f"{folder}/strangers.tar"
    with webdataset.TarWriter(strangers) as writer:
        for place, samples in enumerate((0, 0, 500)):
            audio = torch.zeros(samples, dtype=torch.int16)
            writer.write({"__key__": f"9{place}", "audio.pth": audio})
    return f"{strangers}::{shards}"


@pytest.mark.usefixtures("speechbrain")
def test_speechbrain_goes_on_after_examples_not_seen_before(shards, tmp_path):
    loader = snippet("speechbrain-stream", swept())["train_loader"](
        with_strangers(shards, tmp_path), num_workers=0
    )
    assert sorted(key for batch in ids(loader.loader) for key in batch) == list(
        range(SAMPLES.size)
    )


def test_webdataset_goes_on_after_examples_not_seen_before(shards, config, tmp_path):
    strangers = with_strangers(shards, tmp_path)
    loader = snippet("webdataset", swept(), stream_config=config)["train_loader"](
        strangers, length_of, keys, num_workers=0
    )
    assert max(key for batch in loader for key in batch) < SAMPLES.size


# batchtune's own stream


@pytest.mark.process
def test_webdataset_gives_nominal_epochs(shards, config):
    loader = snippet("webdataset", swept(), stream_config=config)["train_loader"](
        shards, length_of, keys, num_workers=2
    )
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == len(loader) == 12
    assert first != second
    assert all(fits(batch, swept()) for batch in first + second)


@pytest.mark.process
def test_hugging_face_streams_are_dealt_and_shuffled(config):
    datasets = pytest.importorskip("datasets")

    rows = {"place": range(SAMPLES.size), "samples": SAMPLES}
    dataset = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=SHARDS)
    names = snippet("hf-streaming", swept(), stream_config=config)

    def loader(rank):
        return names["train_loader"](
            dataset,
            lambda example: example["samples"] / RATE,
            lambda examples: [example["place"] for example in examples],
            rank=rank,
            world_size=2,
            num_workers=2,
        )

    first = list(loader(0))
    second = list(loader(1))
    assert len(first) == len(second) == 12
    assert not set(chain(*first)) & set(chain(*second))
    assert all(fits(batch, swept()) for batch in first + second)


# Lhotse and NeMo


class Places(torch.utils.data.Dataset[list[int]]):
    def __getitem__(self, cuts):
        return [int(cut.id.split("_")[0]) for cut in cuts]


def write_shar(folder, samples):
    lhotse = pytest.importorskip("lhotse")
    cuts = lhotse.CutSet.from_cuts(cuts_of(np.array(samples) / RATE))
    cuts.to_shar(folder, fields={}, shard_size=60, verbose=False)
    return folder


@pytest.fixture(scope="module")
def shar(tmp_path_factory):
    return write_shar(tmp_path_factory.mktemp("shar"), SAMPLES.tolist())


def nominal_epochs(shar):
    names = snippet("lhotse-shar", swept())
    return names["epochs"](names["train_loader"](shar, Places(), num_workers=2))


@pytest.mark.process
def test_lhotse_shar_gives_nominal_epochs(shar):
    epochs = nominal_epochs(shar)
    found = [list(next(epochs)) for _ in range(6)]
    assert [len(epoch) for epoch in found] == [12] * 6
    assert all(fits(batch, swept()) for epoch in found for batch in epoch)
    seen = Counter(key for epoch in found for batch in epoch for key in batch)
    # No worker reads another's.
    assert max(seen.values()) - min(seen[key] for key in range(SAMPLES.size)) <= 2


@pytest.mark.process
def test_lhotse_shar_goes_on_after_a_longer_cut(tmp_path):
    shar = write_shar(tmp_path, [*SAMPLES.tolist(), 500])
    epochs = nominal_epochs(shar)
    seen = {key for _ in range(3) for batch in next(epochs) for key in batch}
    assert seen == set(range(SAMPLES.size))


@pytest.mark.process
def test_lhotse_shar_reads_each_ranks_own_shards(shar):
    names = snippet("lhotse-shar", swept(shuffle_shards=0, shuffle_buffer=0))
    loaders = [
        names["train_loader"](shar, Places(), rank=rank, world_size=2, num_workers=1)
        for rank in (0, 1)
    ]
    first, second = (
        {key for batch in islice(loader, 12) for key in batch} for loader in loaders
    )
    assert first and second and not first & second


# Which row


@pytest.mark.parametrize(
    ("name", "algorithm", "row"),
    [
        (
            "speechbrain-stream",
            "bucket",
            "This is SpeechBrain's dynamic_bucketed_batch with a buffer of 1024 (790",
        ),
        (
            "webdataset",
            "speechbrain",
            "This is pivot with a buffer of 1024 (640 batches",
        ),
        ("hf-streaming", "pivot", None),
        (
            "lhotse-shar",
            "pivot",
            "This is bucket with 6 buckets and a buffer of 1024 (660 batches",
        ),
        ("nemo-tarred", "bucket", None),
    ],
)
def test_the_best_row_that_the_framework_runs_is_written(name, algorithm, row):
    found = made_stream(recommended=algorithm)
    text = prose(rendered_stream(name, found))
    assert (row is None) == ("batchtune recommends" not in text)
    assert row is None or row in text
