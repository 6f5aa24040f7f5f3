"""The formats `parquet` and `arrow`: columns of any type, what stands in nested ones, and the table of `scan`."""

import datetime
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from manifests.samples import parquet

from batchtune.errors import ManifestError
from batchtune.manifests import FORMATS, ReadOptions, load_lengths
from batchtune.manifests.source import HEAD_BYTES, Head, Source

KINDS = ("parquet", "arrow file", "arrow stream")

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def write(tmp_path):
    """Writes a table, or columns, and opens the file: write({"duration": [1.5]}, "arrow file")."""

    def run(columns, kind="parquet", **options):
        table = (
            columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
        )
        path = tmp_path / "data"
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=2, **options)
        else:
            new = (
                pyarrow.ipc.new_file if kind == "arrow file" else pyarrow.ipc.new_stream
            )
            with new(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
        return FORMATS[kind.split()[0]](Source(path))

    return run


def values(reader, key):
    found = []
    for rows in reader.rows([key]):
        found += list(rows.columns[0])
    return found


@kinds
@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([0.5], pyarrow.float32()),
        pyarrow.array([3, None]),
        pyarrow.array([True, False]),
        pyarrow.array(["a", "bé", None]),
        pyarrow.array(["a", None, "a"]).dictionary_encode(),
        pyarrow.array([[1, 2], None, []]),
        pyarrow.array([[1, 2], None, [3, None]], pyarrow.list_(pyarrow.int64(), 2)),
    ],
    ids=lambda column: str(column.type)[:20],
)
def test_values_of_any_type_are_read(write, column, kind):
    assert values(write({"x": column}, kind), "x") == column.to_pylist()


@kinds
def test_numbers_that_are_no_floats_are_read(write, kind):
    decimal = pyarrow.array([Decimal("3.51")], pyarrow.decimal128(9, 2))
    reader = write({"large": [2**60 + 1], "decimal": decimal}, kind)
    assert values(reader, "large") == [2.0**60]
    assert values(reader, "decimal") == ["3.51"]


@pytest.mark.parametrize("value", [b"RIFF", datetime.date(2024, 1, 1)])
def test_what_is_no_length_is_an_invalid_row(write, value):
    path = write({"id": ["a"], "x": [value]}).source.path
    said = r"id 'a': 'x' (can't be read: no WAV header|is .*not a number)"
    with pytest.raises(ManifestError, match=said):
        load_lengths(path, ReadOptions(length_key="x"))


@kinds
def test_what_stands_in_nested_columns_is_found(write, kind):
    rows = [
        {
            "info": {"audio": {"seconds": 1.5}},
            "chat": [{"content": "Hi", "n": 1}, {"content": "ab", "n": 2}],
        },
        {"info": None, "chat": []},
        {"info": {"audio": None}, "chat": None},
    ]
    reader = write(pyarrow.Table.from_pylist(rows), kind)
    names = [column.name for column in reader.columns()]
    assert names == ["info.audio.seconds", "chat"]
    for key, expected in {
        "info.audio.seconds": [1.5, None, None],
        "chat.content": [["Hi", "ab"], [], None],
        "chat.1.n": [2, None, None],
        "chat.count": [2, 0, None],
    }.items():
        assert values(reader, key) == expected, key


def test_a_dot_in_a_name_is_a_name(write):
    reader = write({"audio.duration": [2.5], "audio": [{"rate": 1}]})
    assert values(reader, "audio.duration") == [2.5]


@kinds
def test_two_columns_of_one_name_can_not_be_told_apart(write, kind):
    table = pyarrow.Table.from_arrays(
        [pyarrow.array([1]), pyarrow.array([2])], names=["n", "n"]
    )
    with pytest.raises(ManifestError, match="can't be read as"):
        values(write(table, kind), "n")


def test_a_row_without_an_id_is_named_by_its_number(refusal):
    content = parquet([{"duration": 1}, {"duration": -1}])
    assert "row 2: 'duration'" in refusal(content).message


def test_arrow_is_told_by_the_head_of_a_long_schema(write):
    many = pyarrow.table(
        [pyarrow.array([1])] * 3000,
        names=[f"a long name, number {number}" for number in range(3000)],
    )
    head = write(many, "arrow stream").source.path.read_bytes()[:HEAD_BYTES]
    assert FORMATS["arrow"].fits(Head(head, complete=False))


@kinds
def test_a_file_that_breaks_off_is_refused(write, kind):
    path = write({"duration": np.arange(1.0, 1001.0)}, kind).source.path
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(ManifestError, match="can't be read as"):
        load_lengths(path, ReadOptions(format=kind.split()[0]))


def test_an_encrypted_file_is_refused(refusal):
    assert "can't be read as Parquet" in refusal(b"PARE" + bytes(100) + b"PARE").message


def test_a_checksum_tells_damage(write):
    plain = {
        "use_dictionary": False,
        "compression": "none",
        "write_statistics": False,
        "write_page_checksum": True,
    }
    path = write({"duration": [1.5, 2.5]}, **plain).source.path
    path.write_bytes(
        path.read_bytes().replace(
            np.float64(2.5).tobytes(), np.float64(3.5).tobytes(), 1
        )
    )
    with pytest.raises(ManifestError, match="CRC"):
        load_lengths(path)
