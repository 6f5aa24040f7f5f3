"""The NeMo exports, run by NeMo itself where it is installed, and by the sampler that it calls."""

import importlib
import importlib.util
import json
import re
import sys
import types
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from buckets.speech import swept
from exports.stream_runs import (
    content,
    made_stream,
    rendered,
    rendered_stream,
    stream_of,
)
from manifests.samples import shard, wav
from msgspec.structs import replace
from report_records import made_sweep, proven_sweep
from reports.changed import with_row

from batchtune.results import StreamSettings, TwoDimensionalRow

# Libraries warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

TWO = TwoDimensionalRow(
    num_buckets=3,
    buckets=[(4.0, 10.0), (4.0, 20.0), (9.0, 25.0)],
    batch_sizes=[3, 2, 1],
    batches=900,
    estimated_epoch_seconds=200.0,
    one_dimensional_batches=1000,
    one_dimensional_epoch_seconds=230.0,
)
# Tarred data: as many samples in each example, in so many shards.
RATE = 16_000
SAMPLES = np.random.default_rng(0).integers(800, 9600, 240)
SHARDS = 4


@pytest.fixture(scope="module")
def nemo():
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
        loading = importlib.import_module(
            "nemo.collections.common.data.lhotse.dataloader"
        )
        # One that needs no more than soundfile, as NeMo does to read a file's header.
        with importlib.import_module("lhotse.audio.backend").audio_backend(
            "LibsndfileBackend"
        ):
            yield loading


def train_ds(text):
    return content("nemo", text)["model"]["train_ds"]


def settings_of(sweep):
    return train_ds(rendered("nemo", sweep))


def two_dimensional(text):
    """The fragment with the commented alternative in place of what it replaces."""
    commented = (
        text[text.index("    # num_buckets:") :].split("\n\n")[0].replace("    # ", "")
    )
    return {**train_ds(text), **content("nemo", commented)}


def nemo_batches(nemo, settings, path, tokenizer=None):
    """The durations in each batch of an epoch, by NeMo's own reading of the settings."""
    from omegaconf import OmegaConf

    asked = {
        **settings,
        "cuts_path": str(path),
        "force_finite": True,
        "shard_seed": 0,
        "concurrent_bucketing": False,
    }
    asked.pop("use_lhotse")
    config = nemo.make_structured_with_schema_warnings(OmegaConf.create(asked))
    sampler, _ = nemo.get_lhotse_sampler_from_config(config, 0, 1, tokenizer=tokenizer)
    return sorted(sorted(cut.duration for cut in batch) for batch in sampler)


def write_cuts(path, examples):
    """Write cuts of these durations and numbers of letters."""
    lhotse = pytest.importorskip("lhotse")
    cuts = []
    for index, (duration, letters) in enumerate(examples):
        name = str(index)
        recording = lhotse.Recording(
            name,
            sources=[],
            sampling_rate=RATE,
            num_samples=duration * RATE,
            duration=duration,
        )
        said = lhotse.SupervisionSegment(
            name, recording_id=name, start=0, duration=duration, text="x" * letters
        )
        cuts.append(
            lhotse.MonoCut(
                name, 0, duration, channel=0, recording=recording, supervisions=[said]
            )
        )
    lhotse.CutSet.from_cuts(cuts).to_file(path)
    return path


def test_nemo_keeps_the_longest_example_and_drops_what_is_beyond(nemo, tmp_path):
    path = write_cuts(
        tmp_path / "cuts.jsonl",
        [(length, 1) for length in (1.5, 24.525, 24.6, 3.582, 3.583)],
    )
    assert nemo_batches(nemo, settings_of(made_sweep()), path) == [
        [1.5, 3.582],
        [3.583],
        [24.525],
    ]


def test_nemo_takes_the_first_bin_that_holds_both_lengths(nemo, tmp_path):
    text = rendered("nemo", replace(made_sweep(), two_dimensional=[TWO]))
    examples = [
        (3.0, 10),
        (3.0, 10),
        (3.0, 10),
        (3.1, 11),
        (3.1, 11),
        (3.2, 21),
        (8.0, 5),
    ]
    path = write_cuts(tmp_path / "cuts.jsonl", examples)
    found = nemo_batches(nemo, two_dimensional(text), path, tokenizer=list)
    assert found == [[3.0, 3.0, 3.0], [3.1, 3.1], [3.2], [8.0]]


def test_the_fragment_has_the_table_and_disables_other_limits():
    settings = settings_of(made_sweep())
    row = made_sweep().recommended_row
    expected = {
        "use_lhotse": True,
        "use_bucketing": True,
        "num_buckets": 13,
        "bucket_duration_bins": row.boundaries,
        "bucket_batch_size": row.batch_sizes,
        "batch_size": None,
        "batch_duration": None,
        "max_duration": 24.525,
    }
    assert settings == {**settings, **expected}


def test_the_buffer_is_never_too_small_for_the_batch_sizes():
    settings = settings_of(with_row(made_sweep(), batch_sizes=[2000] * 13))
    assert settings["bucket_buffer_size"] == 13 * 1999 + 1


def test_a_batch_never_exceeds_the_proven_size_of_its_bucket():
    sweep = proven_sweep()
    few = [replace(sweep.buckets[0], examples=9), *sweep.buckets[1:]]
    sizes = settings_of(replace(sweep, buckets=few))["bucket_batch_size"]
    assert sizes == [9, *sweep.recommended_row.batch_sizes[1:]]


@pytest.mark.parametrize(
    ("unproven", "said"),
    [
        (0, "1000. The tokenizer must run"),
        (2, "Of these, 2 of 3 batch sizes are not proven to fit."),
        (None, "Whether these batches fit was not measured."),
    ],
)
def test_the_best_table_over_both_lengths_stands_in_comments(unproven, said):
    slow = replace(TWO, estimated_epoch_seconds=300.0, batch_sizes=[1, 1, 1])
    rows = [slow, replace(TWO, unproven=unproven)]
    text = rendered("nemo", replace(made_sweep(), two_dimensional=rows))
    assert train_ds(text) == settings_of(made_sweep())
    settings = two_dimensional(text)
    assert settings["bucket_duration_bins"] == [[4, 10], [4, 20], [9, 25]]
    assert settings["bucket_batch_size"] == [3, 2, 1]
    assert settings["bucketing_2d_strict_mode"] is False
    assert said in " ".join(re.sub(r"\n *# ", " ", text).split())


# Tarred data


class Seen(torch.utils.data.Dataset[list[tuple[int, float]]]):
    """Loads the audio, as a dataset of NeMo does, and tells what it was of: places and durations."""

    def __getitem__(self, cuts):
        assert all(
            cut.load_audio().shape == (1, round(cut.duration * RATE)) for cut in cuts
        )
        return [(int(Path(cut.id).stem), cut.duration) for cut in cuts]


def swept_stream():
    """Of these examples on 2 ranks with 2 workers each, at most 2.5 s a batch."""
    made = stream_of(swept(SAMPLES / RATE, 2.5, num_buckets=(3,)))
    rows = [replace(row, buffer_size=64) for row in made.rows]
    shards = replace(made.shards, count=SHARDS)
    return replace(
        made, rows=rows, shards=shards, settings=StreamSettings(world_size=2, workers=2)
    )


@pytest.fixture
def tarred(tmp_path):
    """The fragment for tar files as NeMo's convert_to_tarred_audio_dataset.py writes them."""
    for name in ("audio", "manifests"):
        (tmp_path / name).mkdir()
    for number, places in enumerate(np.array_split(np.arange(SAMPLES.size), SHARDS)):
        members = [
            (f"{place:04d}.wav", wav(int(SAMPLES[place]))) for place in places.tolist()
        ]
        lines = [
            json.dumps(
                {
                    "audio_filepath": name,
                    "duration": SAMPLES[int(name[:4])] / RATE,
                    "shard_id": number,
                }
            )
            for name, _ in members
        ]
        (tmp_path / "audio" / f"audio_{number}.tar").write_bytes(shard(members))
        (tmp_path / "manifests" / f"manifest_{number}.json").write_text(
            "\n".join(lines), encoding="utf-8"
        )
    text = rendered_stream("nemo-tarred", swept_stream())
    return train_ds(
        re.sub(
            r"# (manifest_filepath|tarred_audio_filepaths): ", rf"\1: {tmp_path}/", text
        )
    )


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_nemos_batches_of_tar_files_have_the_recommended_sizes(nemo, tarred, workers):
    loader = nemo.get_lhotse_dataloader_from_config(
        {**tarred, "num_workers": workers}, 0, 2, Seen()
    )
    sampler = loader.dataset.sampler
    assert (sampler.buffer_size, sampler.concurrent, sampler.shuffle) == (
        64,
        False,
        True,
    )
    used = Counter()
    for batch in islice(loader, 100):
        (bucket,) = set(
            np.searchsorted(
                tarred["bucket_duration_bins"], [duration for _, duration in batch]
            ).tolist()
        )
        assert len(batch) == tarred["bucket_batch_size"][bucket]
        used[bucket] += 1
    assert set(used) == set(range(len(tarred["bucket_batch_size"])))


def test_the_fragment_has_tarred_data_and_a_nominal_epoch():
    text = rendered_stream("nemo-tarred", made_stream())
    assert content("nemo-tarred", text)["trainer"] == {
        "use_distributed_sampler": False,
        "limit_train_batches": 330,
    }
    settings = train_ds(text)
    row = made_stream().rows[0]
    expected = {
        "bucket_duration_bins": row.boundaries,
        "bucket_batch_size": row.batch_sizes,
        "bucket_buffer_size": 1024,
        "num_buckets": 6,
        "shard_seed": "trng",
        "shuffle_buffer_size": None,
        "concurrent_bucketing": False,
        "max_duration": 24.525,
    }
    assert settings == {**settings, **expected}
    assert "tarred_audio_filepaths: audio/audio__OP_0..63_CL_.tar" in text
