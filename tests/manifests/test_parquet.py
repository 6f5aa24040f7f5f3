"""The format `parquet`, and with it what the columnar formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths, tables
from batchtune.manifests.base import Column, Rows, find_column
from batchtune.manifests.formats.columnar import Parquet as FORMAT
from batchtune.manifests.source import Head, Source
from batchtune.manifests.tables import lengths_table
from batchtune.manifests.values import Unreadable

Write = Callable[..., Source]

CHATS = [
    [{"role": "user", "content": "Hi"}, {"role": "model", "content": "Hello"}],
    [],
    None,
    [{"role": "user", "content": None}],
]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a table, or columns, and opens the file: write({"duration": [1.5]}, row_group_size=10)."""

    def run(columns: Any, **options: Any) -> Source:
        table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
        pyarrow.parquet.write_table(table, tmp_path / "data.parquet", **options)
        return Source(tmp_path / "data.parquet")

    return run


def chunks(source: Source, key: str, target: str | None = None) -> Iterator[Rows]:
    return FORMAT(source).rows([key] if target is None else [key, target])


def values(source: Source, key: str) -> list[object]:
    return [value for rows in chunks(source, key) for value in list(rows.columns[0])]


def ids(source: Source, key: str) -> list[str | None]:
    return [name for rows in chunks(source, key) for name in rows.ids()]


def columns(source: Source) -> dict[str, Column]:
    return {column.name: column for column in FORMAT(source).columns()}


def test_numbers_without_gaps_come_as_an_array_of_floats(write: Write) -> None:
    (rows,) = chunks(write({"duration": pyarrow.array([3, 1, 2], pyarrow.int32())}), "duration")
    assert isinstance(rows.columns[0], np.ndarray)
    assert rows.columns[0].dtype == np.float64
    assert rows.columns[0].tolist() == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pyarrow.array([2**60 + 1], pyarrow.int64()), 2.0**60),
        (pyarrow.array([2**64 - 1], pyarrow.uint64()), 2.0**64),
        (pyarrow.array([7], pyarrow.int8()), 7.0),
        (pyarrow.array([0.5], pyarrow.float32()), 0.5),
        (pyarrow.array(np.array([0.5], np.float16)), 0.5),
        (pyarrow.array([Decimal("3.51")], pyarrow.decimal128(9, 2)), 3.51),
        (pyarrow.array([Decimal("3.51")], pyarrow.decimal256(60, 2)), 3.51),
        (pyarrow.array([1500], pyarrow.duration("ms")), 1.5),
        (pyarrow.array([2_500_000_000], pyarrow.duration("ns")), 2.5),
        (pyarrow.array([90_500], pyarrow.time32("ms")), 90.5),
        (pyarrow.array([1.25], pyarrow.float64()).dictionary_encode(), 1.25),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pyarrow.Array) else "",
)
def test_every_type_of_number_becomes_a_float(write: Write, column: pyarrow.Array, expected: float) -> None:
    source = write({"duration": column})
    assert values(source, "duration") == [expected]
    assert columns(source)["duration"].numeric


def test_a_null_is_missing(write: Write) -> None:
    for kind in [pyarrow.int64(), pyarrow.float64(), pyarrow.decimal128(9, 2), pyarrow.string()]:
        assert values(write({"duration": pyarrow.array([None], kind)}), "duration") == [None]


def test_booleans_stay_what_they_are(write: Write) -> None:
    assert values(write({"duration": [True, False]}), "duration") == [True, False]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(["a", "bé", None], pyarrow.string()),
        pyarrow.array(["a", "bé", None], pyarrow.large_string()),
        pyarrow.array(["a", "bé", None]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_text_comes_as_text(write: Write, column: pyarrow.Array) -> None:
    source = write({"text": column})
    assert values(source, "text") == ["a", "bé", None]
    assert columns(source)["text"].text


def test_binary_data_can_not_be_had(write: Write) -> None:
    assert values(write({"bytes": [b"RIFF", None]}), "bytes") == [Unreadable("binary data"), None]


def test_dates_can_not_be_had(write: Write) -> None:
    (value,) = values(write({"at": pyarrow.array([0], pyarrow.timestamp("ms"))}), "at")
    assert isinstance(value, Unreadable)
    assert value.reason == "a date or time"


def test_what_can_not_be_had_is_named_with_its_reason(write: Write, tmp_path: Path) -> None:
    write({"id": ["a"], "audio": [b"RIFF"]})
    with pytest.raises(ManifestError, match=r"id 'a': 'audio' is unreadable \(binary data\)"):
        load_lengths(tmp_path / "data.parquet", ReadOptions(length_key="audio"))


def test_fields_have_dotted_names(write: Write) -> None:
    source = write({"info": [{"audio": {"seconds": 1.5}}, None]})
    assert values(source, "info.audio.seconds") == [1.5, None]


def test_a_dot_in_a_name_is_a_name(write: Write) -> None:
    source = write({"audio.duration": [2.5], "audio": [{"rate": 1}]})
    assert values(source, "audio.duration") == [2.5]


def test_lists_come_as_lists(write: Write) -> None:
    assert values(write({"ids": [[1, 2], [], None]}), "ids") == [[1.0, 2.0], [], None]


@pytest.mark.parametrize("key", ["chat.1.content", "chat[1].content"])
def test_a_number_below_a_list_gives_one_item(write: Write, key: str) -> None:
    assert values(write({"chat": CHATS}), key) == ["Hello", None, None, None]


def test_a_field_called_count_is_read_rather_than_counted(write: Write) -> None:
    assert values(write({"items": [[{"count": 5}]]}), "items.count") == [[5.0]]


def test_the_items_of_input_ids_are_tokens(write: Write, tmp_path: Path) -> None:
    write({"input_ids": [[1, 2], [3]]})
    lengths = load_lengths(tmp_path / "data.parquet", ReadOptions(length_key="input_ids.count"))
    assert (lengths.values.tolist(), lengths.unit) == ([2.0, 1.0], "tokens")


def test_the_columns_are_those_without_fields_of_their_own(write: Write) -> None:
    source = write({"id": ["a"], "ids": [[1]], "info": [{"n": 1, "wav": b"x"}], "at": [1.5]})
    assert list(columns(source)) == ["id", "ids.count", "ids", "info.n", "info.wav", "at"]


def test_text_that_holds_numbers_is_numeric(write: Write) -> None:
    assert columns(write({"duration": ["1.5", ""]}))["duration"] == Column("duration", "1.5", numeric=True)


def test_an_item_can_be_named_where_the_first_rows_have_no_list(write: Write) -> None:
    source = write({"ids": pyarrow.array([None, []], pyarrow.list_(pyarrow.int64()))})
    assert find_column(source.path, FORMAT(source).columns(), "ids[0]", "--length-key").name == "ids.0"


def test_two_columns_of_one_name_can_not_be_told_apart(write: Write) -> None:
    source = write(pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["n", "n"]))
    with pytest.raises(ManifestError, match="several columns 'n'"):
        values(source, "n")


def test_ids_are_those_of_the_column_that_is_known_for_them(write: Write) -> None:
    assert ids(write({"utt_id": ["a", None, ""], "duration": [1, 2, 3]}), "duration") == ["a", None, None]


def test_a_column_of_lists_holds_no_ids(write: Write) -> None:
    assert ids(write({"id": [["a"]], "name": ["b"], "duration": [1]}), "duration") == ["b"]


def test_the_ids_stay_with_their_rows(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_NUMBERS_AT_ONCE", 7)
    names = [f"utt{number}" for number in range(100)]
    source = write({"id": names, "duration": [float(number) for number in range(100)]}, row_group_size=30)
    for rows in chunks(source, "duration"):
        expected = [f"utt{number:.0f}" for number in rows.columns[0]]
        assert [rows.place(index).id for index in range(len(expected))] == expected
    assert ids(source, "duration") == names


def test_a_row_without_an_id_is_named_by_its_number(write: Write) -> None:
    source = write({"duration": range(5)}, row_group_size=2)
    (rows,) = chunks(source, "duration")
    assert [rows.place(index).id for index in (0, 4)] == ["row 1", "row 5"]
    assert ids(source, "duration") == [None] * 5


def test_progress_is_told_up_to_the_end(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_NUMBERS_AT_ONCE", 2)
    source = write({"duration": range(5)}, row_group_size=2)
    told: list[float] = []
    source.report = told.append
    values(source, "duration")
    assert told == [0.4, 0.8, 1.0]


def test_the_lengths_of_a_scan_keep_their_unit(write: Write) -> None:
    source = write(lengths_table(["a"], [1.5], [3.0], "ms"))
    assert [FORMAT(source).unit_in(column) for column in ("length", "target_length", "id")] == ["ms", None, None]
    assert list(columns(source)) == ["id", "length", "target_length"]


def test_the_note_is_what_it_is_said_to_be() -> None:
    note = json.loads(lengths_table(["a"], [1.5], None, "s").schema.metadata[b"batchtune"])
    assert note == {"format": "batchtune/lengths", "version": 1, "unit": "s", "target_unit": None}


def test_spans_of_time_are_in_seconds_whatever_the_name(write: Write, tmp_path: Path) -> None:
    write({"duration_ms": pyarrow.array([1500], pyarrow.duration("ms"))})
    lengths = load_lengths(tmp_path / "data.parquet")
    assert (lengths.values.tolist(), lengths.unit) == ([1.5], "s")


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (b"{", "is not as batchtune writes it"),
        (b'{"format": "batchtune/lengths", "version": 1, "unit": "parsec"}', "is not as batchtune writes it"),
        (b'{"format": "other", "version": 1}', "is not as batchtune writes it"),
        (b"[" * 100_000, "is not as batchtune writes it"),
        (b'{"format": "batchtune/lengths", "version": 2}', r"Invalid enum value 2 - at `\$.version`"),
    ],
    ids=["damaged", "unit", "format", "deep", "newer"],
)
def test_a_note_that_is_not_understood_is_refused(write: Write, note: bytes, message: str) -> None:
    source = write(pyarrow.table({"length": [1.5]}).replace_schema_metadata({"batchtune": note}))
    with pytest.raises(ManifestError, match=message):
        FORMAT(source).unit_in("length")


def test_an_encrypted_file_is_refused(refusal: Callable[..., ManifestError]) -> None:
    content = b"PARE" + bytes(100) + b"PARE"
    assert FORMAT.fits(Head(content, complete=True))
    assert "can't be read as Parquet" in refusal(content).message


def test_a_checksum_tells_damage(write: Write, tmp_path: Path) -> None:
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    write({"duration": [1.5, 2.5]}, write_page_checksum=True, **plain)
    path = tmp_path / "data.parquet"
    path.write_bytes(path.read_bytes().replace(np.float64(2.5).tobytes(), np.float64(3.5).tobytes(), 1))
    with pytest.raises(ManifestError, match="CRC"):
        load_lengths(path)
