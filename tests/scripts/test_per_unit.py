"""How many samples, frames or tokens are one unit of the manifest, and when that can't be told."""

import numpy as np
import pytest

from batchtune.scripts.learning import Unclear
from batchtune.scripts.relations import Scale, digit_of, scale_by_rows, units_per_length


def durations(seed):
    """Of 5,000 utterances in seconds, to the sample."""
    seconds = np.random.default_rng(seed).lognormal(1.8, 0.6, 5000).clip(0.5, 30)
    return np.round(seconds * 16000) / 16000


def found(sizes, lengths):
    part = np.random.default_rng(0).choice(sizes, 200, replace=False)
    seen = [int(size) for size in part]
    return units_per_length(seen, np.sort(lengths), what="sig")


@pytest.mark.parametrize("seed", range(5))
def test_samples_frames_and_rounded_manifests(seed):
    seconds = durations(seed)
    samples = np.round(seconds * 16000)
    assert found(samples, seconds) == 16000
    assert found(samples, np.round(seconds, 2)) == 16000
    assert found(samples, np.round(seconds * 1000)) == 16
    assert found(samples, samples) == 1
    assert found(np.floor(seconds * 100), seconds) == 100
    assert found(np.floor(samples / 256), samples / 22050) == pytest.approx(22050 / 256)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_one_to_one(seed):
    random = np.random.default_rng(seed)
    tokens = np.sort(random.lognormal(5.5, 0.8, 20000).clip(3, 5000).round())
    assert found(tokens, tokens) == 1
    # Of few whole batches, the manifest has halves and thirds too.
    assert units_per_length(tokens[-600::100].tolist(), tokens, what="ids") == 1


def test_words_are_not_tokens():
    words = np.random.default_rng(0).lognormal(3, 0.6, 20000).round() + 1
    message = "'sig' runs from 7 to 169 in 200 .* from 3 to 215: no common ratio fits"
    with pytest.raises(Unclear, match=message) as raised:
        found(np.ceil(words * 1.37), words)
    assert "--per-unit" in str(raised.value.hint)


@pytest.mark.parametrize(("per_unit", "offset"), [(1.0, 0), (1.0, 2), (100.0, 1)])
def test_rows_in_order_tell_what_an_axis_has_in_addition(per_unit, offset):
    rows = (np.random.default_rng(0).integers(20, 400, 200) / per_unit).tolist()
    seen = [round(per_unit * length) + offset for length in rows]
    scale = scale_by_rows(seen, rows, digit_of(np.array(rows)), None)
    assert scale == Scale(per_unit, offset)
    assert scale.size(rows[0]) == seen[0]


def test_samples_are_found_though_the_manifest_is_rounded():
    seconds = durations(0)[:200]
    samples = np.round(seconds * 16000).astype(int).tolist()
    scale = scale_by_rows(samples, np.round(seconds, 2).tolist(), 0.01, None)
    assert scale.per_unit == 16000


def test_a_given_ratio_that_the_rows_refute_is_an_error():
    rows = np.random.default_rng(0).integers(20, 400, 200).tolist()
    with pytest.raises(Unclear, match=r"--per-unit 2 is wrong: .* it is 1"):
        scale_by_rows(rows, rows, 1.0, 2.0)
