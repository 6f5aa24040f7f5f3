"""What every manifest format must do. A new format adds a writer of a small file to `samples`, and runs all of it."""

import errno
import gzip
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import SAMPLES, pipe

from batchtune.errors import ManifestError
from batchtune.manifests import FORMATS, ReadOptions, load_lengths, source

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
VALUES = ["3", "12", "1", "7"]
LENGTHS = [12.0, 7.0, 3.0, 1.0]


def _those(wanted):
    return pytest.mark.parametrize(
        "name", [name for name, sample in SAMPLES.items() if wanted(sample)]
    )


all_formats = _those(lambda sample: True)
text_formats = _those(lambda sample: sample.text)
line_formats = _those(lambda sample: sample.first_line is not None and not sample.whole)
free_formats = _those(lambda sample: not sample.whole)
# One of each way to the bytes, for what is the same whatever the format: blocks, one text, a table, an archive.
some_formats = pytest.mark.parametrize(
    "name", ["nemo", "speechbrain-json", "parquet", "webdataset"]
)


@pytest.fixture
def sample(name):
    return SAMPLES[name]


@pytest.fixture
def write(sample):
    return sample.content


@pytest.fixture
def named(name):
    """What must be said of a manifest of the format: its name, where that is not told from the content."""
    return {} if SAMPLES[name].detected else {"format": name}


def test_every_member_of_the_registry_is_held_to_this_suite():
    assert set(SAMPLES) == set(FORMATS) - {"audio"}  # a folder, not a file


@all_formats
def test_the_lengths_are_read_whether_the_format_is_named_or_not(
    read, write, named, name
):
    assert read(write(VALUES), **named).values.tolist() == LENGTHS
    assert read(write(VALUES), format=name).values.tolist() == LENGTHS


@all_formats
def test_compression_is_told_by_the_content_not_by_the_name(read, write, named):
    assert read(gzip.compress(write(VALUES)), **named).values.tolist() == LENGTHS
    assert read(write(VALUES), "manifest.gz", **named).values.tolist() == LENGTHS


@text_formats
def test_byte_order_marks_and_blank_lines_are_skipped(read, write, named):
    content = write(VALUES)
    for variant in (
        b"\xef\xbb\xbf" + content,
        content.replace(b"\n", b"\r\n"),
        content.replace(b"\n", b"\r\n", 2),
        content + b"\n \n\n",
        content.rstrip(),
    ):
        assert read(variant, **named).values.tolist() == LENGTHS, variant


@all_formats
def test_a_pipe_is_read(write, named):
    found = load_lengths(pipe(write(VALUES)), ReadOptions(**named))
    assert found.values.tolist() == LENGTHS


@line_formats
def test_invalid_lengths_have_their_reasons(read, write, named):
    left_out = read(write(["1", *INVALID]), skip_invalid=True, **named).left_out
    assert left_out == Counter(
        f"invalid length ({reason})" for reason in INVALID.values()
    )


@_those(lambda sample: sample.ids)
def test_an_empty_length_is_invalid(refusal, write, named):
    message = refusal(write(["1", "", "3"]), **named).message
    assert "(empty)" in message or "missing" in message or "instead of" in message


@free_formats
def test_five_invalid_lengths_are_named_and_all_are_counted(
    refusal, write, sample, named, monkeypatch
):
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    error = refusal(write(["1"] * 300 + ["0"] * 1200), **named)
    message = error.message
    assert "--skip-invalid" in error.hint
    assert "1,200 of 1,500 rows are invalid" in message
    if sample.ids:
        are_named = [f"'utt{i}'" in message for i in range(300, 307)]
        assert are_named == [True] * 5 + [False] * 2
    if sample.first_line:
        assert f"line {sample.first_line + 300}" in message
    assert "(zero)" in message and "and 1,195 more" in message


@some_formats
def test_it_is_an_error_when_all_rows_are_skipped(refusal, write, named):
    error = refusal(write(["0", "-1"]), skip_invalid=True, **named)
    assert "none of its 2 examples is left" in error.message
    error = refusal(write(VALUES), max_length=0.5, **named)
    assert "longer than --max-length 0.5: 4" in error.message


@some_formats
def test_limits_are_inclusive_after_scaling_and_counted(read, write, named):
    options = {
        "length_scale": "1/2",
        "min_length": 1.0,
        "max_length": 2.5,
        **named,
    }
    lengths = read(write(["1", "2", "3", "5", "6", "7"]), **options)
    assert lengths.values.tolist() == [2.5, 1.5, 1.0]
    assert lengths.left_out == {
        "shorter than --min-length 1": 1,
        "longer than --max-length 2.5": 2,
    }


@all_formats
def test_a_file_without_rows_holds_no_examples(refusal, write, name):
    message = refusal(write([]), format=name).message
    assert "no examples" in message or "is empty" in message


@text_formats
def test_an_empty_file_is_said_to_be_empty(refusal, name):
    for content in ("", "\n \n\n", "\t"):
        assert "is empty" in refusal(content, format=name).message


@line_formats
def test_wrong_encoding_is_named_with_line_and_byte(refusal, write, sample, named):
    content = write(["3", "12", "é", "7"]).replace("é".encode(), b"\xe9")
    place = f"line {sample.first_line + 2}: byte {content.index(0xE9)} of the text"
    assert f"{place} (0xe9) is not UTF-8" in refusal(content, **named).message


@some_formats
def test_an_empty_folder_is_an_error(tmp_path, name):
    with pytest.raises(ManifestError, match="contains no"):
        load_lengths(tmp_path, ReadOptions(format=name))


@some_formats
def test_an_unreadable_file_is_an_error(tmp_path, write, name, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "secret"
    path.write_bytes(write(VALUES))
    monkeypatch.setattr("builtins.open", refuse)  # root may read everything
    with pytest.raises(ManifestError, match="permission denied"):
        load_lengths(path, ReadOptions(format=name))


@all_formats
def test_nothing_is_lost_across_blocks(read, write, named, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    # The format is told from a head that breaks off.
    monkeypatch.setattr(source, "HEAD_BYTES", 2200)
    values = [f"{i}" for i in range(1, 700)]
    assert read(write(values), **named).values.tolist() == [
        float(value) for value in reversed(values)
    ]


@free_formats
@settings(max_examples=6)
@given(
    values=st.lists(st.floats(min_value=1e-6, max_value=1e12), min_size=1, max_size=20)
)
def test_every_float_survives(values, name, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"floats-{name}"
    path.write_bytes(SAMPLES[name].content([repr(value) for value in values]))
    assert np.array_equal(
        load_lengths(path, ReadOptions(format=name)).values,
        sorted(values, reverse=True),
    )
