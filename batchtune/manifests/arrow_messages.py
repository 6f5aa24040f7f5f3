"""The messages of an Arrow file or stream, as far as they tell how large its compressed parts will become.

pyarrow takes as much memory as a compressed part says that it needs, and a file of a megabyte can say ten gigabytes.

The layout is that of https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
and of Message.fbs and File.fbs beside it, in FlatBuffers' binary format
(https://flatbuffers.dev/internals/).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

FILE_MAGIC = b"ARROW1"
_MARK = b"\xff\xff\xff\xff"
_BLOCK_BYTES = 24
_BUFFER_BYTES = 16
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


def is_schema(head: bytes) -> bool:
    """Whether bytes begin with the message of a schema, as a stream does. Takes any."""
    try:
        return head.startswith(_MARK) and _Message.at(memoryview(head), 0).kind == _SCHEMA
    except (struct.error, ValueError):
        return False


def expanded_bytes(data: memoryview) -> int:
    """What the compressed parts of a file or stream take in memory, all together, if they are as they say.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return sum(_expanded(data, message) for message in _messages(data))
    except struct.error:
        raise ValueError("its messages break off") from None


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a flatbuffer.

    Attributes:
        data: The flatbuffer.
        at: Where the table begins in it.
    """

    data: memoryview
    at: int

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, _number("<I", data, 0))

    def field(self, number: int) -> int | None:
        """Where the value of a field stands; None where it is not there."""
        start = self.at - _number("<i", self.data, self.at)
        if number >= (_number("<H", self.data, start) - 4) // 2:
            return None
        offset = _number("<H", self.data, start + 4 + 2 * number)
        return self.at + offset if offset else None

    def table(self, number: int) -> _Table | None:
        at = self.field(number)
        return None if at is None else _Table(self.data, at + _number("<I", self.data, at))

    def structs(self, number: int, layout: str, size: int) -> Iterator[tuple[int, ...]]:
        """The items of a vector."""
        at = self.field(number)
        if at is None:
            return
        start = at + _number("<I", self.data, at)
        count = _number("<I", self.data, start)
        if start + 4 + count * size > len(self.data):
            raise ValueError("a part of it is longer than the message")
        yield from struct.iter_unpack(layout, self.data[start + 4 : start + 4 + count * size])


@dataclass(frozen=True, slots=True)
class _Message:
    """A message.

    Attributes:
        table: What it says of itself.
        body: Where its data begin.
    """

    table: _Table
    body: int

    @classmethod
    def at(cls, data: memoryview, start: int) -> _Message:
        # Before version 0.15 there was no mark.
        start += 4 * (data[start : start + 4] == _MARK)
        size = _number("<i", data, start)
        if size <= 0:
            raise ValueError("a message has no length")
        return cls(_Table.root(data[start + 4 : start + 4 + size]), start + 4 + size)

    @property
    def kind(self) -> int:
        at = self.table.field(1)
        return 0 if at is None else _number("<B", self.table.data, at)

    @property
    def body_bytes(self) -> int:
        at = self.table.field(3)
        return 0 if at is None else _number("<q", self.table.data, at)


def _messages(data: memoryview) -> Iterator[_Message]:
    if data[: len(FILE_MAGIC)] != FILE_MAGIC:
        yield from _stream_messages(data)
        return
    end = len(data) - len(FILE_MAGIC) - 4
    footer = _Table.root(data[end - _number("<i", data, end) : end])
    for vector in (2, 3):
        for start, _, _ in footer.structs(vector, "<qi4xq", _BLOCK_BYTES):
            yield _Message.at(data, start)


def _stream_messages(data: memoryview) -> Iterator[_Message]:
    start = 0
    while start < len(data):
        size_at = start + 4 * (data[start : start + 4] == _MARK)
        if _number("<i", data, size_at) == 0:
            return
        message = _Message.at(data, start)
        yield message
        start = message.body + max(0, message.body_bytes)


def _expanded(data: memoryview, message: _Message) -> int:
    batch = message.table.table(2)
    if batch is not None and message.kind == _DICTIONARY:
        batch = batch.table(1)
    elif message.kind != _BATCH:
        return 0
    if batch is None or batch.field(3) is None:
        return 0
    # Each compressed buffer begins with its size before compression; -1 where it is not compressed after all.
    starts = [message.body + offset for offset, size in batch.structs(2, "<qq", _BUFFER_BYTES) if size >= 8]
    return sum(max(0, _number("<q", data, start)) for start in starts)


def _number(layout: str, data: memoryview, at: int) -> int:
    if at < 0:  # which would count from the end
        raise ValueError("a part of it stands before its begin")
    return int(struct.unpack_from(layout, data, at)[0])
