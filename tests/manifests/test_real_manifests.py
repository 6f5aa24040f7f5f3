"""Real lengths give the numbers that are known of them, in every format."""

import math

import pytest
from real_lengths import COMMON_VOICE, LIBRISPEECH, librispeech_seconds
from samples import SAMPLES

from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions, load_lengths


def test_librispeech_has_its_known_count_and_total():
    lengths = load_lengths(LIBRISPEECH, ReadOptions(length_scale="1/16000"))
    assert (lengths.count, lengths.shortest, lengths.longest, lengths.unit) == (
        28539,
        1.41,
        24.525,
        "s",
    )
    assert lengths.total == pytest.approx(362127.167, abs=6e-4)
    assert math.ceil(lengths.total / 600) == 604  # the bound of batches of 600 s


def test_common_voice_is_in_milliseconds():
    lengths = load_lengths(COMMON_VOICE)
    assert (lengths.count, lengths.shortest, lengths.longest, lengths.unit) == (
        58741,
        1116,
        15156,
        "ms",
    )
    assert lengths.total == 234762780


def test_the_same_lengths_have_one_fingerprint_in_every_format(tmp_path):
    seconds = librispeech_seconds()[:2000]
    fingerprint = Lengths.of(seconds, unit="s").fingerprint
    texts = [repr(length) for length in seconds.tolist()]
    for name, sample in SAMPLES.items():
        if sample.whole:
            continue
        path = tmp_path / name
        path.write_bytes(sample.content(texts))
        lengths = load_lengths(
            path,
            ReadOptions(
                format=name,
                length_key=sample.column,
                unit="s",
                length_scale="1",
            ),
        )
        assert (lengths.count, lengths.fingerprint) == (2000, fingerprint), name
