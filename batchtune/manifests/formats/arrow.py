"""Arrow's own files and streams, as Hugging Face's datasets, Feather and Polars write them."""

from __future__ import annotations

import contextlib
import io
import mmap
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from batchtune.errors import ManifestError
from batchtune.manifests.arrow_messages import FILE_MAGIC, expanded_bytes, is_schema
from batchtune.manifests.columnar import Columnar, Part, explained
from batchtune.manifests.columnar_schema import Key
from batchtune.manifests.columnar_values import ROWS_AT_ONCE, Budget
from batchtune.manifests.source import Head, Source

if TYPE_CHECKING:
    import pyarrow

_VALUE_BYTES = 8


class Arrow(Columnar):
    """Arrow IPC, the file (Feather) and the stream (what `Dataset.save_to_disk` writes)."""

    name = "arrow"
    title = "Arrow"
    description = "an Arrow file or stream, as Feather or Hugging Face's datasets write them"

    def fits(self, head: Head) -> bool:
        """Whether it begins as a file does, or with a schema as a stream does."""
        return head.data.startswith(FILE_MAGIC) or is_schema(head.data)

    @contextlib.contextmanager
    def opened(self, source: Source) -> Iterator[ArrowTable]:
        """The file. Raises ManifestError where it is none, or damaged."""
        with source.seekable() as stream, explained(source.path, self.title):
            if not stream.seek(0, io.SEEK_END):
                raise ManifestError(f"{source.path} is empty", "Check that it was written to its end.")
            yield ArrowTable(source.path, stream)


class ArrowTable:
    """An open Arrow file or stream; see `columnar.Table`."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        import pyarrow

        # Mapped, so that of large columns that are not asked for (audio) nothing is read.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = pyarrow.py_buffer(mapped)
        self._is_file = mapped[: len(FILE_MAGIC)] == FILE_MAGIC
        self.size = len(mapped)
        try:
            expanded = expanded_bytes(memoryview(mapped))
        except ValueError as error:
            raise ManifestError(f"{path} is damaged: {error}", "Make or fetch the file anew.") from None
        Budget(path, self.size).check(expanded // _VALUE_BYTES)

    @cached_property
    def schema(self) -> pyarrow.Schema:
        """Its columns."""
        import pyarrow

        return self._reader(pyarrow.BufferReader(self._data)).schema

    def batches(self, keys: Sequence[Key], *, from_row: int = 0, at_once: int = ROWS_AT_ONCE) -> Iterator[Part]:
        """Its rows, in the batches in which they were written."""
        columns = sorted({self.schema.get_field_index(key.steps[0]) for key in keys})
        first = 0
        for batch, share in self._batches(columns):
            if first + batch.num_rows > from_row:
                batch.validate(full=True)
                yield Part(first, batch, share)
            first += batch.num_rows

    def _batches(self, columns: Sequence[int]) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
        """The batches with these columns, and how much of the file is read with each."""
        import pyarrow

        data = pyarrow.BufferReader(self._data)
        reader = self._reader(data, columns)
        if self._is_file:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index), (index + 1) / reader.num_record_batches
        else:
            for batch in reader:
                yield batch, data.tell() / self.size

    def _reader(
        self, data: pyarrow.BufferReader, columns: Sequence[int] = ()
    ) -> pyarrow.RecordBatchFileReader | pyarrow.RecordBatchStreamReader:
        from pyarrow import ipc

        options = ipc.IpcReadOptions(included_fields=list(columns), use_threads=False)
        if self._is_file:
            return ipc.open_file(data, options=options)
        return ipc.open_stream(data, options=options)


FORMAT = Arrow()
