"""Examples of several files with one name: audio with what belongs to it in a folder, and WebDataset's tar shards."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import KNOWN_UNITS, Column, Format, Place, Rows, last_part, normalised, summarise
from batchtune.manifests.formats.json import json_reader
from batchtune.manifests.headers import (
    ARRAY_SUFFIXES,
    AUDIO_SUFFIXES,
    AudioLength,
    Payload,
    array_shape,
    audio_length,
    opened_payload,
)
from batchtune.manifests.source import Head, Source
from batchtune.manifests.tar import BLOCK, Tar, is_header, open_tar
from batchtune.manifests.values import Unreadable, number

_PEEKED_SAMPLES = 100
_PEEKED_FILES = 20
_CHUNK = 1000
_LARGEST_CHUNK_BYTES = 16 * 1024 * 1024
_MOST_SUFFIXES = 1000

# By the last part of a suffix, in lower case; any other file is text.
_KINDS = {
    **dict.fromkeys(AUDIO_SUFFIXES, "audio"),
    **dict.fromkeys(ARRAY_SUFFIXES, "array"),
    **dict.fromkeys(("json", "jsn"), "json"),
}
_AUDIO, _DURATION, _NUM_SAMPLES = "audio", "duration", "num_samples"
_SPARSE = Unreadable("a sparse member")
_SMALL = frozenset((int, float, AudioLength, tuple, Unreadable))
_META = re.compile(r"__[^/]*__(?:$|/)")

_Path = tuple[str, ...]


class _Reader(NamedTuple):
    """Reads the value of a column from a file.

    Attributes:
        content: Maps a file to what it holds: an AudioLength, an array's shape, text, the value in JSON, or Unreadable.
        path: For audio, `("num_samples",)` for samples instead of seconds; for an array, the number of a dimension.
    """

    content: Callable[[Payload], object]
    path: _Path

    def value(self, content: object) -> object:
        """Return the column's value in the content of a file; None without one."""
        if isinstance(content, AudioLength):
            return content.num_samples if self.path else content.seconds
        if isinstance(content, tuple):
            return self._dimension(content)
        if self.path and not isinstance(content, Unreadable):
            return None
        return content

    def _dimension(self, shape: tuple[int, ...]) -> object:
        axis = ".".join(self.path) or "0"
        if not axis.isdecimal():
            return None
        if int(axis) >= len(shape):
            return Unreadable("too few dimensions", f"of shape {shape}")
        return shape[int(axis)]


class _Whole(_Reader):
    """Reads the whole content, as what follows from it is not chosen yet."""

    def value(self, content: object) -> object:
        """Return the content."""
        return content


# Columns, and how the value of each is read from a member.
_Readers = Sequence[tuple[str, _Reader]]


def _kind(suffix: str) -> str:
    return _KINDS.get(last_part(suffix), "text")


@functools.lru_cache(_MOST_SUFFIXES)
def _reader(suffix: str, path: _Path = ()) -> _Reader:
    """Make the reader of the value at a path in files with a suffix."""
    kind = _kind(suffix)
    if kind == "json":
        return _Reader(json_reader(path), ())
    audio_suffix = last_part(suffix)

    def content(payload: Payload) -> object:
        try:
            if kind == "audio":
                return audio_length(payload, audio_suffix)
            if kind == "array":
                return array_shape(payload)
            return payload.text()
        except Unreadable as error:
            return error.with_traceback(None)

    return _Reader(content, path)


def _named_rows(
    names: Sequence[str], columns: Sequence[Sequence[object]], left_out: Mapping[str, int], num_estimates: int = 0
) -> Rows:
    return Rows(columns, lambda index: Place(None, names[index]), lambda: names, left_out, num_estimates)


class AudioFolder(Format):
    """Audio files of a folder and the folders in it; each is an example.

    A file with the same name and another suffix belongs to it, as a column that the suffix names: the text in it
    (`utt1.txt`: `txt`, `utt1.normalized.txt`: `normalized.txt`), and of JSON each field (`json.speaker`).
    """

    name = "audio"
    description = "a folder of audio files"
    length_column = _DURATION
    named_columns = False
    optional_columns = True
    of_folder = True
    folder_kind = ("audio files", tuple(f".{suffix}" for suffix in sorted(AUDIO_SUFFIXES)))

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Name without its suffix → name, of every example.
        self._audio: dict[str, str] = {}
        # Suffix, as a column is called → name of the example without its suffix → name.
        self._siblings: dict[str, dict[str, str]] = {}
        self._left_out: Counter[str] = Counter()
        # Names of the files whose length is an estimate, since the last rows.
        self._estimated: set[str] = set()
        others = []
        for name in source.names or ():
            stem, _, suffix = name.rpartition(".")
            if suffix.lower() not in AUDIO_SUFFIXES:
                others.append(name)
            elif self._audio.setdefault(stem, name) is not name:
                self._left_out["the same name as another audio file, but for the suffix"] += 1
        for name in others:
            folder, slash, base = name.rpartition("/")
            parts = base.split(".")
            for count in range(len(parts) - 1, 0, -1):
                stem = folder + slash + ".".join(parts[:count])
                if stem in self._audio:
                    self._siblings.setdefault(".".join(parts[count:]).lower(), {}).setdefault(stem, name)
                    break
            else:
                self._left_out["no audio file"] += 1

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether it is a folder."""
        return bool(head.names)

    def columns(self) -> Sequence[Column]:
        """Return `duration`, `num_samples`, and one for each suffix next to the audio, of JSON one for each field."""
        columns = [
            Column(_DURATION, next(iter(self._first_values(self._audio)), None), numeric=True),
            Column(_NUM_SAMPLES, next(iter(self._first_values(self._audio, (_NUM_SAMPLES,))), None), numeric=True),
        ]
        for suffix, names in self._siblings.items():
            if suffix in (_DURATION, _NUM_SAMPLES):  # the audio's own
                continue
            values = self._first_values(names)
            if _kind(suffix) == "json":
                columns += summarise({suffix: value} for value in values)
            elif not values:
                columns.append(Column(suffix, None, numeric=False))
            else:  # numbers only where all are: one spoken digit among the transcripts is still text
                numeric = all(number(value) is not None for value in values)
                columns.append(Column(suffix, values[0], numeric, not numeric))
        return columns

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the audio files in the order of their names, a thousand at a time."""
        files = [self._files(key) for key in keys]
        stems = list(self._audio)
        yield _named_rows([], [[] for _ in keys], self._left_out)
        for start in range(0, len(stems), _CHUNK):
            chunk = stems[start : start + _CHUNK]
            columns = []
            for names, path in files:
                columns.append([self._value(names.get(stem), path) for stem in chunk])
            yield _named_rows([self._audio[stem] for stem in chunk], columns, {}, len(self._estimated))
            self._estimated.clear()
            self.source.report((start + len(chunk)) / len(stems))

    def _first_values(self, names: Mapping[str, str], path: _Path = ()) -> list[object]:
        """Return the values in the first files, without those that can't be read."""
        values = [self._value(name, path) for name in itertools.islice(names.values(), _PEEKED_FILES)]
        self._estimated.clear()
        return [value for value in values if not isinstance(value, Unreadable)]

    def _files(self, key: str) -> tuple[Mapping[str, str], _Path]:
        """Return the files of a column, by the name of the example without its suffix, and the path to the value."""
        if key == _DURATION:
            return self._audio, ()
        if key == _NUM_SAMPLES:
            return self._audio, (_NUM_SAMPLES,)
        parts = key.split(".")
        for count in range(len(parts), 0, -1):
            suffix = ".".join(parts[:count])
            if suffix in self._siblings:
                return self._siblings[suffix], tuple(parts[count:])
        return {}, ()

    def _value(self, name: str | None, path: _Path) -> object:
        """Return the value in a file, None without one; Unreadable if it can't be read."""
        if name is None:
            return None
        reader = _reader(name.rpartition(".")[2].lower(), path)
        try:
            with opened_payload(os.path.join(self.source.path, name)) as payload:
                content = reader.content(payload)
        except Unreadable as error:
            return error.with_traceback(None)
        if isinstance(content, AudioLength) and content.is_estimate:
            self._estimated.add(name)
        return reader.value(content)


@dataclass(slots=True)
class _Sample:
    """Consecutive members with one key: the values of the columns that are read."""

    key: str
    values: dict[str, object] = field(default_factory=dict)
    repeated: str | None = None  # a suffix that two of its members have
    is_estimate: bool = False  # whether the length of its audio is one
    kept_bytes: int = 0  # an upper bound of the memory that the values take as text


class WebDataset(Format):
    """A tar shard, of which only the members asked for are read.

    A column is a suffix: `wav` or any other audio (in seconds), `npy` (the first dimension), others as text. Parts are
    named behind a dot: `wav.num_samples`, `npy.1` (the second dimension), `json.duration`, `json.speaker.id`. Suffixes
    may hold dots themselves, as that of `a.mix.wav`. `audio` is the one audio member of each sample, whatever its
    suffix.
    """

    name = "webdataset"
    description = "a tar shard of WebDataset"
    sharded = True
    folder_kind = ("tar shards", (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"))
    optional_columns = True
    missing_hint = (
        "Members of one sample must follow each other, as WebDataset needs it: pack them with tar --sort=name."
    )

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the file begins with a tar header, or is an archive of nothing."""
        block = head.data[:BLOCK]
        return is_header(block) or (len(block) == BLOCK and not head.data.strip(b"\0"))

    def columns(self) -> Sequence[Column]:
        """Return what the members of the first samples hold, and `audio` if none of them has two audio members."""

        @functools.lru_cache(_MOST_SUFFIXES)
        def readers(suffix: str) -> _Readers:
            if _split(suffix) != (suffix, ()):  # it means a part of another member (`json.txt`)
                return []
            return [(suffix, _Whole(*_reader(suffix)))]

        with open_tar(self.source) as tar:
            # Damage in the shard is reported when all of it is read, after what precedes it.
            first = next(_chunks(itertools.islice(_samples(tar, readers), _PEEKED_SAMPLES)))
        single = all(sum(_kind(name) == "audio" for name in sample.values) < 2 for sample in first)
        return summarise(_entry(sample, single) for sample in first)

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the samples, a thousand at a time; those before damage in the shard come first."""

        @functools.lru_cache(_MOST_SUFFIXES)
        def readers(suffix: str) -> _Readers:
            readers_by_column = []
            for key in keys:
                name, path = _split(key)
                if name == suffix != _AUDIO or (name == _AUDIO and _kind(suffix) == "audio"):
                    readers_by_column.append((key, _reader(suffix, path)))
            return readers_by_column

        with open_tar(self.source) as tar:
            for chunk in _chunks(_samples(tar, readers)):
                columns: list[list[object]] = [[sample.values.get(key) for sample in chunk] for key in keys]
                for index, sample in enumerate(chunk):
                    if sample.repeated is not None:
                        seen = f"two members {shortened(sample.repeated)}"
                        columns[0][index] = Unreadable("a member that is there twice", seen)
                num_estimates = sum(sample.is_estimate for sample in chunk)
                yield _named_rows([sample.key for sample in chunk], columns, dict(tar.left_out), num_estimates)
                tar.left_out.clear()
                tar.report()

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the audio, else the only array, else None. Raises ManifestError if a sample has several audios."""
        names = [column.name for column in columns]
        whole = [name for name in names if _split(name) == (name, ())]
        audio = [name for name in whole if _kind(name) == "audio"]
        if len(audio) > 1 and _AUDIO not in names:
            hint = f"Choose with --length-key NAME, for example --length-key {shortened(audio[0])}."
            raise ManifestError(f"the samples have several audio members: {listed(audio)}", hint)
        if audio:
            return _AUDIO if len(audio) > 1 else audio[0]
        arrays = [name for name in whole if _kind(name) == "array"]
        known = any(normalised(last_part(name)) in KNOWN_UNITS for name in names)
        return arrays[0] if len(arrays) == 1 and not known else None

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column: seconds or samples of audio, none of an array, else by its name."""
        suffix, path = _split(column)
        if suffix == _AUDIO or _kind(suffix) == "audio":
            return "samples" if path else "s"
        return None if _kind(suffix) == "array" else super().unit_in(column)


def _chunks(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    """Yield samples in lists that take little memory; those before an error come first."""
    chunk: list[_Sample] = []
    kept = 0
    try:
        for sample in samples:
            chunk.append(sample)
            kept += sample.kept_bytes
            if len(chunk) == _CHUNK or kept > _LARGEST_CHUNK_BYTES:
                yield chunk
                chunk, kept = [], 0
    except Exception:
        if chunk:
            yield chunk
        raise
    yield chunk


def _samples(tar: Tar, readers: Callable[[str], _Readers]) -> Iterator[_Sample]:
    """Group the members as webdataset's `tar_file_iterator` and `group_by_keys` do (1.0.2).

    `readers` is called with each suffix. A sample in which the archive is damaged or breaks off (ManifestError) is not
    yielded: members of it may be missing.
    """
    sample: _Sample | None = None
    current, suffixes = "", set[str]()
    for name, offset, size, sparse in tar.members():
        key, suffix = key_and_suffix(name)
        if name.startswith("__") and _META.match(name):
            continue
        if key is None:
            tar.left_out["a member without a suffix"] += 1
            continue
        if sample is None or key != current:
            if sample is not None:
                yield sample
            sample = _Sample(key)
            current, suffixes = key, set()
        if suffix in suffixes:
            sample.repeated = suffix
        suffixes.add(suffix)
        for column, reader in readers(suffix):
            if column in sample.values:  # the column `audio`, or a repeated suffix
                value: object = Unreadable("several audio members", f"{shortened(suffix)} and another")
            elif sparse:
                value = _SPARSE
            else:
                content = reader.content(tar.payload(offset, size))
                if isinstance(content, AudioLength) and content.is_estimate:
                    sample.is_estimate = True
                value = reader.value(content)
            sample.values[column] = value
            if type(value) not in _SMALL:
                sample.kept_bytes += size
    if sample is not None:
        yield sample
    tar.check_end()


def key_and_suffix(name: str) -> tuple[str | None, str]:
    """Split a member's name into key, with the folder, and suffix, in lower case, at the first dot behind its folder.

    None and no suffix without such a dot. As webdataset's `base_plus_ext` (1.0.2), but in linear time; its pattern,
    `^((?:.*/|)[^.]+)[.]([^/]*)$`, also takes some names apart whose last part begins with a dot (`a/.b`: key `a/`).
    """
    key, dot, suffix = name.partition(".")
    if dot and key and key[-1] != "/" and "/" not in suffix and "\n" not in name:
        return key, suffix.lower()
    # The first dot of the name is not the one, or the last part begins with it.
    at = name.find(".", name.rfind("/") + 1)
    line_end = name.find("\n") if "\n" in name else len(name)
    start = name.rfind("/", 0, max(0, min(at - 1, line_end))) + 1
    return (None, "") if at <= start or "." in name[start:at] else (name[:at], name[at + 1 :].lower())


def _split(column: str) -> tuple[str, tuple[str, ...]]:
    """Split a column's name into the suffix of the members that are read, and the path to the value in them."""
    parts = column.split(".")
    for count, one in enumerate(parts, 1):
        if _KINDS.get(one) == "json":
            return ".".join(parts[:count]), tuple(parts[count:])
    whole, _, last = column.rpartition(".")
    if (last == _NUM_SAMPLES and (whole == _AUDIO or _kind(whole) == "audio")) or (
        last.isdecimal() and _kind(whole) == "array"
    ):
        return whole, (last,)
    return column, ()


def _entry(sample: _Sample, single: bool) -> dict[str, object]:
    """Return a sample's columns → values; with those of any audio if a sample has it only once."""
    entry: dict[str, object] = {}
    for suffix, value in sample.values.items():
        names = (suffix, _AUDIO) if single and _kind(suffix) == "audio" else (suffix,)
        if isinstance(value, AudioLength):
            entry.update((name, value.seconds) for name in names)
            entry.update((f"{name}.{_NUM_SAMPLES}", value.num_samples) for name in names)
        elif isinstance(value, tuple):
            entry[suffix] = value[0] if value else None
            entry.update((f"{suffix}.{axis}", size) for axis, size in enumerate(value))
        else:
            entry.update((name, None if isinstance(value, Unreadable) else value) for name in names)
    return entry
