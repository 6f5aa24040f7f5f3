"""Tar shards as WebDataset reads them: consecutive members with one key are a sample."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from batchtune.errors import ManifestError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import KNOWN_UNITS, Column, Format, Rows, last_part, normalised, summarise
from batchtune.manifests.contents import (
    JSON_SUFFIXES,
    NUM_SAMPLES,
    Read,
    column_reader,
    is_array,
    is_audio,
    named_rows,
    reader,
)
from batchtune.manifests.headers import AudioLength
from batchtune.manifests.source import Head
from batchtune.manifests.tar import BLOCK, Tar, is_header, open_tar
from batchtune.manifests.values import Unreadable

_PEEKED_SAMPLES = 100
_CHUNK = 1000
_MOST_SUFFIXES = 1000
_LARGEST_CHUNK_BYTES = 16 * 1024 * 1024

_AUDIO = "audio"
_SPARSE = Unreadable("a sparse member")
_SMALL = frozenset((int, float, AudioLength, tuple, Unreadable))
_META = re.compile(r"__[^/]*__(?:$|/)")


# Columns, and how the value of each is read from a member.
_Readers = Sequence[tuple[str, Read]]


@dataclass(slots=True)
class _Sample:
    """One sample: the common name of its members, with their folder, and the values of the columns that are read.

    Attributes:
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
    """

    name = "webdataset"
    description = "a tar shard of WebDataset"
    breakable = True
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
        with open_tar(self.source) as tar:
            samples = _samples(tar, functools.lru_cache(_MOST_SUFFIXES)(_peeking))
            # Where it breaks off, this is told when all of it is read, after what is before.
            first = next(_chunks(itertools.islice(samples, _PEEKED_SAMPLES)))
            single = all(sum(map(is_audio, sample.values)) < 2 for sample in first)
            return summarise(_entry(sample, single) for sample in first)

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the samples, a thousand at a time. Where the shard breaks off, those before are handed out first."""
        wanted = functools.lru_cache(_MOST_SUFFIXES)(functools.partial(_wanted, keys))
        with open_tar(self.source) as tar:
            for chunk in _chunks(_samples(tar, wanted)):
                columns: list[list[object]] = [[sample.values.get(key) for sample in chunk] for key in keys]
                for index, sample in enumerate(chunk):
                    if sample.repeated is not None:
                        seen = f"two members {shortened(sample.repeated)}"
                        columns[0][index] = Unreadable("a member that is there twice", seen)
                yield named_rows([sample.key for sample in chunk], columns, dict(tar.left_out))
                tar.left_out.clear()
                tar.report()

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the audio, else the only array, else None. Raises ManifestError if a sample has several audios."""
        names = [column.name for column in columns]
        whole = [name for name in names if _split(name) == (name, ())]
        audio = [name for name in whole if is_audio(name)]
        if len(audio) > 1 and _AUDIO not in names:
            hint = f"Choose with --length-key NAME, for example --length-key {shortened(audio[0])}."
            raise ManifestError(f"the samples have several audio members: {listed(audio)}", hint)
        if audio:
            return _AUDIO if len(audio) > 1 else audio[0]
        arrays = [name for name in whole if is_array(name)]
        known = any(normalised(last_part(name)) in KNOWN_UNITS for name in names)
        return arrays[0] if len(arrays) == 1 and not known else None

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column: seconds of audio, else what the last part of its name says."""
        suffix, path = _split(column)
        if suffix == _AUDIO or is_audio(suffix):
            return "samples" if path else "s"
        return None if is_array(suffix) else KNOWN_UNITS.get(normalised(last_part(column)))


def _chunks(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    """Yield so many samples at a time that their values take little memory; those before an error are handed out."""
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

    `readers` is called with each suffix. Where the archive is damaged or breaks off (ManifestError), the sample in
    which it does is not handed out: members of it may be missing.
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
        for column, read in readers(suffix):
            if column in sample.values:  # that of any audio, or the suffix is there twice
                value: object = Unreadable("several audio members", f"{shortened(suffix)} and another")
            else:
                value = _SPARSE if sparse else read(tar.payload(offset, size))
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
        if one in JSON_SUFFIXES:
            return ".".join(parts[:count]), tuple(parts[count:])
    whole, _, last = column.rpartition(".")
    if (last == NUM_SAMPLES and (whole == _AUDIO or is_audio(whole))) or (last.isdecimal() and is_array(whole)):
        return whole, (last,)
    return column, ()


def _wanted(keys: Sequence[str], suffix: str) -> _Readers:
    """Return the columns that members of this suffix have."""
    found = []
    for key in keys:
        name, path = _split(key)
        if name == suffix != _AUDIO or (name == _AUDIO and is_audio(suffix)):
            found.append((key, column_reader(suffix, path)))
    return found


def _peeking(suffix: str) -> _Readers:
    """Return how to look into a member; not at all if its suffix means a part of another one (`json.txt`)."""
    return [(suffix, reader(suffix))] if _split(suffix) == (suffix, ()) else []


def _entry(sample: _Sample, single: bool) -> dict[str, object]:
    """Return a sample's columns → values; with those of any audio if a sample has it only once."""
    entry: dict[str, object] = {}
    for suffix, value in sample.values.items():
        names = (suffix, _AUDIO) if single and is_audio(suffix) else (suffix,)
        if isinstance(value, AudioLength):
            entry.update((name, value.seconds) for name in names)
            entry.update((f"{name}.{NUM_SAMPLES}", value.num_samples) for name in names)
        elif isinstance(value, tuple):
            entry[suffix] = value[0] if value else None
            entry.update((f"{suffix}.{axis}", size) for axis, size in enumerate(value))
        else:
            entry.update((name, None if isinstance(value, Unreadable) else value) for name in names)
    return entry
