"""LibriSpeechMix: mixtures of utterances that begin at different times."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from batchtune.manifests.formats.cuts import LibriSpeechMix as FORMAT
from batchtune.manifests.source import Head


def _mixture(name: str, delays: object, durations: object, **more: object) -> dict[str, object]:
    return {"delays": delays, "durations": durations, "id": name, "texts": ["ONE", "TWO THREE"], **more}


def _lines(mixtures: Sequence[object]) -> str:
    return "".join(json.dumps(mixture) + "\n" for mixture in mixtures)


def test_a_mixture_lasts_until_its_last_utterance_ends(read) -> None:
    lengths = read(_lines([_mixture("a", [0.0, 4.5], [5.5, 10.25]), _mixture("b", [0.0, 1.0], [5.5, 2])]))
    assert (lengths.values.tolist(), lengths.unit) == ([14.75, 5.5], "s")


def test_lists_of_the_utterances_can_be_lengths_and_targets(read) -> None:
    content = _lines([_mixture("a", [0.0, 4.5], [5.5, 10.25])])
    assert read(content, length_key="durations", reduce="sum").values.tolist() == [15.75]
    assert read(content, length_key="durations.1").values.tolist() == [10.25]
    assert read(content, target_key="texts", reduce="sum").targets.tolist() == [12.0]


@pytest.mark.parametrize(
    ("delays", "durations", "said"),
    [
        ([0.0], [1.0, 2.0], "1 delays, 2 durations (not as many delays as durations)"),
        ([], [], "[] (an empty list)"),
        ([0.0], ["x"], "'x' (text)"),
        ([None], [1.0], "None (missing)"),
        ([0.0], ["nan"], "'nan' (NaN)"),
        (0.0, [1.0], "missing"),
        ([0.0], None, "missing"),
    ],
)
def test_a_mixture_without_a_length_is_an_invalid_row(refusal, delays: object, durations: object, said: str) -> None:
    message = refusal(_lines([_mixture("a", [0.0], [1.0]), _mixture("b", delays, durations)])).message
    assert f"line 2, id 'b': 'duration' is {said}" in message


@pytest.mark.parametrize(
    "entry",
    [
        {"duration": 2.5, "delays": 3},
        {"delays": 1, "durations": [2.5]},
        {"durations": [2.5]},
        {"meta": {"delays": [], "durations": []}},
        [{"delays": [], "durations": []}],
    ],
)
def test_other_json_is_not_taken_for_mixtures(entry: object) -> None:
    assert not FORMAT.fits(Head(_lines([entry]).encode(), complete=True))
