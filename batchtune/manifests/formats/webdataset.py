"""Tar shards of WebDataset, in which consecutive members with one key are a sample."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import KNOWN_UNITS, Column, Format, Rows, last_part, normalised, summarise
from batchtune.manifests.formats.members import (
    CHUNK,
    MOST_SUFFIXES,
    NUM_SAMPLES,
    MemberReader,
    kind_of,
    member_reader,
    named_rows,
)
from batchtune.manifests.headers import AudioLength
from batchtune.manifests.source import Head
from batchtune.manifests.tar import BLOCK, Tar, is_header, open_tar
from batchtune.manifests.values import Unreadable

_PEEKED_SAMPLES = 100
_LARGEST_CHUNK_BYTES = 16 * 1024 * 1024
_AUDIO = "audio"
_SPARSE = Unreadable("a sparse member")
_SMALL = frozenset((int, float, AudioLength, tuple, Unreadable))
_META = re.compile(r"__[^/]*__(?:$|/)")

# Columns, and how the value of each is read from a member.
_Readers = Sequence[tuple[str, MemberReader]]


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

        @functools.lru_cache(MOST_SUFFIXES)
        def readers(suffix: str) -> _Readers:
            if _split(suffix) != (suffix, ()):  # it means a part of another member (`json.txt`)
                return []
            return [(suffix, member_reader(suffix, None))]

        with open_tar(self.source) as tar:
            # Damage in the shard is reported when all of it is read, after what precedes it.
            first = next(_chunks(itertools.islice(_samples(tar, readers), _PEEKED_SAMPLES)))
        single = all(sum(kind_of(name) == "audio" for name in sample.values) < 2 for sample in first)
        return summarise(_entry(sample, single) for sample in first)

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the samples, a thousand at a time; those before damage in the shard come first."""

        @functools.lru_cache(MOST_SUFFIXES)
        def readers(suffix: str) -> _Readers:
            readers_by_column = []
            for key in keys:
                name, path = _split(key)
                if name == suffix != _AUDIO or (name == _AUDIO and kind_of(suffix) == "audio"):
                    readers_by_column.append((key, member_reader(suffix, path)))
            return readers_by_column

        with open_tar(self.source) as tar:
            for chunk in _chunks(_samples(tar, readers)):
                columns: list[list[object]] = [[sample.values.get(key) for sample in chunk] for key in keys]
                for index, sample in enumerate(chunk):
                    if sample.repeated is not None:
                        seen = f"two members {shortened(sample.repeated)}"
                        columns[0][index] = Unreadable("a member that is there twice", seen)
                num_estimates = sum(sample.is_estimate for sample in chunk)
                yield named_rows([sample.key for sample in chunk], columns, dict(tar.left_out), num_estimates)
                tar.left_out.clear()
                tar.report()

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the audio, else the only array, else None. Raises ManifestError if a sample has several audios."""
        names = [column.name for column in columns]
        whole = [name for name in names if _split(name) == (name, ())]
        audio = [name for name in whole if kind_of(name) == "audio"]
        if len(audio) > 1 and _AUDIO not in names:
            hint = f"Choose with --length-key NAME, for example --length-key {shortened(audio[0])}."
            raise ManifestError(f"the samples have several audio members: {listed(audio)}", hint)
        if audio:
            return _AUDIO if len(audio) > 1 else audio[0]
        arrays = [name for name in whole if kind_of(name) == "array"]
        known = any(normalised(last_part(name)) in KNOWN_UNITS for name in names)
        return arrays[0] if len(arrays) == 1 and not known else None

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column: seconds or samples of audio, none of an array, else by its name."""
        suffix, path = _split(column)
        if suffix == _AUDIO or kind_of(suffix) == "audio":
            return "samples" if path else "s"
        return None if kind_of(suffix) == "array" else super().unit_in(column)


def _chunks(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    """Yield samples in lists that take little memory; those before an error come first."""
    chunk: list[_Sample] = []
    kept = 0
    try:
        for sample in samples:
            chunk.append(sample)
            kept += sample.kept_bytes
            if len(chunk) == CHUNK or kept > _LARGEST_CHUNK_BYTES:
                yield chunk
                chunk = []
                kept = 0
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
    suffixes = set[str]()
    for name, offset, size, sparse in tar.members():
        key, suffix = key_and_suffix(name)
        if name.startswith("__") and _META.match(name):
            continue
        if key is None:
            tar.left_out["a member without a suffix"] += 1
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
            suffixes = set()
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
    if at <= start or "." in name[start:at]:
        return None, ""
    return name[:at], name[at + 1 :].lower()


def _split(column: str) -> tuple[str, tuple[str, ...]]:
    """Split a column's name into the suffix of the members that are read, and the path to the value in them."""
    parts = column.split(".")
    for count, part in enumerate(parts, 1):
        if kind_of(part) == "json":
            return ".".join(parts[:count]), tuple(parts[count:])
    whole, _, last = column.rpartition(".")
    is_audio = whole == _AUDIO or kind_of(whole) == "audio"
    if is_audio and last == NUM_SAMPLES:
        return whole, (last,)
    if last.isdecimal() and kind_of(whole) == "array":
        return whole, (last,)
    return column, ()


def _entry(sample: _Sample, single: bool) -> dict[str, object]:
    """Return a sample's columns → values; with those of any audio if a sample has it only once."""
    entry: dict[str, object] = {}
    for suffix, value in sample.values.items():
        names = [suffix]
        if single and kind_of(suffix) == "audio":
            names.append(_AUDIO)
        if isinstance(value, AudioLength):
            for name in names:
                entry[name] = value.seconds
                entry[f"{name}.{NUM_SAMPLES}"] = value.num_samples
        elif isinstance(value, tuple):
            entry[suffix] = value[0] if value else None
            for axis, size in enumerate(value):
                entry[f"{suffix}.{axis}"] = size
        else:
            for name in names:
                entry[name] = None if isinstance(value, Unreadable) else value
    return entry
