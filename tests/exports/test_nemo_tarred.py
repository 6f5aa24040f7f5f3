"""The NeMo export for tarred data, run by NeMo's own loader on real tar files where it is installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from exports.stream_runs import stream_of
from manifests.samples import shard, wav
from ruamel.yaml import YAML

from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs
from batchtune.exports import Tuned, export_of
from batchtune.lengths import Lengths
from batchtune.results import StreamSweep

# Libraries warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

RATE = 16_000
SAMPLES = np.random.default_rng(0).integers(800, 9600, 240)
SHARDS = 4
BUFFER = 64


class Batch(NamedTuple):
    worker: int
    places: list[int]
    durations: list[float]


class Seen(torch.utils.data.Dataset[Batch]):
    """Loads the audio, as a dataset of NeMo does, and tells what it was of."""

    def __getitem__(self, cuts: Any) -> Batch:
        info = torch.utils.data.get_worker_info()
        assert all(cut.load_audio().shape == (1, round(cut.duration * RATE)) for cut in cuts)
        places, durations = [int(Path(cut.id).stem) for cut in cuts], [cut.duration for cut in cuts]
        return Batch(0 if info is None else info.id, places, durations)


@pytest.fixture(scope="module")
def nemo() -> Iterator[Any]:
    """NeMo's own data loading, which few machines have."""
    if importlib.util.find_spec("nemo") is None:
        pytest.skip("nemo is not installed")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        collections = importlib.import_module("nemo.collections")
        # Its own __init__ imports all models; the loader needs the function that lists shards, in a module beneath it.
        package = types.ModuleType("nemo.collections.asr")
        package.__path__ = [f"{folder}/asr" for folder in collections.__path__]
        patch.setitem(sys.modules, package.__name__, package)
        importlib.import_module("nemo.collections.asr.data.audio_to_text")
        loading = importlib.import_module("nemo.collections.common.data.lhotse.dataloader")
        # One that needs no more than soundfile, as NeMo does to read a file's header.
        with importlib.import_module("lhotse.audio.backend").audio_backend("LibsndfileBackend"):
            yield loading


def swept(shards: int = SHARDS) -> StreamSweep:
    """Of these examples on 2 ranks with 2 workers each, at most 2.5 s a batch."""
    made = stream_of(sweep(Lengths.of(SAMPLES / RATE, unit="s"), 2.5, SweepSettings(num_buckets=(3,)), Costs()))
    rows = [msgspec.structs.replace(row, buffer_size=BUFFER) for row in made.rows]
    shape = msgspec.structs.replace(made.shards, count=shards)
    return msgspec.structs.replace(made, rows=rows, shards=shape, settings={"world_size": 2, "workers": 2})


def write_tars(folder: Path, shards: int = SHARDS, manifest: dict[int, float] | None = None) -> None:
    """Write what NeMo's convert_to_tarred_audio_dataset.py writes; `manifest` has other durations than the audio's."""
    for name in ("audio", "manifests"):
        (folder / name).mkdir()
    for number, places in enumerate(np.array_split(np.arange(SAMPLES.size), shards)):
        lines = []
        members = []
        for place in places.tolist():
            name = f"{place:04d}.wav"
            members.append((name, wav(int(SAMPLES[place]))))
            duration = (manifest or {}).get(place, round(float(SAMPLES[place]) / RATE, 2))
            line = {"audio_filepath": name, "duration": duration, "text": "a", "shard_id": number}
            lines.append(json.dumps(line))
        (folder / "audio" / f"audio_{number}.tar").write_bytes(shard(members))
        (folder / "manifests" / f"manifest_{number}.json").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder)
    return folder


def exported(folder: Path, found: StreamSweep | None = None) -> dict[str, Any]:
    """The fragment, with the paths that it has in comments as those of this folder."""
    text = export_of("nemo-tarred").render(Tuned(stream=found or swept()))
    text, paths = re.subn(r"# (manifest_filepath|tarred_audio_filepaths): ", rf"\1: {folder}/", text)
    assert paths == 2
    document: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return document


def loader_of(nemo: Any, settings: dict[str, Any], rank: int = 0, world_size: int = 2) -> Any:
    return nemo.get_lhotse_dataloader_from_config(settings, rank, world_size, Seen())


def buckets_of(batch: Batch, settings: dict[str, Any]) -> set[int]:
    return set(np.searchsorted(settings["bucket_duration_bins"], batch.durations).tolist())


def test_nemo_and_its_trainer_know_every_setting(nemo: Any, tars: Path) -> None:
    document = exported(tars)
    known = {field.name for field in dataclasses.fields(nemo.LhotseDataLoadingConfig)}
    assert set(document["model"]["train_ds"]) <= known | {"use_lhotse"}
    assert not {"is_tarred", "shuffle_n"} & known
    trainer = importlib.import_module("lightning.pytorch").Trainer
    assert set(document["trainer"]) <= set(inspect.signature(trainer.__init__).parameters)


def test_nemo_holds_no_more_than_the_buffer(nemo: Any, tars: Path) -> None:
    settings = exported(tars)["model"]["train_ds"]
    sampler = loader_of(nemo, settings).dataset.sampler
    assert (sampler.buffer_size, sampler.concurrent, sampler.shuffle) == (BUFFER, False, True)
    for ours in ("shuffle_buffer_size", "concurrent_bucketing"):
        del settings[ours]
    other = loader_of(nemo, settings).dataset.sampler
    assert (other.buffer_size, other.concurrent) == (BUFFER + 10_000, True)


@pytest.mark.parametrize(("shards", "workers"), [(SHARDS, 2), (SHARDS, 0), (1, 2)])
def test_nemos_batches_have_the_recommended_sizes(nemo: Any, tmp_path: Path, shards: int, workers: int) -> None:
    write_tars(tmp_path, shards)
    settings = {**exported(tmp_path, swept(shards))["model"]["train_ds"], "num_workers": workers}
    sizes = settings["bucket_batch_size"]
    used: Counter[int] = Counter()
    for batch in islice(loader_of(nemo, settings), 100):
        (bucket,) = buckets_of(batch, settings)
        assert len(batch.places) == sizes[bucket]
        used[bucket] += 1
    assert set(used) == set(range(len(sizes)))


def test_nemos_workers_read_all_shards_each_in_its_own_order(nemo: Any, tars: Path) -> None:
    settings = exported(tars)["model"]["train_ds"]
    read: dict[tuple[int, int], list[int]] = {}
    buckets = []
    for rank in (0, 1):
        batches = list(islice(loader_of(nemo, settings, rank), 200))
        buckets.append([buckets_of(batch, settings) for batch in batches[:2]])
        for batch in batches:
            read.setdefault((rank, batch.worker), []).extend(batch.places)
    assert sorted(read) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    per_shard = SAMPLES.size // SHARDS
    assert all({place // per_shard for place in places} == set(range(SHARDS)) for places in read.values())
    assert len({tuple(places[:20]) for places in read.values()}) == 4
    assert buckets[0] == buckets[1]  # ranks step through the buckets together, as far as they are full


def test_nemo_goes_on_in_the_next_epoch(nemo: Any, tars: Path) -> None:
    settings = exported(tars)["model"]["train_ds"]
    loader, epoch = loader_of(nemo, settings), 4
    read: Counter[tuple[int, int]] = Counter()
    for _ in range(3):
        read.update((batch.worker, place) for batch in islice(loader, epoch) for place in batch.places)
    # Less than a pass: two batches that each worker has made in advance are lost with each epoch.
    assert 3 * (epoch // 2 + 2) * max(settings["bucket_batch_size"]) < SAMPLES.size - BUFFER
    assert set(read.values()) == {1}


def test_nemo_takes_the_duration_of_the_audio(nemo: Any, tmp_path: Path) -> None:
    longest, shorter = int(SAMPLES.argmax()), int(SAMPLES.argmin())
    limit = float(np.sort(SAMPLES)[-2]) / RATE
    cut = next(place for place in range(SAMPLES.size) if SAMPLES[place] > RATE / 2 and place != longest)
    write_tars(tmp_path, manifest={longest: limit, shorter: 0.1, cut: 0.25})
    settings = {**exported(tmp_path)["model"]["train_ds"], "max_duration": limit}
    found: dict[int, float] = {}
    for batch in islice(loader_of(nemo, settings), 600):
        found.update(zip(batch.places, batch.durations, strict=True))
    assert longest not in found
    assert (found[shorter], found[cut]) == (SAMPLES[shorter] / RATE, 0.25)
