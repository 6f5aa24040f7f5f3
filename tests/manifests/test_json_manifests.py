"""JSON manifests: SpeechBrain's object of objects, lists, and objects on lines."""

from __future__ import annotations

import json

import pytest
from manifests.conftest import cases

LONG = "x" * 2_000_000
ON_A_LINE = '{"meta": {"a": 1}, "duration": 2}\n'
WRONGLY_NAMED = '{"a": {"duration": 1, "num_samples": 16000}}\n' * 2
SKIPPING = {"skip_invalid": True}
READ = {
    "a key with a quote": ('{"du\\"r": 3}\n{"du\\"r": 4}\n', {"length_key": 'du"r'}, [4, 3]),
    "keys that only a later line has": ('{"text": "a"}\n{"text": "b", "duration": 2}\n', SKIPPING, [2]),
    "lines whose first value is an object": (ON_A_LINE * 2, {}, [2, 2]),
    "a single such line": (ON_A_LINE, {}, [2]),
    "ids with quotes and braces": ('{\n"a\\"b": {"duration": 1},\n"}": {"duration": 2}\n}\n', {}, [2, 1]),
    "an object of objects on one line": ('{"a": {"length": 2}, "b": {"length": "3"}}', {}, [3, 2]),
    "a first line longer than the head": (f'{{"text": "{LONG}", "duration": 2}}\n', {}, [2]),
    "a first item longer than the head": (f'[{{"text": "{LONG}", "duration": 2}}]', {}, [2]),
    "of two entries with one id the last": (
        '{"a": {"duration": 1},\n"b": {"duration": 0},\n"a": {"duration": 2}}',
        SKIPPING,
        [2],
    ),
}  # fmt: skip


@cases(READ, "content options lengths")
def test_json_is_read(read, content, options, lengths) -> None:
    assert read(content, **options).values.tolist() == lengths


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("true", "True (a boolean)"),
        ("[1, 2]", "[1, 2] (a list)"),
        ('{"a": 1}', "{'a': 1} (an object)"),
        ("null", "missing"),
        ('" "', "' ' (empty)"),
        ('"1e400"', "'1e400' (infinite)"),
    ],
)
def test_a_value_that_is_no_length_is_shown(refusal, value: str, shown: str) -> None:
    message = refusal(f'{{"duration": 1}}\n{{"duration": {value}}}\n').message
    assert f"line 2: 'duration' is {shown}" in message


LINE = '{"duration": 1}\n'
OBJECT = '{"a": {"duration": 1},\n'
REFUSED = [
    ('{"a":' * 100_000, {}, "line 1: the JSON is nested too deeply"),
    ("[" * 100_000, {}, "line 1: the JSON is nested too deeply"),
    (f'{LINE}\n\n{{"duration": 0}}\n', {}, "line 4: 'duration' is"),
    (f'{LINE}{{"duration": 2, "text": ', {}, "line 2: Input data was truncated"),
    (f'{LINE}{{"duration": }}\n', {}, "line 2: JSON is malformed"),
    (f'{LINE}{{"duration": NaN}}\n', {}, "line 2: 'duration' is missing"),
    (f"{LINE}[2]\n", {}, "line 2: Expected `object`"),
    (f'{OBJECT}"b": {{"duration": ', {}, "line 2: Input data was truncated"),
    (f'{OBJECT}"b": {{"duration": 2}}\n"c": {{}}}}', {}, "line 3: JSON is malformed"),
    (f'{OBJECT}"b": 3}}', {}, "id 'b': Expected `object`"),
    (f'{OBJECT}"b": {{"duration": 1e400}}}}', {}, "id 'b': Number out of range"),
    ('[{"duration": 1},\n{"duration": -1}]', {}, "item 2: 'duration' is -1"),
    ('[{"duration": 1},\n3]', {}, "item 2: Expected `object`"),
    ("{}", {}, "holds no examples"),
    (WRONGLY_NAMED, {"format": "json-list"}, "Expected `array`, got `object`"),
    (WRONGLY_NAMED, {"format": "speechbrain-json"}, "line 2: JSON is malformed"),
    (
        '{"id": "a", "duration": 2.5, "type": "MonoCut"}\n{"id": "m", "tracks": [], "type": "MixedCut"}\n',
        {},
        "line 2, id 'm': 'duration' is missing",
    ),
]


@pytest.mark.parametrize(("content", "options", "said"), REFUSED)
def test_damage_is_named_with_its_place(refusal, content, options, said) -> None:
    assert said in refusal(content, **options).message


def test_the_hint_shows_the_format(refusal) -> None:
    said = "one whole JSON object on every line"
    assert said in refusal('{\n"duration": 1\n}\n').hint
    assert '{"id": {"duration"' in refusal("[1]", format="speechbrain-json").hint


@pytest.mark.parametrize("is_list", [False, True])
def test_cuts_of_lhotse_have_their_durations_and_texts(read, is_list: bool) -> None:
    cut = {
        "id": "a",
        "start": 0,
        "duration": 2.5,
        "channel": 0,
        "supervisions": [{"id": "1", "text": "hello"}, {"id": "2", "text": "you"}],
        "type": "MonoCut",
    }
    written = json.dumps([cut] if is_list else cut) + "\n"
    lengths = read(written, target_key="supervisions.text", reduce="sum")
    assert (lengths.values.tolist(), lengths.unit) == ([2.5], "s")
    assert lengths.targets.tolist() == [8.0]
