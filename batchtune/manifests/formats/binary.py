"""Binary data sets whose headers hold the sizes of their examples: nothing else of them is read."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from batchtune.errors import ManifestError
from batchtune.lengths import FloatArray
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.source import Head
from batchtune.manifests.storage import Stored

_MAGIC = b"MMIDIDX\0\0"
# No text begins with fewer, and no shard has more: its offsets have 32 bits.
_MOST_IN_SHARD = 1 << 24


class _Sized(Format):
    """The part that is the same for all; `column` is the name of the lengths, which says their unit."""

    names_columns = False
    column: ClassVar[str]

    @abstractmethod
    def lengths(self, stored: Stored) -> FloatArray:
        """Return the size of each example. Raises ValueError or struct.error if the header is not whole."""

    def columns(self) -> Sequence[Column]:
        """Return the one column."""
        return [Column(self.column)]

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the one column."""
        return self.column

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield all rows."""
        with self.source.plain_file() as stored:
            try:
                lengths = self.lengths(stored)
            except (ValueError, OverflowError, struct.error):
                raise ManifestError(
                    f"{self.source.path} breaks off, or is damaged",
                    "Make or fetch it again.",
                ) from None
        yield Rows([lengths for _ in keys], lambda: [None] * lengths.size)


def _table(stored: Stored, begin: int, count: int, kind: str) -> FloatArray:
    size = min(count * np.dtype(kind).itemsize, stored.size)
    return np.frombuffer(stored.read(begin, size), kind, count).astype(np.float64)


class TokenIndex(_Sized):
    """An `.idx` of Megatron or fairseq: the tokens of each sequence."""

    name = "token-index"
    description = "an .idx file of Megatron or fairseq"
    column = "num_tokens"
    endings = (".idx",)

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins as one of them."""
        return head.data.startswith(_MAGIC)

    def lengths(self, stored: Stored) -> FloatArray:
        """Return the sizes; Megatron's file has the number of documents before them, and their table at its end."""
        (count,) = struct.unpack_from("<Q", stored.read(0, 26), 18)
        is_fairseq = stored.size == 26 + 12 * count
        return _table(stored, 26 if is_fairseq else 34, count, "<i4")


class Shard(_Sized):
    """A shard of MosaicML's streaming (.mds), or a chunk of LitData (.bin): the bytes of each example."""

    name = "mds"
    description = "a shard of MosaicML's streaming, or a chunk of LitData"
    column = "num_bytes"
    endings = (".mds", ".mds.zstd", ".mds.gz")

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether a number comes first, and then the offset behind as many offsets and one more."""
        if len(head.data) < 8:
            return False
        count, first = struct.unpack("<II", head.data[:8])
        end = 4 * (count + 2)
        # MosaicML's settings, as JSON, stand between the offsets and the examples.
        is_first = first == end or (first > end and head.data[end : end + 1] in b"{")
        return 0 < count < _MOST_IN_SHARD and is_first

    def lengths(self, stored: Stored) -> FloatArray:
        """Return the differences of the offsets, of which the last is the end of the file."""
        (count,) = struct.unpack("<I", stored.read(0, 4))
        offsets = _table(stored, 4, count + 1, "<u4")
        if offsets[-1] > stored.size:
            raise ValueError("the examples are missing")
        return np.diff(offsets)
