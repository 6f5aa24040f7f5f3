"""JSON manifests: SpeechBrain's object of objects, lists, and objects on lines."""

from __future__ import annotations

import json

import pytest


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


def test_a_key_with_a_quote_in_it_can_be_read(read) -> None:
    assert read(
        '{"du\\"r": 3}\n{"du\\"r": 4}\n', length_key='du"r'
    ).values.tolist() == [4.0, 3.0]


@pytest.mark.parametrize("content", ['{"a":' * 100_000, "[" * 100_000])
def test_json_nested_too_deeply_is_said_to_be(refusal, content: str) -> None:
    assert "line 1: the JSON is nested too deeply" in refusal(content).message


def test_keys_that_only_a_later_line_has_are_found(read) -> None:
    lengths = read('{"text": "a"}\n{"text": "b", "duration": 2}\n', skip_invalid=True)
    assert lengths.values.tolist() == [2.0]
    assert lengths.left_out == {"invalid length (missing)": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"duration": 1}\n\n\n{"duration": 0}\n', "line 4: 'duration' is"),
        (
            '{"duration": 1}\n{"duration": 2, "text": ',
            "line 2: Input data was truncated",
        ),
        ('{"duration": 1}\n{"duration": }\n', "line 2: JSON is malformed"),
        ('{"duration": 1}\n{"duration": NaN}\n', "line 2: 'duration' is missing"),
        ('{"duration": 1}\n[2]\n', "line 2: Expected `object`"),
        (
            '{"a": {"duration": 1},\n"b": {"duration": ',
            "line 2: Input data was truncated",
        ),
        (
            '{"a": {"duration": 1},\n"b": {"duration": 2}\n"c": {}}',
            "line 3: JSON is malformed",
        ),
        ('{"a": {"duration": 1},\n"b": 3}', "id 'b': Expected `object`"),
        (
            '{"a": {"duration": 1},\n"b": {"duration": 1e400}}',
            "id 'b': Number out of range",
        ),
        ('[{"duration": 1},\n{"duration": -1}]', "item 2: 'duration' is -1"),
        ('[{"duration": 1},\n3]', "item 2: Expected `object`"),
        ("{}", "holds no examples"),
    ],
)
def test_damage_is_named_with_its_place(refusal, content: str, said: str) -> None:
    assert said in refusal(content).message


def test_the_hint_shows_the_format(refusal) -> None:
    assert (
        "one whole JSON object on every line" in refusal('{\n"duration": 1\n}\n').hint
    )
    assert '{"id": {"duration"' in refusal("[1]", format="speechbrain-json").hint


def test_a_line_whose_first_value_is_an_object_is_still_a_line(read) -> None:
    line = '{"meta": {"a": 1}, "duration": 2}\n'
    assert read(line * 2).values.tolist() == [2.0, 2.0]
    assert read(line).values.tolist() == [2.0]


def test_a_wrongly_named_format_is_the_error_not_its_columns(refusal) -> None:
    line = '{"a": {"duration": 1, "num_samples": 16000}}\n'
    message = refusal(line * 2, format="json-list").message
    assert "Expected `array`, got `object`" in message
    message = refusal(line * 2, format="speechbrain-json").message
    assert "line 2: JSON is malformed" in message


def test_ids_may_hold_quotes_and_braces(read) -> None:
    content = '{\n"a\\"b": {"duration": 1},\n"}": {"duration": 2}\n}\n'
    assert read(content).values.tolist() == [2.0, 1.0]


def test_an_object_of_objects_on_one_line_is_speechbrains(read) -> None:
    assert read('{"a": {"length": 2}, "b": {"length": "3"}}').values.tolist() == [
        3.0,
        2.0,
    ]


def test_a_first_entry_longer_than_the_head_is_read(read) -> None:
    text = "x" * 2_000_000
    assert read(f'{{"text": "{text}", "duration": 2}}\n').values.tolist() == [2.0]
    assert read(f'[{{"text": "{text}", "duration": 2}}]').values.tolist() == [2.0]


def test_of_two_entries_with_one_id_the_last_counts(read) -> None:
    content = '{"a": {"duration": 1},\n"b": {"duration": 0},\n"a": {"duration": 2}}'
    assert read(content, skip_invalid=True).values.tolist() == [2.0]


@pytest.mark.parametrize("is_list", [False, True])
def test_cuts_of_lhotse_have_their_durations_and_texts(read, is_list: bool) -> None:
    supervisions = [{"id": "1", "text": "hello"}, {"id": "2", "text": "you"}]
    cut = {
        "id": "a",
        "start": 0,
        "duration": 2.5,
        "channel": 0,
        "supervisions": supervisions,
        "type": "MonoCut",
    }
    written = json.dumps([cut] if is_list else cut) + "\n"
    lengths = read(written, target_key="supervisions.text", reduce="sum")
    assert (lengths.values.tolist(), lengths.targets.tolist(), lengths.unit) == (
        [2.5],
        [8.0],
        "s",
    )


def test_a_mixed_cut_of_lhotse_is_named(refusal) -> None:
    cut = '{"id": "a", "duration": 2.5, "type": "MonoCut"}\n'
    assert (
        "line 2, id 'm': 'duration' is missing"
        in refusal(f'{cut}{{"id": "m", "tracks": [], "type": "MixedCut"}}\n').message
    )
