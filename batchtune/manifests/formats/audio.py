"""A folder of audio files: their lengths by their headers, with the files of the same name beside them."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from batchtune.manifests.base import Column, Format, Place, Rows
from batchtune.manifests.columns import summarise
from batchtune.manifests.headers import AUDIO_SUFFIXES, AudioLength, FilePayload, HeaderError, Payload, audio_length
from batchtune.manifests.json_objects import json_reader, value_below
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, number

T = TypeVar("T")

_CHUNK = 1000
_PEEKED = 20
_LARGEST_TEXT_BYTES = 1024 * 1024
_JSON = json_reader(())

_DURATION, _NUM_SAMPLES = "duration", "num_samples"
_MEMO = "audio files"


class AudioFolder(Format):
    """Audio files of a folder and the folders in it; each is an example.

    A file beside it with the same name and another suffix belongs to it, as a column that the suffix names: the
    text in it (`utt1.txt`: `txt`, `utt1.normalized.txt`: `normalized.txt`), and of JSON each field (`json.speaker`).
    """

    name = "audio"
    description = "a folder of audio files"
    named_columns = False
    optional_columns = True
    of_folder = True
    folder_kind = ("audio files", tuple(f".{suffix}" for suffix in sorted(AUDIO_SUFFIXES)))

    def fits(self, head: Head) -> bool:
        """Whether it is a folder."""
        return bool(head.names)

    def columns(self, source: Source) -> Sequence[Column]:
        """`duration`, `num_samples`, and one for each suffix beside the audio files, of JSON one for each field."""
        files = _files(source)
        lengths = (_length(_path(source, name)) for name in itertools.islice(files.audio.values(), _PEEKED))
        first = next((length for length in lengths if isinstance(length, AudioLength)), None)
        columns = [
            Column(_DURATION, None if first is None else first.seconds, numeric=True),
            Column(_NUM_SAMPLES, None if first is None else first.num_samples, numeric=True),
        ]
        for name, siblings in files.siblings.items():
            if name in (_DURATION, _NUM_SAMPLES):  # the audio's own
                continue
            contents = [_content(_path(source, one)) for one in itertools.islice(siblings.values(), _PEEKED)]
            there = [one for one in contents if not isinstance(one, Unreadable)]
            columns += summarise({name: one} for one in there) if _is_json(name) else [_text_column(name, there)]
        return columns

    def default_column(self, columns: Sequence[Column]) -> str:
        """`duration`."""
        return _DURATION

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """The audio files in the order of their names, a thousand at a time."""
        files = _files(source)
        keys = [_Key.of(key, files) for key in (length_key, target_key) if key is not None]
        stems = list(files.audio)
        yield _rows((), [[] for _ in keys], files.left_out)
        for start in range(0, len(stems), _CHUNK):
            chunk = stems[start : start + _CHUNK]
            values = [_values(source, files, stem, keys) for stem in chunk]
            yield _rows([files.audio[stem] for stem in chunk], list(zip(*values, strict=True)))
            source.report((start + len(chunk)) / len(stems))


def _rows(names: Sequence[str], values: Sequence[Sequence[object]], left_out: Mapping[str, int] | None = None) -> Rows:
    targets = values[1] if len(values) > 1 else None
    return Rows(values[0], targets, lambda index: Place(None, names[index]), left_out or {}, lambda: names)


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a folder, by what they are.

    Attributes:
        audio: Name without its suffix → name, of every example.
        siblings: Suffix, as a column is called → name of the example without its suffix → name.
        left_out: Reason → number of files that are no example and no part of one.
    """

    audio: dict[str, str]
    siblings: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, source: Source) -> _Files:
        """The files of the source."""
        files, others = cls({}), []
        for name in source.names or ():
            stem, _, suffix = name.rpartition(".")
            if suffix.lower() not in AUDIO_SUFFIXES:
                others.append(name)
            elif files.audio.setdefault(stem, name) is not name:
                files.left_out["the same name as another audio file, but for the suffix"] += 1
        for name in others:
            files._add_sibling(name)
        return files

    def _add_sibling(self, name: str) -> None:
        folder, slash, base = name.rpartition("/")
        parts = base.split(".")
        for count in range(len(parts) - 1, 0, -1):
            stem = folder + slash + ".".join(parts[:count])
            if stem in self.audio:
                self.siblings.setdefault(".".join(parts[count:]).lower(), {}).setdefault(stem, name)
                return
        self.left_out["no audio file"] += 1


def _files(source: Source) -> _Files:
    if _MEMO not in source.memo:
        source.memo[_MEMO] = _Files.of(source)
    return cast(_Files, source.memo[_MEMO])


@dataclass(frozen=True, slots=True)
class _Key:
    """A column that is read.

    Attributes:
        name: `duration`, `num_samples`, or a suffix.
        path: Below that, in JSON.
    """

    name: str
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: str, files: _Files) -> _Key:
        """From a column's name."""
        if key in (_DURATION, _NUM_SAMPLES):
            return cls(key)
        parts = key.split(".")
        named = (count for count in range(len(parts), 0, -1) if ".".join(parts[:count]) in files.siblings)
        count = next(named, len(parts))
        return cls(".".join(parts[:count]), tuple(parts[count:]))


def _values(source: Source, files: _Files, stem: str, keys: Sequence[_Key]) -> list[object]:
    """An example's values; each file is read once."""
    contents: dict[str, object] = {}
    found: list[object] = []
    for key in keys:
        in_header = key.name in (_DURATION, _NUM_SAMPLES)
        name = files.audio[stem] if in_header else files.siblings.get(key.name, {}).get(stem)
        if name is not None and name not in contents:
            contents[name] = (_length if in_header else _content)(_path(source, name))
        content = None if name is None else contents[name]
        if isinstance(content, AudioLength):
            content = content.seconds if key.name == _DURATION else content.num_samples
        found.append(content if isinstance(content, Unreadable) or not key.path else value_below(content, key.path))
    return found


def _text_column(name: str, contents: Sequence[object]) -> Column:
    """Numbers only where all are: one spoken digit among the transcripts is still text."""
    numeric = bool(contents) and all(number(one) is not None for one in contents)
    return Column(name, next(iter(contents), None), numeric, text=bool(contents) and not numeric)


def _path(source: Source, name: str) -> str:
    return os.path.join(source.path, name)


def _is_json(name: str) -> bool:
    return name.rpartition(".")[2].lower() in ("json", "jsn")


def _length(path: str) -> AudioLength | Unreadable:
    return _read(path, lambda payload: audio_length(payload, path.rpartition(".")[2].lower()))


def _content(path: str) -> object:
    """What a file beside an audio file holds: its text without the last line's end, or what JSON makes of it."""
    data = _read(path, lambda payload: payload.read(0, _LARGEST_TEXT_BYTES + 1))
    if isinstance(data, Unreadable):
        return data
    if len(data) > _LARGEST_TEXT_BYTES:
        return Unreadable("longer than 1 MiB of text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Unreadable("no text", f"byte {error.start} is no UTF-8")
    if "\0" in text:
        return Unreadable("no text", "it holds NUL bytes")
    return _JSON(text.encode()) if _is_json(path) else text.rstrip("\r\n")


def _read(path: str, read: Callable[[Payload], T]) -> T | Unreadable:
    """What `read` makes of a file, or why it can't be read."""
    try:
        with FilePayload(path) as payload:
            return read(payload)
    except HeaderError as error:
        return Unreadable(error.reason, error.detail)
    except OSError as error:
        return Unreadable("can't be read", error.strerror or str(error))


FORMAT = AudioFolder()
