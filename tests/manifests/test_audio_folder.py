"""The format `audio`: a folder of audio files, with what lies beside them."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import wav

from batchtune.manifests import load_lengths
from batchtune.manifests.base import Column, choose_column
from batchtune.manifests.formats.audio_folder import AudioFolder as FORMAT
from batchtune.manifests.source import Source
from batchtune.manifests.values import Unreadable

Folder = Callable[[dict[str, bytes | str]], Source]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes files and names them as the source does: folder({"a.wav": …})."""

    def write(files: dict[str, bytes | str]) -> Source:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return Source(tmp_path, sorted(files))

    return write


def columns(source: Source) -> dict[str, Column]:
    found = FORMAT(source).columns()
    assert len({column.name for column in found}) == len(found)
    return {column.name: column for column in found}


def values(source: Source, key: str = "duration") -> list[object]:
    return [one for rows in FORMAT(source).rows([key]) for one in rows.columns[0]]


def left_out(source: Source) -> dict[str, int]:
    found: Counter[str] = Counter()
    for rows in FORMAT(source).rows(["duration"]):
        found.update(rows.left_out)
    return dict(found)


def test_each_audio_file_is_an_example(folder: Folder) -> None:
    source = folder({"a.wav": wav(8000), "b.wav": wav(16_000), "deep/er/a.wav": wav(24_000)})
    assert values(source) == [0.5, 1.0, 1.5]
    assert values(source, "num_samples") == [8000, 16_000, 24_000]


def test_formats_and_rates_may_be_mixed(folder: Folder) -> None:
    soundfile = pytest.importorskip("soundfile")
    files: dict[str, bytes | str] = {}
    for name, rate in (("a.flac", 8000), ("b.ogg", 16_000), ("c.WAV", 44_100), ("d.mp3", 22_050)):
        stream = io.BytesIO()
        soundfile.write(stream, np.zeros(2 * rate), rate, format=name[2:].upper())
        files[name] = stream.getvalue()
    assert values(folder(files)) == [2.0] * 4


def test_estimated_lengths_are_counted_in_a_note(tmp_path: Path) -> None:
    pytest.importorskip("mutagen")
    frame = bytes.fromhex("fffb90c4") + bytes(413)  # MPEG 1, layer III, 128 kbit/s, 44.1 kHz: 1152 samples
    (tmp_path / "a.mp3").write_bytes(frame * 100)
    (tmp_path / "b.mp3").write_bytes(frame * 200)
    (tmp_path / "c.wav").write_bytes(wav(8000))
    lengths = load_lengths(tmp_path)
    assert lengths.values.tolist() == pytest.approx([200 * 1152 / 44_100, 100 * 1152 / 44_100, 0.5], rel=0.003)
    assert lengths.notes[-1].startswith("2 lengths of MP3 files without a Xing or VBRI header: estimated")


def test_the_audio_columns_show_the_first_undamaged_file(folder: Folder) -> None:
    found = columns(folder({"a.wav": b"", "b.wav": wav(8000)}))
    assert (found["duration"].example, found["duration"].numeric) == (0.5, True)
    assert (found["num_samples"].example, found["num_samples"].numeric) == (8000, True)


def test_a_file_that_can_not_be_read_is_an_unreadable_length(folder: Folder) -> None:
    found = values(folder({"a.wav": wav(8000), "b.wav": wav(8000)[:-1], "c.wav": b"text"}))
    assert found[0] == 0.5
    assert found[1:] == [
        Unreadable("truncated WAV", "15,999 of 16,000 bytes of audio"),
        Unreadable("no audio header", "a file that begins with b'text'"),
    ]


def test_a_file_that_is_gone_or_a_pipe_is_an_unreadable_length(folder: Folder, tmp_path: Path) -> None:
    source = folder({"a.wav": wav(1), "b.wav": wav(1)})
    (tmp_path / "a.wav").unlink()
    (tmp_path / "b.wav").unlink()
    os.mkfifo(tmp_path / "b.wav")
    assert values(source) == [
        Unreadable("can't be read", "No such file or directory"),
        Unreadable("not a regular file"),
    ]


def test_a_row_is_placed_by_its_name_in_the_folder(folder: Folder) -> None:
    chunks = list(FORMAT(folder({"a.wav": wav(1), "deep/b.wav": wav(2)})).rows(["duration"]))
    assert [str(rows.place(index)) for rows in chunks for index in range(len(rows.columns[0]))] == [
        "id 'a.wav'",
        "id 'deep/b.wav'",
    ]
    assert [name for rows in chunks for name in rows.ids()] == ["a.wav", "deep/b.wav"]


def test_rows_come_by_the_thousand_with_progress(folder: Folder) -> None:
    source = folder({f"{index:04d}.wav": b"" for index in range(2500)})
    told: list[float] = []
    source.report = told.append
    assert [len(rows.columns[0]) for rows in FORMAT(source).rows(["duration"])] == [0, 1000, 1000, 500]
    assert told == [0.4, 0.8, 1.0]


# What lies beside


def test_text_of_the_same_name_is_a_column(folder: Folder) -> None:
    source = folder({"a.wav": wav(1), "a.txt": "hello world\n", "b.wav": wav(2), "b.TXT": "über\r\n"})
    column = columns(source)["txt"]
    assert (column.example, column.numeric, column.text) == ("hello world", False, True)
    assert values(source, "txt") == ["hello world", "über"]


def test_a_suffix_may_have_parts(folder: Folder) -> None:
    source = folder({"x/1_a.wav": wav(1), "x/1_a.normalized.txt": "one", "x/1_a.original.txt": "1"})
    assert list(columns(source)) == ["duration", "num_samples", "normalized.txt", "original.txt"]
    assert values(source, "normalized.txt") == ["one"]


def test_a_name_may_have_dots(folder: Folder) -> None:
    source = folder({"a.wav": wav(1), "a.b.wav": wav(2), "a.b.txt": "of a.b", "a.txt": "of a"})
    assert values(source, "txt") == ["of a.b", "of a"]


def test_numbers_are_a_numeric_column_only_where_all_are(folder: Folder) -> None:
    found = columns(folder({"a.wav": b"", "a.cls": "7\n", "a.txt": "7", "b.wav": b"", "b.cls": "8", "b.txt": "oh"}))
    assert (found["cls"].numeric, found["cls"].text) == (True, False)
    assert (found["txt"].numeric, found["txt"].text) == (False, True)


def test_fields_of_json_are_columns(folder: Folder) -> None:
    entry = {"text": "hello", "speaker": {"id": "s1", "age": 30}, "a.b": 5, "tokens": [1, 2]}
    source = folder({"a.wav": wav(1), "a.json": json.dumps(entry), "b.wav": wav(1), "b.json": "{}"})
    found = columns(source)
    assert set(found) == {
        *("duration", "num_samples", "json.text", "json.speaker.id", "json.speaker.age", "json.a.b", "json.tokens")
    }
    assert found["json.text"].text and found["json.speaker.age"].numeric
    assert values(source, "json.speaker.age") == [30, None]
    assert values(source, "json.a.b") == [5, None]
    assert values(source, "json.tokens") == [[1, 2], None]


@pytest.mark.parametrize(
    ("name", "content", "unreadable"),
    [
        ("a.txt", b"\xff\xfeh\0", Unreadable("not text", "byte 0 is not UTF-8")),
        ("a.txt", b"a\0b", Unreadable("not text", "it holds NUL bytes")),
        ("a.txt", b"a" * 1_048_577, Unreadable("longer than 1 MiB of text", "1,048,577 bytes")),
    ],
)
def test_what_is_no_text_is_unreadable(folder: Folder, name: str, content: bytes, unreadable: Unreadable) -> None:
    source = folder({"a.wav": wav(1), name: content})
    assert not columns(source)["txt"].text
    assert values(source, "txt") == [unreadable]


def test_length_and_target_are_read_side_by_side(folder: Folder) -> None:
    source = folder({"a.wav": wav(16_000), "a.json": '{"text": "hi", "tokens": 3}'})
    rows = [rows for rows in FORMAT(source).rows(["duration", "json.text"]) if len(rows.columns[0])]
    assert [tuple(map(list, one.columns)) for one in rows] == [([1.0], ["hi"])]
    rows = [rows for rows in FORMAT(source).rows(["json.tokens", "num_samples"]) if len(rows.columns[0])]
    assert [tuple(map(list, one.columns)) for one in rows] == [([3], [16_000])]


def test_a_suffix_named_like_an_audio_column_is_not_one(folder: Folder) -> None:
    source = folder({"a.wav": wav(16_000), "a.duration": "7"})
    assert list(columns(source)) == ["duration", "num_samples"]
    assert values(source) == [1.0]


# What is no example


def test_files_that_belong_to_no_audio_file_are_counted(folder: Folder) -> None:
    source = folder({"README": "", "a.wav": wav(1), "b.txt": "", "c.pth": b"", "d.trans.txt": "", "a.txt": ""})
    assert left_out(source) == {"no audio file": 4}


def test_audio_that_is_not_read_is_counted_as_such(folder: Folder) -> None:
    source = folder({"a.wav": wav(1), "b.au": b"", "c.CAF": b""})
    assert left_out(source) == {"audio in a format that is not read: convert it to WAV or FLAC": 2}


def test_two_audio_files_of_one_name_are_one_example(folder: Folder) -> None:
    source = folder({"a.flac": b"", "a.wav": wav(1), "a.txt": "x"})
    assert left_out(source) == {"the same name as another audio file, but for the suffix": 1}
    assert len(values(source)) == 1


def test_a_part_of_a_folder_without_audio_has_no_rows(folder: Folder) -> None:
    source = folder({"a.txt": "", "b.txt": ""})
    assert choose_column(source.path, FORMAT(source).columns()[:1], None).name == "duration"
    assert values(source) == []
    assert left_out(source) == {"no audio file": 2}
