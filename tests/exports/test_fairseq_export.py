"""fairseq: batches that it makes with the flags that are written."""

import shlex

import numpy as np
import pytest
from buckets.speech import swept
from exports.stream_runs import content, prose, rendered
from msgspec.structs import replace
from real_lengths import librispeech_samples
from report_records import made_sweep
from ruamel.yaml import YAML

from batchtune.results import SweepSettings

RATE = 16_000


def flags(made):
    """As the shell gives them to fairseq-train, with `grep -v "^#"`."""
    lines = content("fairseq", rendered("fairseq", made))
    words = shlex.split("\n".join(lines))
    assert all(word.startswith("--") for word in words[::2])
    return {
        name[2:]: int(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }


def test_the_flags():
    assert flags(made_sweep()) == {
        "max-tokens": 9_600_000,
        "batch-size": 425,
        "required-batch-size-multiple": 1,
        "max-sample-size": 392_400,
    }


def test_the_form_for_hydra_says_the_same():
    text = rendered("fairseq", made_sweep())
    lines = text.split("fairseq-hydra-train:\n")[1].splitlines()
    document = YAML(typ="safe", pure=True).load(
        "\n".join(line.removeprefix("#") for line in lines)
    )
    assert document == {
        "dataset": {
            "max_tokens": 9_600_000,
            "batch_size": 425,
            "required_batch_size_multiple": 1,
        },
        "task": {"max_sample_size": 392_400},
    }


@pytest.mark.parametrize(
    ("unit", "name", "longest"),
    [
        ("samples", "max-sample-size", 25),
        ("frames", "max-source-positions", 25),
        ("tokens", "max-source-positions", 26),
    ],
)
def test_no_example_is_cropped_or_dropped(unit, name, longest):
    assert flags(made_sweep(unit=unit))[name] == longest


def test_the_users_largest_batch_size_is_kept():
    made = replace(made_sweep(), settings=SweepSettings(max_batch_size=64))
    assert flags(made)["batch-size"] == 64


def test_it_says_where_fairseq_stops():
    assert "the longest here, 24.52 s, does not" in prose(
        rendered("fairseq", made_sweep())
    )
    short = replace(made_sweep(), max_batch_length=20.0)
    assert "fairseq WILL stop" in prose(rendered("fairseq", short))


def test_the_real_batches_on_librispeech():
    fast = pytest.importorskip("fairseq.data.data_utils_fast")
    samples = librispeech_samples()
    one_table = {"strategies": ("optimal",), "num_buckets": (13,)}
    written = flags(swept(samples / RATE, 600, **one_table))
    indices = np.argsort(samples, kind="stable")[::-1].copy()
    found = fast.batch_by_size_vec(
        indices,
        samples[indices],
        written["max-tokens"],
        written["batch-size"],
        written["required-batch-size-multiple"],
    )
    padded = [len(batch) * int(samples[batch].max()) for batch in found]
    assert max(padded) <= 600 * RATE
    assert sorted(np.concatenate(found)) == list(range(samples.size))
