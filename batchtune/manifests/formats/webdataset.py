"""Tar shards as WebDataset reads them: consecutive members with one key are a sample."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import KNOWN_UNITS, last_part, normalised, summarise
from batchtune.manifests.headers import (
    ARRAY_SUFFIXES,
    AUDIO_SUFFIXES,
    AudioLength,
    HeaderError,
    array_shape,
    audio_length,
)
from batchtune.manifests.headers.wav import wav_length
from batchtune.manifests.json_objects import json_reader
from batchtune.manifests.source import Head, Source
from batchtune.manifests.tarbytes import BLOCK, Archive, Member
from batchtune.manifests.tarindex import Tar, is_header, open_tar
from batchtune.manifests.values import Unreadable

_PEEKED_SAMPLES = 100
_CHUNK = 1000
_MOST_SUFFIXES = 1000
_LARGEST_CHUNK_BYTES = 16 * 1024 * 1024
_LARGEST_TEXT_BYTES = 1024 * 1024
_LARGEST_JSON_BYTES = 16 * 1024 * 1024
_WAV_HEADER_BYTES = 512

_JSON_SUFFIXES = frozenset(("json", "jsn"))
_NUM_SAMPLES = "num_samples"
_AUDIO = "audio"
_ANY_AUDIO = (_AUDIO, f"{_AUDIO}.{_NUM_SAMPLES}")
_SPARSE = Unreadable("a sparse member")
_META = re.compile(r"__[^/]*__(?:$|/)")


@dataclass(frozen=True, slots=True)
class _Reader:
    """How the values of a column are had.

    Attributes:
        column: Its name.
        suffix: Of the members that are read, in lower case; empty as long as any audio may be read.
        read: The archive, offset and size of a member → the value. Raises HeaderError.
        unit: What the values count, or None if only the name can tell.
        kept: Whether the value may be as large as the member.
        single: Whether a sample may have one such member only, whatever its suffix.
    """

    column: str
    suffix: str
    read: Callable[[Archive, int, int], object]
    unit: Unit | None = None
    kept: bool = False
    single: bool = False


@dataclass(slots=True)
class _Sample:
    """The values of one sample, by column.

    Attributes:
        key: Its members' common name, with their folder.
        values: Of the columns that are read, as far as it has such members.
        repeated: A suffix that two of its members have, or None.
        kept_bytes: At most so much memory the values take, as text.
    """

    key: str
    values: dict[str, object] = field(default_factory=dict)
    repeated: str | None = None
    kept_bytes: int = 0


class WebDataset(Format):
    """A shard, of which only those members are looked into that are asked for.

    A column is a suffix: `wav` or any other audio (in seconds), `npy`, `pth`, `pt` (the first dimension), others as
    text. Parts are named behind a dot: `wav.num_samples`, `npy.1` (the second dimension), `json.duration`,
    `json.speaker.id`. Suffixes may hold dots themselves, as that of `a.mix.wav`. `audio` is the one audio member of
    each sample, whatever its suffix.

    Attributes:
        missing_hint: What to do where rows are missing their value.
    """

    name = "webdataset"
    description = "a tar shard of WebDataset"
    breakable = True
    folder_kind = ("tar shards", (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"))
    optional_columns = True
    missing_hint = (
        "Members of one sample must follow each other, as WebDataset needs it: pack them with tar --sort=name."
    )

    def fits(self, head: Head) -> bool:
        """Whether the file begins with a tar header, or is an archive of nothing."""
        block = head.data[:BLOCK]
        return is_header(block) or (len(block) == BLOCK and not head.data.strip(b"\0"))

    def columns(self, source: Source) -> Sequence[Column]:
        """What the members of the first samples hold; `audio` is there where none of them has two audio members."""
        with open_tar(source) as tar:
            samples = _samples(tar, functools.lru_cache(_MOST_SUFFIXES)(_peeking))
            # Where it breaks off, this is told when all of it is read, after what is before.
            first = next(_chunks(itertools.islice(samples, _PEEKED_SAMPLES)))
            single = all(sum(map(_is_audio, sample.values)) < 2 for sample in first)
            return summarise(_entry(sample, single) for sample in first)

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The samples, a thousand at a time. Where the shard breaks off, those before are handed out first."""
        keys = (length_key,) if target_key is None else (length_key, target_key)
        readers = [_reader(key) for key in keys]
        wanted = functools.lru_cache(_MOST_SUFFIXES)(functools.partial(_wanted, readers))
        with open_tar(source) as tar:
            for chunk in _chunks(_samples(tar, wanted)):
                yield _rows(chunk, length_key, target_key, dict(tar.left_out))
                tar.left_out.clear()
                source.report(tar.archive.share)

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """The audio, where there is one member of it in a sample; else the array, where there is only that.

        Returns:
            Its name; None if only the names can tell.

        Raises:
            ManifestError: A sample has several audio members.
        """
        names = [column.name for column in columns]
        whole = [name for name in names if _reader(name).suffix == name]
        audio = [name for name in whole if _is_audio(name)]
        if len(audio) > 1 and _AUDIO in names:
            return _AUDIO
        if len(audio) > 1:
            raise ManifestError(
                f"the samples have several audio members: {listed(audio)}",
                f"Choose with --length-key NAME, for example --length-key {shortened(audio[0])}.",
            )
        if audio:
            return audio[0]
        arrays = [name for name in whole if last_part(name) in ARRAY_SUFFIXES]
        known = any(normalised(last_part(name)) in KNOWN_UNITS for name in names)
        return arrays[0] if len(arrays) == 1 and not known else None

    def unit_in(self, source: Source, column: str) -> Unit | None:
        """What a column counts: seconds of audio, else what the last part of its name says."""
        return _reader(column).unit


def _rows(samples: Sequence[_Sample], length_key: str, target_key: str | None, left_out: Mapping[str, int]) -> Rows:
    lengths = [sample.values.get(length_key) for sample in samples]
    targets = None if target_key is None else [sample.values.get(target_key) for sample in samples]
    keys = [sample.key for sample in samples]
    for index, sample in enumerate(samples):
        if sample.repeated is not None:
            lengths[index] = Unreadable("a member that is there twice", f"two members {shortened(sample.repeated)}")
    return Rows(lengths, targets, lambda index: Place(None, keys[index]), left_out, lambda: keys)


def _chunks(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    """Samples, so many at a time that their values take little memory; what is read before an error is handed out."""
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


def _samples(tar: Tar, readers: Callable[[str], Sequence[_Reader]]) -> Iterator[_Sample]:
    """Groups the members as webdataset's `tar_file_iterator` and `group_by_keys` do (1.0.2).

    Where the archive breaks off, the sample in which it does is not handed out: members of it may be missing.

    Args:
        tar: The shard.
        readers: A suffix → what is to be read of such a member.

    Raises:
        ManifestError: The archive is damaged, breaks off, or goes on behind its end.
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
        for reader in readers(suffix):
            if reader.single and reader.column in sample.values:
                sample.values[reader.column] = Unreadable("several audio members", f"{shortened(suffix)} and another")
                continue
            try:
                sample.values[reader.column] = _SPARSE if sparse else reader.read(tar.archive, offset, size)
            except HeaderError as error:
                sample.values[reader.column] = Unreadable(error.reason, error.detail)
            if reader.kept:
                sample.kept_bytes += size
    if sample is not None:
        yield sample
    tar.check_end()


def key_and_suffix(name: str) -> tuple[str | None, str]:
    """Splits a member's name at the first dot behind its folder, as webdataset's `base_plus_ext` does (1.0.2).

    Its pattern, `^((?:.*/|)[^.]+)[.]([^/]*)$`, also takes some names apart whose last part begins with a dot (`a/.b`
    has the key `a/`). Here that takes linear time.

    Returns:
        The key, with the folder, and the suffix in lower case; None and no suffix without such a dot.
    """
    key, dot, suffix = name.partition(".")
    if not dot or "/" in suffix or "\n" in name or not key or key[-1] == "/":
        return _odd_key_and_suffix(name)
    return key, suffix.lower()


def _odd_key_and_suffix(name: str) -> tuple[str | None, str]:
    """The same, where the first dot of the name is not the one, or the last part begins with it."""
    dot = name.find(".", name.rfind("/") + 1)
    line_end = name.find("\n") if "\n" in name else len(name)
    start = name.rfind("/", 0, max(0, min(dot - 1, line_end))) + 1
    if dot <= start or "." in name[start:dot]:
        return None, ""
    return name[:dot], name[dot + 1 :].lower()


def _reader(column: str) -> _Reader:
    """How a column is read, by its name."""
    if column in _ANY_AUDIO:
        return _audio_reader(column, "")
    parts = column.split(".")
    for count, part in enumerate(parts, 1):
        if part in _JSON_SUFFIXES:
            read = _json_reader(tuple(parts[count:]))
            return _Reader(column, ".".join(parts[:count]), read, _known_unit(parts[-1]), kept=True)
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    whole = ".".join(parts[:-1])
    if last in AUDIO_SUFFIXES:
        return _Reader(column, column, functools.partial(_seconds, last), "s")
    if last == _NUM_SAMPLES and before in AUDIO_SUFFIXES:
        return _Reader(column, whole, functools.partial(_num_samples, before), "samples")
    if last in ARRAY_SUFFIXES:
        return _Reader(column, column, functools.partial(_dimension, last, 0))
    if last.isdecimal() and before in ARRAY_SUFFIXES:
        return _Reader(column, whole, functools.partial(_dimension, before, int(last)))
    return _Reader(column, column, _text, _known_unit(last), kept=True)


def _wanted(readers: Sequence[_Reader], suffix: str) -> Sequence[_Reader]:
    """Those of the readers that read members of this suffix."""
    found = [reader for reader in readers if reader.suffix == suffix and not reader.single]
    if _is_audio(suffix):
        found += [_audio_reader(reader.column, suffix) for reader in readers if reader.single]
    return found


def _audio_reader(column: str, suffix: str) -> _Reader:
    """How one of the columns of any audio is read from members of a suffix."""
    last = last_part(suffix)
    if column == _AUDIO:
        return _Reader(column, suffix, functools.partial(_seconds, last), "s", single=True)
    return _Reader(column, suffix, functools.partial(_num_samples, last), "samples", single=True)


def _is_audio(suffix: str) -> bool:
    return last_part(suffix) in AUDIO_SUFFIXES


def _peeking(suffix: str) -> Sequence[_Reader]:
    """What there is to see in a member; nothing where its suffix means a part of another one (`json.txt`)."""
    last = last_part(suffix)
    if last in AUDIO_SUFFIXES:
        return (_Reader(suffix, suffix, functools.partial(_audio, last)),)
    if last in ARRAY_SUFFIXES:
        return (_Reader(suffix, suffix, functools.partial(_shape, last)),)
    reader = _reader(suffix)
    return (reader,) if reader.suffix == suffix else ()


def _entry(sample: _Sample, single: bool) -> dict[str, object]:
    """What was seen of a sample, by the names of columns; with those of any audio if a sample has it only once."""
    entry: dict[str, object] = {}
    for suffix, value in sample.values.items():
        names = (suffix, _AUDIO) if single and _is_audio(suffix) else (suffix,)
        if isinstance(value, AudioLength):
            entry.update((name, value.seconds) for name in names)
            entry.update((f"{name}.{_NUM_SAMPLES}", value.num_samples) for name in names)
        elif isinstance(value, tuple):
            entry[suffix] = value[0] if value else None
            entry.update((f"{suffix}.{axis}", size) for axis, size in enumerate(value))
        else:
            entry.update((name, None if isinstance(value, Unreadable) else value) for name in names)
    return entry


def _audio(suffix: str, archive: Archive, offset: int, size: int) -> AudioLength:
    if suffix == "wav":
        length = wav_length(archive.read(offset, min(size, _WAV_HEADER_BYTES)), size)
        if length is not None:
            return length
    return audio_length(Member(archive, offset, size), suffix)


def _seconds(suffix: str, archive: Archive, offset: int, size: int) -> float:
    return _audio(suffix, archive, offset, size).seconds


def _num_samples(suffix: str, archive: Archive, offset: int, size: int) -> int:
    return _audio(suffix, archive, offset, size).num_samples


def _shape(suffix: str, archive: Archive, offset: int, size: int) -> tuple[int, ...]:
    return array_shape(Member(archive, offset, size), suffix)


def _dimension(suffix: str, axis: int, archive: Archive, offset: int, size: int) -> object:
    shape = _shape(suffix, archive, offset, size)
    return shape[axis] if axis < len(shape) else Unreadable("too few dimensions", f"of shape {shape}")


def _text(archive: Archive, offset: int, size: int) -> object:
    if size > _LARGEST_TEXT_BYTES:
        return Unreadable("longer than 1 MiB of text", f"{size:,} bytes")
    try:
        text = archive.read(offset, size).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        return Unreadable("no text", f"byte {error.start} is no UTF-8")
    return text if "\0" not in text else Unreadable("no text", "it holds NUL bytes")


def _json_reader(path: tuple[str, ...]) -> Callable[[Archive, int, int], object]:
    """Reads the value at a path in a JSON member."""
    read_value = json_reader(path)

    def read(archive: Archive, offset: int, size: int) -> object:
        if size > _LARGEST_JSON_BYTES:
            return Unreadable("longer than 16 MiB of JSON", f"{size:,} bytes")
        return read_value(archive.read(offset, size))

    return read


def _known_unit(name: str) -> Unit | None:
    return KNOWN_UNITS.get(normalised(name))


FORMAT = WebDataset()
