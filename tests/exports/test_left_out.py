"""What was left out at tuning is left out by every export, too, or the export says how."""

import re
from functools import cache
from itertools import chain

import numpy as np
import pytest
from buckets import speech
from exports import stream_runs
from exports.stream_runs import (
    TABLES,
    cuts_of,
    executed,
    prose,
    stream_of,
    write_config,
)
from msgspec.structs import replace
from real_speechbrain import load_speechbrain
from report_records import made_sweep
from ruamel.yaml import YAML

from batchtune import BucketBatchSampler, BucketedStream
from batchtune.exports import FRAMEWORKS
from batchtune.exports.run_configs import render_stream_yaml, stream_config
from batchtune.lengths import Lengths
from batchtune.results import ReadingRecord, SweepSettings

ALL = np.concatenate(
    [np.linspace(1.0, 30.0, 900), np.linspace(30.5, 82.5, 100), [0.25] * 5]
)
KEPT = ALL[(ALL >= 1) & (ALL <= 30)]


@cache
def swept(unit="s", scale=1.0):
    """Of the 900 lengths from 1 to 30 s, in another unit by its scale."""
    lengths = Lengths.of(KEPT * scale, unit=unit)
    found = speech.swept(lengths, 300 * scale, num_buckets=(5,))
    left_out = {"longer than --max-length 30": 100, "shorter than --min-length 1": 5}
    reading = ReadingRecord(min_length=1.0 * scale, max_length=30.0 * scale)
    read = replace(found.lengths, left_out=left_out, reading=reading)
    return replace(found, lengths=read)


def rendered(name, result=None, **fields):
    return stream_runs.rendered(name, result or swept(), **fields)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_how_many_and_why_is_said(name):
    said = "Left out at tuning: 100 examples, longer than --max-length 30; 5 examples, shorter than --min-length 1."
    assert said in prose(rendered(name))
    said = "Truncated at tuning: 100 examples, longer than 30 s (--truncate)."
    assert said in prose(rendered(name, truncated()))


def test_without_limits_nothing_is_left_out():
    for name in FRAMEWORKS:
        text = rendered(name, made_sweep())
        assert "Left out" not in text and "within_limits" not in text
        # A stream may hold what the sweep has not seen.
        assert ("is_kept" in text) == (name == "lhotse-shar")


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 1000)])
def test_nemo_has_settings_for_it(unit, scale):
    settings = YAML(typ="safe").load(rendered("nemo", swept(unit, scale)))["model"][
        "train_ds"
    ]
    assert (settings["min_duration"], settings["max_duration"]) == (1, 30)
    assert settings["bucket_duration_bins"][-1] == 30


@pytest.mark.filterwarnings("ignore")
def test_lhotse_filters_its_cuts():
    cuts = pytest.importorskip("lhotse").CutSet.from_cuts(cuts_of(ALL))
    sampler = executed(rendered("lhotse"))["make_sampler"](cuts)
    seen = [cut.duration for batch in sampler for cut in batch]
    assert sorted(seen) == sorted(KEPT.tolist())


def test_speechbrains_line_keeps_what_was_tuned_with():
    text = rendered("speechbrain")
    (line,) = re.findall(r"^#     (train_data = .*)$", text, re.MULTILINE)
    examples = {
        str(index): {"duration": float(length)} for index, length in enumerate(ALL)
    }
    names = {"train_data": load_speechbrain()[1].DynamicItemDataset(examples)}
    exec(line, names)
    assert len(names["train_data"]) == KEPT.size


def test_espnets_recipes_get_seconds():
    for unit, scale in (("s", 1), ("samples", 16_000)):
        assert "--min_wav_duration 1 --max_wav_duration 30" in prose(
            rendered("espnet", swept(unit, scale))
        )
    assert "not 1.0 <= length <= 30.0 out of every train_shape_file" in prose(
        rendered("espnet", swept("tokens"))
    )


def test_fairseq_gets_its_own_options():
    audio, text = rendered("fairseq"), rendered("fairseq", swept("tokens"))
    assert " --max-sample-size 480000 --min-sample-size 16000\n" in audio
    assert "Take the lines with more than 480000 samples out of train.tsv" in prose(
        audio
    )
    assert " --skip-invalid-size-inputs-valid-test --max-source-positions 31\n" in text
    document = YAML(typ="safe").load(
        text.split("fairseq-hydra-train:\n")[1].replace("#", "")
    )
    assert document["dataset"]["skip_invalid_size_inputs_valid_test"] is True
    assert "can't leave out what is shorter than 1" in prose(text)


@pytest.mark.parametrize("name", ["pytorch", "accelerate", "lightning", "transformers"])
def test_the_snippets_of_our_sampler_have_a_function_for_it(name, tmp_path):
    text = rendered(name, config=write_config(tmp_path, swept()))
    compile(text, name, "exec")
    assert "def within_limits(dataset, lengths):" in text
    if name != "pytorch":  # the others need their framework, for the same function
        return
    names = executed(text)
    examples = list(range(ALL.size))
    dataset, lengths = names["within_limits"](examples, ALL)
    loader = names["train_loader"](dataset, lengths, list, num_workers=0)
    seen = sorted(index for batch in loader for index in batch)
    assert seen == np.flatnonzero((ALL >= 1) & (ALL <= 30)).tolist()
    with pytest.raises(ValueError, match="beyond the last of bucket_boundaries, 30"):
        names["train_loader"](examples, ALL, list, num_workers=0)


def truncated():
    """Of all lengths, those beyond 30 s truncated to 30 s."""
    found = speech.swept(np.minimum(ALL, 30.0), num_buckets=(5,))
    read = {"reading": ReadingRecord(truncate=30.0), "truncated": 100}
    return replace(found, lengths=replace(found.lengths, **read))


def test_our_samplers_count_longer_examples_as_truncated(tmp_path):
    table = write_config(tmp_path, truncated())
    stream = tmp_path / "stream.yaml"
    config = stream_config(stream_of(truncated()))
    stream.write_text(render_stream_yaml(config), encoding="utf-8")
    streamed = BucketedStream.from_config(
        stream,
        range(ALL.size),
        length_of=ALL.tolist().__getitem__,
        batches_per_epoch=None,
    )
    for made in (BucketBatchSampler.from_config(table, ALL), streamed):
        batches = list(made)
        assert sorted(chain(*batches)) == list(range(ALL.size))
        assert max(len(batch) for batch in batches if ALL[batch].max() > 30) == 10


def test_padding_to_multiples_is_told():
    made = made_sweep()
    made = replace(made, settings=SweepSettings(multiple_of=0.5))
    for name in TABLES:
        assert "padded to multiples of 0.5 s (--multiple-of)" in prose(
            rendered(name, made)
        ), name
