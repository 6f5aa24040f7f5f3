"""A stream's recommendation in a user's own SpeechBrain YAML."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import msgspec
import pytest
from exports.stream_runs import made_stream

from batchtune.errors import ResultError
from batchtune.exports import Tuned, export_of
from batchtune.exports.base import Patched
from batchtune.results import ReadingRecord, StreamSweep

RECIPE = """\
# my training
sample_rate: 16000
dynamic_batch_kwargs:
    len_key: wav  # a tensor
    sampler_kwargs:
        target_batch_numel: !ref <sample_rate> * 45
        max_batch_numel: !ref <sample_rate> * 60
valid_dynamic_batch_kwargs:
    len_key: wav
    sampler_kwargs: {target_batch_numel: 100000}
"""
NODE = """\
sample_rate: 16000
target: 720000
batch: !name:speechbrain.dataio.iterators.dynamic_bucketed_batch
    len_key: signal
    buffersize: 512
    sampler_kwargs:
        target_batch_numel: !ref <target>
        max_batch_size: 64
dataloader:
    looped_nominal_epoch: 5
"""


def patched(text: str, found: StreamSweep | None = None, **options: Any) -> Patched:
    patch = export_of("speechbrain-stream").patch
    assert patch is not None
    result: Patched = patch(
        text, Tuned(stream=found or made_stream(recommended="speechbrain")), **options
    )
    return result


def test_limits_of_the_users_own_are_kept_and_others_added() -> None:
    own = RECIPE.replace(
        "    len_key: wav  #", "    min_sample_len: 4000\n    len_key: wav  #"
    )
    text = patched(own).text
    assert (
        "    min_sample_len: 4000\n" in text and "    max_sample_len: 392400\n" in text
    )


def test_the_training_gets_the_row_in_samples() -> None:
    result = patched(RECIPE)
    assert (
        result.text
        == """\
# my training
sample_rate: 16000
dynamic_batch_kwargs:
    len_key: wav  # a tensor
    buffersize: 1024
    min_sample_len: 1
    max_sample_len: 392400
    sampler_kwargs:
        max_padding_ratio: 0.15
        target_batch_numel: 8960000
        max_batch_numel: 9600000
valid_dynamic_batch_kwargs:
    len_key: wav
    sampler_kwargs: {target_batch_numel: 100000}
"""
    )
    assert result.notes == (
        "The numels count samples, 16,000 a second (sample_rate).",
        "Give make_dataloader looped_nominal_epoch=395, the batches of an epoch on each rank.",
    )
    assert patched(result.text).text == result.text


def test_hyperpyyaml_makes_the_tuned_function_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    iterators = types.ModuleType("made_iterators")
    vars(iterators)["dynamic_bucketed_batch"] = dict
    monkeypatch.setitem(__import__("sys").modules, "made_iterators", iterators)
    found = patched(NODE)
    loaded = hyperpyyaml.load_hyperpyyaml(
        found.text.replace("speechbrain.dataio.iterators", "made_iterators")
    )
    batch: partial[Any] = loaded["batch"]
    assert batch.keywords["buffersize"] == 1024
    assert batch.keywords["sampler_kwargs"] == {
        "target_batch_numel": 8_960_000,
        "max_batch_numel": 9_600_000,
        "max_padding_ratio": 0.15,
        "max_batch_size": 64,
    }
    assert loaded["dataloader"] == {"looped_nominal_epoch": 395}


def test_limits_in_seconds_stay_seconds() -> None:
    found = patched("target_batch_numel: 45\nmax_batch_numel: 60\nsample_rate: 16000\n")
    for line in (
        "target_batch_numel: 560\n",
        "max_batch_numel: 600\n",
        "buffersize: 1024\n",
    ):
        assert line in found.text


def test_limits_of_the_lengths_are_written() -> None:
    made = made_stream(recommended="speechbrain")
    lengths = msgspec.structs.replace(
        made.lengths, reading=ReadingRecord(max_length=24.525)
    )
    found = patched(RECIPE, msgspec.structs.replace(made, lengths=lengths))
    assert "    max_sample_len: 392400\n" in found.text


def test_a_key_path_names_the_function_or_its_sampler() -> None:
    for path in (
        "valid_dynamic_batch_kwargs",
        "valid_dynamic_batch_kwargs.sampler_kwargs",
    ):
        assert (
            "sampler_kwargs: {max_padding_ratio: 0.15, max_batch_numel: 9600000, "
            in patched(RECIPE, key_path=path).text
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_batch_length: 600\n",
            r"has no settings of dynamic_bucketed_batch \(target_batch_numel\)",
        ),
        (
            "a: {target_batch_numel: 1}\nb: {target_batch_numel: 2}\n",
            "has 2 blocks of batching settings: a, b",
        ),
        (
            "target_batch_numel: 720000\n",
            "counts samples, but the sweep counted s, and the file has no sample_",
        ),
        (
            "sample_rate: 8000\nb: !include:x.yaml\n    target_batch_numel: 720000\n",
            "are in another file",
        ),
        ("- 1\n", "holds no settings by name"),
    ],
)
def test_a_file_that_can_not_be_patched_is_refused(text: str, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        patched(text)
