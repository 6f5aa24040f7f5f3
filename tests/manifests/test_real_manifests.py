"""Real lengths give the numbers that are known of them."""

import math

import pytest
from real_lengths import COMMON_VOICE, LIBRISPEECH

from batchtune.manifests import ReadOptions, load_lengths


def test_librispeech_has_its_known_count_and_total():
    lengths = load_lengths(LIBRISPEECH, ReadOptions(length_scale="1/16000"))
    assert (lengths.count, lengths.unit) == (28539, "s")
    assert (lengths.shortest, lengths.longest) == (1.41, 24.525)
    assert lengths.total == pytest.approx(362127.167, abs=6e-4)
    assert math.ceil(lengths.total / 600) == 604  # the bound of batches of 600 s


def test_common_voice_is_in_milliseconds():
    lengths = load_lengths(COMMON_VOICE)
    assert (lengths.count, lengths.unit) == (58741, "ms")
    assert (lengths.shortest, lengths.longest) == (1116, 15156)
    assert lengths.total == 234762780
