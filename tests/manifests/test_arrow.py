"""The format `arrow`, and that both columnar formats find what stands in nested tables."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
import pytest

from batchtune.errors import ManifestError
from batchtune.manifests.formats.columnar import Arrow as FORMAT
from batchtune.manifests.formats.columnar import Columnar, Parquet
from batchtune.manifests.source import HEAD_BYTES, Head, Source

KINDS = {"file": pyarrow.ipc.new_file, "stream": pyarrow.ipc.new_stream}
COMPRESSIONS = [None, "lz4", "zstd"]
Write = Callable[..., Source]

both = pytest.mark.parametrize("kind", KINDS)


def written(columns: Any, kind: str = "stream", compression: str | None = None, rows: int = 1000) -> bytes:
    """A table, or columns, as the bytes of a file or stream."""
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    stream = io.BytesIO()
    with KINDS[kind](stream, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return stream.getvalue()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a table, or columns, and opens the file: write({"duration": [1.5]}, kind="file")."""

    def run(columns: Any, **options: Any) -> Source:
        (tmp_path / "data.arrow").write_bytes(written(columns, **options))
        return Source(tmp_path / "data.arrow")

    return run


def values(source: Source, key: str, reader: type[Columnar] = FORMAT) -> list[object]:
    return [value for rows in reader(source).rows([key]) for value in list(rows.columns[0])]


@both
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_files_and_streams_are_read(write: Write, kind: str, compression: str | None) -> None:
    columns = {"id": [f"utt{number}" for number in range(5)], "duration": [1.5, 2, 3, 4, 5]}
    source = write(columns, kind=kind, compression=compression, rows=2)
    assert FORMAT.fits(source.head)
    chunks = [(list(rows.columns[0]), list(rows.ids())) for rows in FORMAT(source).rows(["duration"])]
    assert chunks == [([1.5, 2.0], ["utt0", "utt1"]), ([3.0, 4.0], ["utt2", "utt3"]), ([5.0], ["utt4"])]


@both
def test_progress_is_told_up_to_the_end(write: Write, kind: str) -> None:
    source = write({"n": range(4)}, kind=kind, rows=2)
    told: list[float] = []
    source.report = told.append
    values(source, "n")
    assert len(told) == 2
    assert 0 < told[0] < told[1]
    assert told[1] == pytest.approx(1, abs=0.05)


@both
def test_the_columns_of_an_empty_table_are_known(write: Write, kind: str) -> None:
    (column,) = FORMAT(write({"duration": pyarrow.array([], pyarrow.float64())}, kind=kind)).columns()
    assert (column.name, column.numeric) == ("duration", True)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (
            pyarrow.array(["a", None, "longer than twelve bytes"], pyarrow.string_view()),
            ["a", None, "longer than twelve bytes"],
        ),
        (pyarrow.array([[1, 2], None, []], pyarrow.list_view(pyarrow.int64())), [[1, 2], None, []]),
        (pyarrow.array([[1, 2], None, []], pyarrow.large_list(pyarrow.int64())), [[1, 2], None, []]),
        (pyarrow.array([[1, 2], None, [3, None]], pyarrow.list_(pyarrow.int64(), 2)), [[1, 2], None, [3, None]]),
        (pyarrow.compute.run_end_encode(pyarrow.array([1, 1, None])), [1, 1, None]),
        (pyarrow.array([1, None, 1]).dictionary_encode(), [1, None, 1]),
        (pyarrow.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
        (
            pyarrow.ExtensionArray.from_storage(
                pyarrow.fixed_shape_tensor(pyarrow.int64(), [2]),
                pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.int64(), 2)),
            ),
            [[1, 2]],
        ),
    ],
    ids=lambda value: str(value.type)[:20] if isinstance(value, pyarrow.Array) else "",
)
def test_arrows_own_types_are_read(write: Write, column: pyarrow.Array, expected: list[object]) -> None:
    assert values(write({"x": column}), "x") == expected


def test_an_item_of_a_list_of_views_is_found(write: Write) -> None:
    kind = pyarrow.list_(pyarrow.struct([("content", pyarrow.string_view())]))
    source = write({"chat": pyarrow.array([[{"content": "Hello, who are you?"}], []], kind)})
    assert values(source, "chat.0.content") == ["Hello, who are you?", None]


def test_dictionaries_may_change_from_batch_to_batch(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    batches = [pyarrow.record_batch({"x": pyarrow.array(words).dictionary_encode()}) for words in (["a", "b"], ["c"])]
    with pyarrow.ipc.new_stream(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    assert values(Source(path), "x") == ["a", "b", "c"]


def test_a_stream_is_told_from_other_bytes() -> None:
    whole = written({"n": [1]})
    assert FORMAT.fits(Head(whole, complete=True))
    for other in (b"", b"\xff" * 4, b"\xff" * 100, b"\xff\xff\xff\xff\x10\0\0\0" + bytes(100), whole[8:], b"{}"):
        assert not FORMAT.fits(Head(other, complete=True))


def test_a_schema_that_is_longer_than_the_head_is_told() -> None:
    names = [f"a column with a long name, number {number}" for number in range(3000)]
    whole = written(pyarrow.table([pyarrow.array([1])] * 3000, names=names))
    assert FORMAT.fits(Head(whole[:HEAD_BYTES], complete=False))


@both
def test_offsets_that_point_elsewhere_are_refused(write: Write, kind: str, tmp_path: Path) -> None:
    write({"text": ["some", "text"]}, kind=kind)
    path = tmp_path / "data.arrow"
    path.write_bytes(path.read_bytes().replace(struct.pack("<iii", 0, 4, 8), struct.pack("<iii", 0, 2**30, 8)))
    with pytest.raises(ManifestError, match="can't be read as Arrow"):
        values(Source(path), "text")


@both
def test_a_file_that_breaks_off_is_refused(refusal: Callable[..., ManifestError], kind: str) -> None:
    whole = written({"duration": np.arange(1.0, 1001.0)}, kind)
    message = refusal(whole[:-3000], format="arrow").message
    assert "can't be read as Arrow" in message or "is damaged" in message


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_both_formats_find_what_stands_in_nested_tables(name: str, tmp_path: Path) -> None:
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.int64()))
    rows = [
        {"a": [{"b.c": 1, "d": {"e": ["x", "y"]}}, {"b.c": None, "d": None}], "m": [("k", [1, 2])]},
        {"a": [], "m": []},
        {"a": None, "m": None},
    ]
    nested = pyarrow.struct([("b.c", pyarrow.int32()), ("d", pyarrow.struct([("e", pyarrow.list_(pyarrow.string()))]))])
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("a", pyarrow.large_list(nested)), ("m", pairs)]))
    path = tmp_path / name
    if name == "x.arrow":
        path.write_bytes(written(table, "file", "zstd", rows=2))
    else:
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    reader = FORMAT if name == "x.arrow" else Parquet
    columns = [column.name for column in reader(Source(path)).columns()]
    assert columns == ["a.count", "a.b.c", "a.d.e", "m.count", "m.key", "m.value"]
    for key, expected in {
        "a.count": [2, 0, None],
        "a.b.c": [[1, None], [], None],
        "a.d.e": [[["x", "y"], None], [], None],
        "a.0.d.e.1": ["y", None, None],
        "a.0.d.e.count": [2, None, None],
        "m.key": [["k"], [], None],
        "m.value": [[[1, 2]], [], None],
        "m.count": [1, 0, None],
        "m.0.value.1": [2, None, None],
    }.items():
        assert values(Source(path), key, reader) == expected, key
