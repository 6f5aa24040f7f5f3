"""Binary data sets whose headers hold the sizes of their examples: nothing else of them is read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.errors import ManifestError
from batchtune.lengths import FloatArray
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.source import Head
from batchtune.manifests.storage import Stored

# Of an .idx.
_MAGIC = b"MMIDIDX\0\0"
# No text begins with a smaller number, and no shard has more examples: its offsets have 32 bits.
_MOST_IN_SHARD = 1 << 24


class IndexFile(Format):
    """An `.idx` of Megatron or fairseq (tokens), a shard of MosaicML's streaming or a chunk of LitData (bytes)."""

    name = "sizes"
    description = "an .idx of Megatron or fairseq, a shard of MosaicML's streaming, a chunk of LitData"
    names_columns = False
    endings = (".idx", ".mds", ".mds.zstd", ".mds.gz")

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether an .idx begins so, or a shard: a number, then the offset behind as many offsets and one."""
        if head.data.startswith(_MAGIC):
            return True
        count, first = struct.unpack("<II", head.data[:8].ljust(8, b"\0"))
        end = 4 * (count + 2)
        # MosaicML's settings, as JSON, stand between the offsets and the examples; a large head is cut off before.
        is_first = first == end or (first > end and head.data[end : end + 1] in b"{")
        return 0 < count < _MOST_IN_SHARD and is_first

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the one column."""
        return "num_tokens" if self.source.head.data.startswith(_MAGIC) else "num_bytes"

    def columns(self) -> Sequence[Column]:
        """Return the one column."""
        return [Column(self.default_column([]) or "")]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield all rows. Raises ManifestError if the header is not whole."""
        read = _tokens if self.source.head.data.startswith(_MAGIC) else _bytes
        with self.source.plain_file() as stored:
            try:
                lengths = read(stored)
            except (ValueError, OverflowError, struct.error):
                raise ManifestError(
                    f"{self.source.path} breaks off, or is damaged",
                    "Make or fetch it again.",
                ) from None
        yield Rows([lengths for _ in keys], lambda: [None] * lengths.size)


def _table(stored: Stored, begin: int, count: int, kind: str) -> FloatArray:
    size = min(4 * count, stored.size)
    return np.frombuffer(stored.read(begin, size), kind, count).astype(np.float64)


def _tokens(stored: Stored) -> FloatArray:
    """Return the sizes; Megatron's file has the number of documents before them, and their table at its end."""
    (count,) = struct.unpack_from("<Q", stored.read(0, 26), 18)
    begin = 26 if stored.size == 26 + 12 * count else 34
    return _table(stored, begin, count, "<i4")


def _bytes(stored: Stored) -> FloatArray:
    """Return the differences of the offsets; the last offset is the end of the file."""
    (count,) = struct.unpack("<I", stored.read(0, 4))
    offsets = _table(stored, 4, count + 1, "<u4")
    if offsets[-1] > stored.size:
        raise ValueError("the examples are missing")
    return np.diff(offsets)
