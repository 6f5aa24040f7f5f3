"""What every manifest format must do. A new format adds a writer of a small file here, and runs all of it."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.errors import BatchtuneError, ManifestError, UsageError
from batchtune.manifests import FORMATS, ReadOptions, load_lengths, source
from batchtune.manifests.source import Head

Writer = Callable[[Sequence[str]], str]


def _speechbrain_json(values: Sequence[str]) -> str:
    entries = ",\n".join(f'"utt{i}": {{"duration": "{value}", "wrd": "A"}}' for i, value in enumerate(values))
    return f"{{\n{entries}\n}}\n" if values else "{\n}\n"


def _nemo(values: Sequence[str]) -> str:
    return "".join(f'{{"audio_filepath": "utt{i}", "duration": "{v}"}}\n' for i, v in enumerate(values))


def _speechbrain_csv(values: Sequence[str]) -> str:
    return "ID, duration, wrd\n" + "".join(f"utt{i}, {value}, A\n" for i, value in enumerate(values))


def _table(values: Sequence[str]) -> str:
    return "clip\tduration\n" + "".join(f"utt{i}\t{value}\n" for i, value in enumerate(values))


def _wav2vec(values: Sequence[str]) -> str:
    return "/data/train\n" + "".join(f"utt{i}\t{value}\n" for i, value in enumerate(values))


def _kaldi(values: Sequence[str]) -> str:
    return "".join(f"utt{i} {value} \n" for i, value in enumerate(values))


# Of each format: a writer of a file with these lengths, and the line on which the first of them then stands.
WRITERS: dict[str, tuple[Writer, int]] = {
    "speechbrain-json": (_speechbrain_json, 2),
    "nemo": (_nemo, 1),
    "speechbrain-csv": (_speechbrain_csv, 2),
    "table": (_table, 2),
    "wav2vec": (_wav2vec, 2),
    "kaldi": (_kaldi, 1),
}
INVALID = {
    "abc": "text",
    "0": "zero",
    "-0.0": "zero",
    "-2.5": "negative",
    "nan": "NaN",
    "inf": "infinite",
    "-inf": "infinite",
    "1e400": "infinite",
    "9" * 400: "infinite",
    "1_000": "text",
}

VALUES = ["3.5", "12", "1.25", "7e0"]
LENGTHS = [12.0, 7.0, 3.5, 1.25]

pytestmark = pytest.mark.parametrize("name", WRITERS)


@pytest.fixture
def write(name: str) -> Writer:
    return WRITERS[name][0]


def test_every_member_of_the_registry_is_held_to_this_suite(name: str) -> None:
    assert set(WRITERS) == set(FORMATS)


def test_the_registry_calls_a_format_by_its_name(name: str) -> None:
    assert FORMATS[name].name == name


def test_the_format_is_detected_from_the_content(name: str, write: Writer) -> None:
    head = Head(write(VALUES).encode(), complete=True)
    assert next(key for key, member in FORMATS.items() if member.fits(head)) == name


def test_the_format_is_detected_where_the_file_is_longer_than_the_head(name: str, write: Writer) -> None:
    head = Head(write(["1.5"] * 9000).encode()[: source.HEAD_BYTES], complete=False)
    assert next(key for key, member in FORMATS.items() if member.fits(head)) == name


def test_the_lengths_are_read(read, write: Writer, name: str) -> None:
    assert read(write(VALUES)).values.tolist() == LENGTHS


def test_the_format_can_be_named(read, write: Writer, name: str) -> None:
    assert read(write(VALUES), format=name).values.tolist() == LENGTHS


def test_gzip_is_told_by_the_content_not_by_the_name(read, write: Writer, name: str) -> None:
    assert read(gzip.compress(write(VALUES).encode())).values.tolist() == LENGTHS


def test_a_plain_file_may_be_called_gz(read, write: Writer, name: str) -> None:
    assert read(write(VALUES), "manifest.gz").values.tolist() == LENGTHS


def test_a_byte_order_mark_is_passed_over(read, write: Writer, name: str) -> None:
    assert read(b"\xef\xbb\xbf" + write(VALUES).encode()).values.tolist() == LENGTHS


def test_windows_line_ends_are_passed_over(read, write: Writer, name: str) -> None:
    assert read(write(VALUES).replace("\n", "\r\n")).values.tolist() == LENGTHS


def test_blank_lines_at_the_end_are_passed_over(read, write: Writer, name: str) -> None:
    assert read(write(VALUES) + "\n \n\n").values.tolist() == LENGTHS


def test_the_last_line_may_lack_its_end(read, write: Writer, name: str) -> None:
    assert read(write(VALUES).rstrip()).values.tolist() == LENGTHS


def test_a_pipe_is_read(write: Writer, name: str) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write(write(VALUES))
    try:
        assert load_lengths(Path(f"/dev/fd/{reading}")).values.tolist() == LENGTHS
    finally:
        os.close(reading)


def test_the_length_scale_is_exact(read, write: Writer, name: str) -> None:
    samples = [243760, 268320, 81441, 152323]
    lengths = read(write([str(value) for value in samples]), length_scale=Fraction(1, 16000))
    assert sorted(lengths.values.tolist()) == sorted(value / 16000 for value in samples)


@pytest.mark.parametrize("value", INVALID)
def test_an_invalid_length_is_named_with_id_line_and_reason(refusal, write: Writer, name: str, value: str) -> None:
    message = refusal(write(["1", "2", value, "3"])).message
    first_line = WRITERS[name][1]
    assert "1 of 4 rows is invalid" in message
    assert f"line {first_line + 2}, id 'utt2'" in message
    assert f"({INVALID[value]})" in message


def test_an_empty_length_is_invalid(refusal, write: Writer, name: str) -> None:
    message = refusal(write(["1", "", "3"])).message
    assert "(empty)" in message or "missing" in message


def test_of_many_invalid_lengths_the_first_five_are_named_and_all_are_counted(
    refusal, write: Writer, name: str
) -> None:
    message = refusal(write(["1", *["0"] * 1200])).message
    assert "1,200 of 1,201 rows are invalid" in message
    assert [f"'utt{i}'" in message for i in range(1, 8)] == [True] * 5 + [False] * 2
    assert "and 1,195 more" in message


def test_the_hint_offers_to_skip_invalid_rows(refusal, write: Writer, name: str) -> None:
    assert "--skip-invalid" in refusal(write(["1", "0"])).hint


def test_skipped_rows_are_counted_by_reason(read, write: Writer, name: str) -> None:
    lengths = read(write(["1", "0", "-1", "0", "x", "2"]), skip_invalid=True)
    assert lengths.values.tolist() == [2.0, 1.0]
    assert lengths.left_out == {
        "invalid length (zero)": 2,
        "invalid length (negative)": 1,
        "invalid length (text)": 1,
    }


def test_it_is_an_error_when_all_rows_are_skipped(refusal, write: Writer, name: str) -> None:
    assert "none of its 2 examples is left" in refusal(write(["0", "x"]), skip_invalid=True).message


def test_the_limits_are_inclusive_after_scaling_and_count_what_they_leave_out(read, write: Writer, name: str) -> None:
    options = {"length_scale": Fraction(1, 2), "min_length": 1.0, "max_length": 2.5}
    lengths = read(write(["1", "2", "3", "5", "6", "7"]), **options)
    assert lengths.values.tolist() == [2.5, 1.5, 1.0]
    assert lengths.left_out == {"shorter than --min-length 1": 1, "longer than --max-length 2.5": 2}


def test_it_is_an_error_when_the_limits_leave_nothing(refusal, write: Writer, name: str) -> None:
    assert "longer than --max-length 0.5: 4" in refusal(write(VALUES), max_length=0.5).message


def test_a_file_without_rows_holds_no_examples(refusal, write: Writer, name: str) -> None:
    message = refusal(write([]), format=name).message
    assert "no examples" in message or "is empty" in message


@pytest.mark.parametrize("content", ["", "\n \n\n", "\t"])
def test_an_empty_file_is_said_to_be_empty(refusal, name: str, content: str) -> None:
    assert "is empty" in refusal(content, format=name).message


def test_an_unknown_length_key_is_an_error(refusal, write: Writer, name: str) -> None:
    assert "has no column 'durations'" in refusal(write(VALUES), length_key="durations").message


def test_truncated_gzip_breaks_off(refusal, write: Writer, name: str) -> None:
    assert "breaks off" in refusal(gzip.compress(write(VALUES * 100).encode())[:-12], format=name).message


def test_corrupt_gzip_is_damaged(refusal, write: Writer, name: str) -> None:
    content = bytearray(gzip.compress(write(VALUES * 100).encode()))
    content[-6] ^= 0xFF
    assert "is damaged" in refusal(bytes(content), format=name).message


def test_wrong_encoding_is_named_with_line_and_byte(refusal, write: Writer, name: str) -> None:
    content = write(VALUES).replace("utt2", "é").encode("latin-1")
    message = refusal(content).message
    assert f"line {WRITERS[name][1] + 2}: byte {content.index(0xE9)} of the text (0xe9) is no UTF-8" in message


def test_utf16_is_named(refusal, write: Writer, name: str) -> None:
    assert "UTF-16" in refusal(write(VALUES).encode("utf-16"), format=name).message


def test_a_nul_byte_is_named_with_its_line(refusal, write: Writer, name: str) -> None:
    content = write(VALUES).replace("utt2", "u\0t2")
    assert f"line {WRITERS[name][1] + 2}: NUL byte" in refusal(content, format=name).message


def test_a_missing_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="does not exist"):
        load_lengths(tmp_path / "absent", ReadOptions(format=name))


def test_a_folder_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="is a folder"):
        load_lengths(tmp_path, ReadOptions(format=name))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_an_error(tmp_path: Path, write: Writer, name: str) -> None:
    path = tmp_path / "secret"
    path.write_text(write(VALUES))
    path.chmod(0)
    with pytest.raises(ManifestError, match="permission denied"):
        load_lengths(path, ReadOptions(format=name))


def test_lines_are_counted_across_blocks(refusal, write: Writer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    assert f"line {WRITERS[name][1] + 300}, id 'utt300'" in refusal(write(["1"] * 300 + ["0", "1"])).message


def test_nothing_is_lost_across_blocks(read, write: Writer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    values = [f"{i}.5" for i in range(1, 500)]
    assert read(write(values)).values.tolist() == [float(value) for value in reversed(values)]


def test_the_order_of_the_rows_does_not_change_the_fingerprint(read, write: Writer, name: str) -> None:
    assert read(write(VALUES)).fingerprint == read(write(VALUES[::-1])).fingerprint


@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.floats(min_value=1e-6, max_value=1e12), min_size=1, max_size=20))
def test_every_float_survives(values: list[float], name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"floats-{name}"
    path.write_text(WRITERS[name][0]([repr(value) for value in values]))
    assert np.array_equal(load_lengths(path).values, sorted(values, reverse=True))


@settings(deadline=None, max_examples=60)
@given(content=st.one_of(st.binary(max_size=200), st.text('{}[]":,;\t\n /a1-.N', max_size=80).map(str.encode)))
@example(content=b'{"a":' * 5000)
@example(content=b'"' + b'\\"' * 20000)
@example(content=b'ID,duration\na,"1\n')
@example(content=b"\x1c")
def test_any_bytes_give_lengths_or_a_user_error(
    content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"bytes-{name}"
    path.write_bytes(content)
    with contextlib.suppress(BatchtuneError):
        load_lengths(path)
    with contextlib.suppress(BatchtuneError):
        load_lengths(path, ReadOptions(format=name))


def test_a_misspelt_format_is_corrected(read, write: Writer, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(write(VALUES), format=name[:-1])
    assert caught.value.hint is not None
    assert f"Did you mean {name!r}?" in caught.value.hint
