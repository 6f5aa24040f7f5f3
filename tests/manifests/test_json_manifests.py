"""JSON manifests: SpeechBrain's object of objects, and objects on lines."""

from __future__ import annotations

import pytest

# ---- both ----


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_pythons_nan_and_infinity_are_not_json(refusal, literal: str) -> None:
    message = refusal(f'{{"id": "a", "duration": 2}}\n{{"id": "b", "duration": {literal}}}\n').message
    assert "line 2, column" in message
    assert "NaN and Infinity are not JSON" in message


def test_a_number_beyond_float64_is_named(refusal) -> None:
    message = refusal('{"a": {"duration": 1},\n"b": {"duration": 1e400}}').message
    assert "line 2, id 'b': Number out of range" in message


def test_a_value_that_is_no_length_is_shown(refusal) -> None:
    for value, shown in [
        ("true", "True (a boolean)"),
        ("[1, 2]", "[1, 2] (a list)"),
        ('{"a": 1}', "{'a': 1} (an object)"),
        ("null", "missing"),
        ('" "', "' ' (empty)"),
        ('"1e400"', "'1e400' (infinite)"),
    ]:
        assert f"'duration' is {shown}" in refusal(f'{{"duration": 1}}\n{{"duration": {value}}}\n').message


def test_a_key_with_a_quote_in_it_can_be_read(read) -> None:
    assert read('{"du\\"r": 3}\n{"du\\"r": 4}\n', length_key='du"r').values.tolist() == [4.0, 3.0]


def test_a_key_named_like_a_field_of_ours_is_not_mistaken(read) -> None:
    assert read('{"target": 9, "length": 8, "duration": 3}\n', length_key="duration").values.tolist() == [3.0]


@pytest.mark.parametrize("name", ["nemo", "speechbrain-json"])
def test_json_nested_too_deeply_is_an_error(refusal, name: str) -> None:
    assert "nested too deeply" in refusal('{"a":' * 100_000, format=name).message


def test_a_list_at_the_top_is_described(refusal) -> None:
    assert "begins with a JSON list" in refusal("[1, 2, 3]").message


# ---- lines ----


def test_keys_that_only_a_later_line_has_are_found(read) -> None:
    lengths = read('{"text": "a"}\n{"text": "b", "duration": 2}\n', skip_invalid=True)
    assert lengths.values.tolist() == [2.0]
    assert lengths.left_out == {"invalid length (missing)": 1}


def test_blank_lines_are_skipped_but_counted_as_lines(refusal) -> None:
    assert "line 4" in refusal('{"duration": 1}\n\n\n{"duration": 0}\n').message


def test_a_line_that_breaks_off_or_is_malformed_is_named(refusal) -> None:
    error = refusal('{"duration": 1}\n{"duration": 2, "text": ')
    assert "line 2, column 25: the JSON breaks off" in error.message
    assert "every line" in error.hint
    assert "line 2, column 14: the JSON is malformed" in refusal('{"duration": 1}\n{"duration": }\n').message


def test_a_line_that_is_no_object_is_named(refusal) -> None:
    assert "line 2 is not a JSON object" in refusal('{"duration": 1}\n[2]\n').message


def test_an_object_over_several_lines_is_told_the_format(refusal) -> None:
    assert "one whole JSON object on every line" in refusal('{\n"duration": 1\n}\n').hint


def test_a_line_whose_first_value_is_an_object_is_still_a_line(read) -> None:
    line = '{"meta": {"a": 1}, "duration": 2}\n'
    assert read(line * 2).values.tolist() == [2.0, 2.0]
    assert read(line).values.tolist() == [2.0]


# ---- object of objects ----


def test_an_object_of_objects_on_one_line_is_speechbrains(read) -> None:
    assert read('{"a": {"length": 2}, "b": {"length": "3"}}').values.tolist() == [3.0, 2.0]


def test_an_empty_object_holds_no_examples(refusal) -> None:
    assert "no examples" in refusal("{}").message


def test_an_entry_that_is_no_object_is_named(refusal) -> None:
    message = refusal('{"a": {"duration": 1},\n"b": 3}').message
    assert "line 2, id 'b' is not a JSON object: 3" in message


def test_a_late_entry_that_is_no_object_is_named(refusal) -> None:
    entries = ",\n".join(f'"u{i}": {{"duration": 1}}' for i in range(3000))
    assert "line 3001, id 'last'" in refusal(f'{{{entries},\n"last": [1]}}').message


def test_damage_to_a_file_is_named_with_line_and_column(refusal) -> None:
    assert "line 2, column 19: the JSON breaks off" in refusal('{"a": {"duration": 1},\n"b": {"duration": ').message
    message = refusal('{"a": {"duration": 1},\n"b": {"duration": 2}\n"c": {}}').message
    assert "line 3, column 1: the JSON is malformed" in message


def test_another_shape_is_shown_the_right_one(refusal) -> None:
    error = refusal("[1]", format="speechbrain-json")
    assert "a JSON list at its top level" in error.message
    assert '{"id": {"duration"' in error.hint


def test_of_two_entries_with_one_id_the_last_counts(read, refusal) -> None:
    content = '{"a": {"duration": 1},\n"b": {"duration": 0},\n"a": {"duration": 2}}'
    assert "line 2, id 'b'" in refusal(content).message
    assert read(content, skip_invalid=True).values.tolist() == [2.0]
