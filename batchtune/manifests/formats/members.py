"""Read only the headers of files: WebDataset's tar shards, audio in a folder, indices and shards of sizes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import FloatArray, Unit
from batchtune.manifests.formats import (
    Column,
    Estimate,
    Format,
    KeyPath,
    Rows,
    Unreadable,
    columns_of,
    count_estimates,
    last_part,
    walk,
)
from batchtune.manifests.formats.text import without_nan
from batchtune.manifests.headers import (
    AUDIO_SUFFIXES,
    BLOCK,
    Payload,
    Tar,
    array_shape,
    audio_length,
    is_header,
    open_tar,
    opened_payload,
)
from batchtune.manifests.source import Head, Source
from batchtune.manifests.storage import RemoteFile, Stored, Window
from batchtune.results import MALFORMED

_NUM_SAMPLES = "num_samples"
_AUDIO = "audio"
_ARRAY = "npy"
# Of texts of at most 1 MiB each.
_CHUNK = 250
_LARGEST_JSON_BYTES = 16 * 1024 * 1024
_PEEKED_SAMPLES = 100
_MOST_SUFFIXES = 1000
_META = re.compile(r"__[^/]*__(?:$|/)")
# As webdataset's `base_plus_ext` (1.0.2) takes names apart, at the first dot behind the folder; a longer name than any
# file system has could take it hours.
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_LONGEST_NAME = 4096
_SPARSE = Unreadable("a sparse member")

# By the last part of a suffix, in lower case; any other file is text.
_KINDS = {
    **dict.fromkeys(AUDIO_SUFFIXES, _AUDIO),
    "json": "json",
    "jsn": "json",
    _ARRAY: "array",
}
_UNREAD_AUDIO = frozenset("aac ac3 amr ape au caf snd sph voc w64 webm wma wv".split())
_CONVERT = "audio in a format that is not read: convert it to WAV or FLAC"


def kind_of(suffix: str) -> str:
    """Return what files with a suffix hold: `audio`, `array`, `json` or `text`."""
    return _KINDS.get(last_part(suffix), "text")


def read_value(payload: Payload, suffix: str, path: KeyPath) -> object:
    """Return the value at a path in a file with this suffix, or Unreadable.

    Of audio, this is the seconds, or at `num_samples` its samples; of an array its first dimension; of JSON the value
    at the path, None without one; of text the text.
    """
    kind = kind_of(suffix)
    try:
        if kind == _AUDIO:
            audio = audio_length(payload)
            if path:
                return audio.num_samples
            if audio.is_estimate:
                return Estimate(audio.seconds)
            return audio.seconds
        if kind == "json":
            return _json_value(payload, path)
        if kind == "array":
            shape = array_shape(payload)
            if not shape:
                raise Unreadable("an array without dimensions")
            return shape[0]
        return payload.text()
    except Unreadable as error:
        return error.with_traceback(None)


def _json_value(payload: Payload, path: KeyPath) -> object:
    if payload.size > _LARGEST_JSON_BYTES:
        raise Unreadable("longer than 16 MiB of JSON", f"{payload.size:,} bytes")
    try:
        content = msgspec.json.decode(
            without_nan(payload.read(0, payload.size).removeprefix(b"\xef\xbb\xbf"))
        )
    except MALFORMED as error:
        raise Unreadable("malformed JSON", str(error)) from None
    return walk(content, path)


@dataclass(slots=True)
class _Sample:
    """Consecutive members with one key: the values of the columns that are read."""

    key: str
    values: dict[str, object] = field(default_factory=dict)
    repeated: str | None = None  # a suffix that two of its members have


# The columns that are read from a member, and the path of each in it.
_Columns = Sequence[tuple[str, KeyPath]]


class WebDataset(Format):
    """A tar shard; only the requested members are read. Consecutive members with one key are a sample.

    A column is a suffix: `wav` or any other audio (in seconds), `npy` (the first dimension), others
    as text. Parts are named after a dot: `wav.num_samples`, `json.duration`, `json.speaker.id`.
    Suffixes may hold dots themselves, as that of `a.mix.wav`. `audio` is the one audio member of
    each sample, whatever its suffix.
    """

    name = "webdataset"
    description = "a tar shard of WebDataset"
    sharded = True
    endings = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a tar header, or is an archive of nothing."""
        block = head.data[:BLOCK]
        return is_header(block) or (len(block) == BLOCK and not head.data.strip(b"\0"))

    def columns(self) -> Sequence[Column]:
        """Return what the members of the first samples hold, and `audio` if one is audio."""

        def wanted(suffix: str) -> _Columns:
            if kind_of(suffix) == _AUDIO:
                return [(suffix, ()), (_AUDIO, ())]
            return [(suffix, ())]

        with open_tar(self.source) as tar:
            # Damage in the shard is reported when all of it is read, after what precedes it.
            first = next(
                _chunks(itertools.islice(_samples(tar, wanted), _PEEKED_SAMPLES))
            )
        return columns_of(
            {
                name: None if isinstance(value, Unreadable) else value
                for name, value in sample.values.items()
            }
            for sample in first
        )

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the samples, some hundred at a time; those before damage in the shard come first."""
        paths = {key: _split(key) for key in keys}

        @functools.lru_cache(_MOST_SUFFIXES)
        def wanted(suffix: str) -> _Columns:
            columns = []
            for key, (name, path) in paths.items():
                if name == suffix != _AUDIO or (
                    name == _AUDIO and kind_of(suffix) == _AUDIO
                ):
                    columns.append((key, path))
            return columns

        with open_tar(self.source) as tar:
            for chunk in _chunks(_samples(tar, wanted)):
                columns = [_column(chunk, key) for key in keys]
                for index, sample in enumerate(chunk):
                    if sample.repeated is not None:
                        columns[0][index] = Unreadable(
                            "two members with one suffix", shortened(sample.repeated)
                        )
                yield _rows([sample.key for sample in chunk], columns, tar.left_out)
                tar.left_out.clear()
                tar.report()

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the audio if there is any, else the array."""
        names = [column.name for column in columns]
        return next((name for name in (_AUDIO, _ARRAY) if name in names), None)

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column: seconds or samples of audio, else by its name."""
        suffix, path = _split(column)
        if suffix == _AUDIO or kind_of(suffix) == _AUDIO:
            return "samples" if path else "s"
        return super().unit_in(column)


def _column(samples: Sequence[_Sample], key: str) -> list[object]:
    return [sample.values.get(key) for sample in samples]


def _rows(
    names: Sequence[str],
    columns: Sequence[Sequence[object]],
    left_out: Mapping[str, int],
) -> Rows:
    return Rows(
        columns,
        lambda: names,
        left_out=dict(left_out),
        num_estimates=count_estimates(columns[0]),
    )


def _chunks(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    """Yield samples in lists; those before an error come first."""
    chunk = []
    try:
        for sample in samples:
            chunk.append(sample)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
    except ManifestError:
        yield chunk
        raise
    yield chunk


def _samples(tar: Tar, wanted: Callable[[str], _Columns]) -> Iterator[_Sample]:
    """Group the members as webdataset's `tar_file_iterator` and `group_by_keys` do (1.0.2).

    A sample is not yielded if the archive is damaged or breaks off in it (ManifestError): members of it may be missing.
    """
    sample: _Sample | None = None
    suffixes = set[str]()
    for file in tar.members():
        key, suffix = key_and_suffix(file.name)
        if file.name.startswith("__") and _META.match(file.name):
            continue
        if key is None:
            tar.left_out["a member without a suffix"] += 1
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
            suffixes.clear()
        if suffix in suffixes:
            sample.repeated = suffix
        suffixes.add(suffix)
        for column, path in wanted(suffix):
            value: object = _SPARSE
            if column in sample.values:  # the column `audio`, or a repeated suffix
                value = Unreadable(
                    "several audio members", f"{shortened(suffix)} and another"
                )
            elif not file.is_sparse:
                value = read_value(tar.payload(file), suffix, path)
            sample.values[column] = value
    if sample is not None:
        yield sample


def key_and_suffix(name: str) -> tuple[str | None, str]:
    """Split a member's name into key, with the folder, and suffix, in lower case; None and no suffix without a dot."""
    if len(name) > _LONGEST_NAME:
        return None, ""
    match = _NAME.match(name)
    if match is None:
        return None, ""
    return match[1], match[2].lower()


def _split(column: str) -> tuple[str, KeyPath]:
    """Split a column's name into the suffix of the members that are read, and the path to the value in them."""
    parts = column.split(".")
    for count in range(1, len(parts) + 1):
        suffix = ".".join(parts[:count])
        path = tuple(parts[count:])
        kind = kind_of(suffix)
        if suffix == _AUDIO:
            kind = _AUDIO
        if kind == "json" or (kind == _AUDIO and path == (_NUM_SAMPLES,)):
            return suffix, path
    return column, ()


@contextlib.contextmanager
def _opened(folder: Source, name: str) -> Iterator[Payload]:
    """Open one of the files of a folder. Raises Unreadable."""
    address = folder.address_of(name)
    if not folder.is_remote:
        with opened_payload(address) as payload:
            yield payload
        return
    try:
        remote = RemoteFile(address, folder.traffic, None)
        yield Payload(remote.size, Window(remote).read)
        remote.check_unchanged()
    except ManifestError as error:
        raise Unreadable("can't be read", error.message) from None


class AudioFolder(Format):
    """Audio files of a folder and the folders in it; each is an example."""

    name = "audio"
    description = "a folder of audio files"
    names_columns = False
    of_folder = True
    length_column = "duration"
    endings = tuple(f".{suffix}" for suffix in sorted(AUDIO_SUFFIXES | _UNREAD_AUDIO))

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        names = source.names or ()
        self._names = [
            name for name in names if last_part(name).lower() in AUDIO_SUFFIXES
        ]
        self._left_out = Counter({_CONVERT: len(names) - len(self._names)})

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether it is a folder."""
        return bool(head.names)

    def columns(self) -> Sequence[Column]:
        """Return `duration` and `num_samples`."""
        return [Column("duration"), Column(_NUM_SAMPLES)]

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the audio files in the order of their names, some hundred at a time."""
        yield _rows([], [[] for _ in keys], +self._left_out)
        for start in range(0, len(self._names), _CHUNK):
            names = self._names[start : start + _CHUNK]
            yield _rows(names, [self._values(names, key) for key in keys], {})
            self.source.report((start + len(names)) / len(self._names))

    def _values(self, names: Sequence[str], key: str) -> list[object]:
        return [self._value(name, key) for name in names]

    def _value(self, name: str, key: str) -> object:
        """Return the value of a column for an audio file; Unreadable if that is damaged."""
        path: KeyPath = ()
        if key == _NUM_SAMPLES:
            path = (key,)
        elif key != "duration":
            return None
        try:
            with _opened(self.source, name) as payload:
                return read_value(payload, last_part(name).lower(), path)
        except Unreadable as error:
            return error.with_traceback(None)


# Sizes in the headers of binary data sets

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
        """Return whether this begins an .idx, or a shard: a number n, then the offset after n + 1 offsets."""
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
