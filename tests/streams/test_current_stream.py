"""A user's current way to batch a stream: read from words and files, in the unit of the lengths."""

import numpy as np
import pytest

from batchtune.errors import BatchtuneError, ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.streams.simulated import PivotSettings, stream_current

SECONDS = Lengths.of(
    np.random.default_rng(0).lognormal(2, 0.6, 3000).clip(1, 24.5), unit="s"
)
IN_SAMPLES = "target_batch_numel=16000*45,max_batch_numel=16000*60."
RECIPE = """\
sample_rate: 16000
target: 720000
batch: !name:speechbrain.dataio.iterators.dynamic_bucketed_batch
    len_key: signal
    buffersize: 512
    drop_end: True
    sampler_kwargs:
        target_batch_numel: !ref <target>
        max_batch_numel: !ref <sample_rate> * 60
        max_padding_ratio: null
valid_dynamic_batch_kwargs:
    sampler_kwargs: {target_batch_numel: 160000}
"""


def pivot(target, most=None, **fields):
    return PivotSettings(target_batch_numel=target, max_batch_numel=most, **fields)


def read(text, unit="s", factor=1.0):
    return stream_current(text, Lengths.of(SECONDS.values * factor, unit=unit))


def of_file(folder, text, key_path=""):
    (folder / "train.yaml").write_text(text, encoding="utf-8")
    return read(f"{folder / 'train.yaml'}{key_path}")


def test_settings_written_out_are_speechbrains():
    found = read(
        "target_batch_numel=45,max_batch_numel=60,max_batch_size=64,max_padding_ratio=none,drop_end=true"
    )
    assert found.batching == pivot(
        45.0, 60.0, max_batch_size=64, max_padding_ratio=None, drop_end=True
    )
    assert (found.settings["source"], found.notes) == ("--current", ())
    said = (
        "SpeechBrain's dynamic_bucketed_batch, target_batch_numel=45 s, buffersize=1024"
    )
    assert found.settings["describe"] == said
    assert found.settings["max_padding_ratio"] is None


@pytest.mark.parametrize(
    ("unit", "factor", "rate", "target"),
    [
        ("s", 1.0, ",sample_rate=16000", 45.0),
        ("ms", 1000.0, ",sample_rate=16000", 45_000.0),
        ("samples", 16_000.0, "", 720_000.0),
    ],
)
def test_numels_in_samples_are_turned_into_the_unit(unit, factor, rate, target):
    found = read(IN_SAMPLES + rate, unit, factor).batching
    assert found == pivot(target, target * 4 / 3)


def test_a_rate_for_lengths_that_are_no_time_is_an_error():
    with pytest.raises(
        UsageError,
        match="sample_rate goes with lengths in seconds, but these are in tokens",
    ):
        read("target_batch_numel=4000,sample_rate=16000", "tokens", 10)


def test_a_recipe_has_its_settings_in_nested_blocks(tmp_path):
    found = of_file(tmp_path, RECIPE)
    assert found.batching == pivot(
        45.0, 60.0, max_padding_ratio=None, buffersize=512, drop_end=True
    )
    assert (found.settings["source"], found.settings["key_path"]) == (
        "train.yaml",
        "batch.sampler_kwargs",
    )
    assert found.notes == (
        "your current config counts samples, read as 16,000 a second (sample_rate)",
    )
    valid = of_file(tmp_path, RECIPE, ":valid_dynamic_batch_kwargs.sampler_kwargs")
    assert valid.batching == pivot(10.0)
    assert (
        "buffersize is not in train.yaml: SpeechBrain's default, 1024, is assumed"
        in valid.notes
    )


def test_a_recipes_rate_is_not_applied_to_seconds(tmp_path):
    found = of_file(
        tmp_path,
        "sample_rate: 16000\ntarget_batch_numel: 450\nmax_batch_numel: 600\nbuffersize: 64\n",
    )
    assert (found.batching, found.notes) == (pivot(450.0, 600.0, buffersize=64), ())


def test_examples_longer_than_the_limit_are_noted():
    assert read("target_batch_numel=45,max_batch_numel=20").notes == (
        "137 examples longer than max_batch_numel of your current config, 20 s (the longest is 24.5 s): "
        "SpeechBrain makes each a batch of one, however long",
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "max_batch_numel=45",
            "missing required field `target_batch_numel`",
            "Known are",
        ),
        (
            "max_batch_length=600,num_buckets=20",
            "num_buckets says nothing about the batches",
            "Known are",
        ),
        (
            IN_SAMPLES,
            "a limit of 960,000 seems to be in samples, but the lengths are in s",
            "Add sample_rate=16000 to the settings",
        ),
        (
            "target_batch_numel=45,max_padding_ratio=20",
            "max_padding_ratio: must be a number of at most 1",
            None,
        ),
    ],
)
def test_what_is_wrong_is_one_message(text, message, hint):
    with pytest.raises(BatchtuneError, match=message) as error:
        read(text)
    assert hint is None or hint in error.value.hint


def test_a_recipe_with_a_sampler_of_its_own_is_refused(tmp_path):
    named = "sampler_fn: !name:mine.sampler"
    with pytest.raises(ResultError, match="sampler_fn is not indices_around_random"):
        of_file(tmp_path, RECIPE.replace("len_key: signal", named))


@pytest.mark.parametrize(
    "text", ["max_batch_length: 600\nnum_buckets: 20\n", "lr: 1\n"]
)
def test_a_file_without_settings_of_a_stream_is_refused(tmp_path, text):
    message = r"target_batch_numel.*\n.*--current key=value"
    with pytest.raises(ResultError, match=message):
        of_file(tmp_path, text)


def test_speechbrains_own_sampler_may_be_named(tmp_path):
    named = "sampler_fn: !name:speechbrain.dataio.iterators.indices_around_random_pivot"
    assert (
        of_file(tmp_path, RECIPE.replace("len_key: signal", named)).batching
        == of_file(tmp_path, RECIPE).batching
    )
