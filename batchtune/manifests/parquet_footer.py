"""What the end of a Parquet file says of the sizes of its columns.

pyarrow hands this out too (`FileMetaData.row_group(…).column(…)`), but without a net: a damaged file ends the process
there. And it must be known before the columns are read: a page of some bytes may stand for billions of values.
"""

from __future__ import annotations

import io
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

# Of Thrift's compact protocol:
# https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_FIXED = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8}

# Of https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, what is read here.
_ROW_GROUPS = 4
_COLUMNS = 1
_META_DATA = 3
_NUM_VALUES, _TOTAL_UNCOMPRESSED_SIZE, _TOTAL_COMPRESSED_SIZE = 5, 6, 7


@dataclass(slots=True)
class ColumnSize:
    """Of one column in all row groups.

    Attributes:
        values: How many there are, those within lists too.
        bytes: What they take before compression.
        largest_chunk: The bytes in the file of the row group that has most of them.
    """

    values: int = 0
    bytes: int = 0
    largest_chunk: int = 0


def column_sizes(stream: BinaryIO) -> dict[int, ColumnSize]:
    """Number of a leaf column → its size, by the metadata at the end of a file.

    Args:
        stream: Of a file that pyarrow could open.

    Raises:
        ValueError: They are damaged.
    """
    end = stream.seek(-8, io.SEEK_END)
    (size,) = struct.unpack("<I", stream.read(4))
    if size > end:
        raise ValueError("its metadata are longer than the file")
    stream.seek(end - size)
    sizes: dict[int, ColumnSize] = defaultdict(ColumnSize)
    try:
        _Reader(stream.read(size)).add_file(sizes)
    except (IndexError, RecursionError):
        raise ValueError("its metadata break off") from None
    return dict(sizes)


class _Reader:
    """Reads a struct after another, and skips what is not asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def add_file(self, sizes: dict[int, ColumnSize]) -> None:
        for number, kind in self._fields():
            if number == _ROW_GROUPS:
                for _ in range(self._list_size()):
                    self._add_row_group(sizes)
            else:
                self._skip(kind)

    def _add_row_group(self, sizes: dict[int, ColumnSize]) -> None:
        for number, kind in self._fields():
            if number == _COLUMNS:
                for column in range(self._list_size()):
                    self._add_chunk(sizes[column])
            else:
                self._skip(kind)

    def _add_chunk(self, size: ColumnSize) -> None:
        for number, kind in self._fields():
            if number == _META_DATA:
                self._add_meta_data(size)
            else:
                self._skip(kind)

    def _add_meta_data(self, size: ColumnSize) -> None:
        for number, kind in self._fields():
            if number == _NUM_VALUES:
                size.values += max(0, self._integer())
            elif number == _TOTAL_UNCOMPRESSED_SIZE:
                size.bytes += max(0, self._integer())
            elif number == _TOTAL_COMPRESSED_SIZE:
                size.largest_chunk = max(size.largest_chunk, self._integer())
            else:
                self._skip(kind)

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Number and kind of every field of a struct; its value must be read or skipped before the next."""
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._integer()
            yield number, kind

    def _list_size(self) -> int:
        head = self._byte()
        return head >> 4 if head >> 4 < 15 else self._varint()

    def _skip(self, kind: int) -> None:
        if self._at >= len(self._data):  # what is skipped without being read must end somewhere too
            raise IndexError
        if kind in _FIXED:
            self._at += _FIXED[kind]
        elif kind == _BINARY:
            size = self._varint()
            self._at += size
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner)
        elif kind in (_LIST, _SET):
            head = self._data[self._at]
            self._skip_items(self._list_size(), head & 15)
        elif kind == _MAP:
            size = self._varint()
            kinds = self._byte() if size else 0
            for _ in range(size):
                self._skip_items(1, kinds >> 4)
                self._skip_items(1, kinds & 15)
        else:
            self._varint()

    def _skip_items(self, count: int, kind: int) -> None:
        for _ in range(count):
            if kind in (_TRUE, _FALSE):  # a byte each where they are items
                self._byte()
            else:
                self._skip(kind)

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("its metadata hold a number of more than 64 bits")

    def _byte(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        return byte
