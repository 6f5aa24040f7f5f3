"""A folder of audio files: their lengths by their headers, with the files of the same name beside them."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from batchtune.manifests.base import Column, Format, Rows, summarise
from batchtune.manifests.contents import NUM_SAMPLES, Read, column_reader, is_json, named_rows, part, reader
from batchtune.manifests.headers import AudioLength, opened_payload
from batchtune.manifests.headers.audio import AUDIO_SUFFIXES
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, number

_CHUNK = 1000
_PEEKED = 20
_DURATION = "duration"


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

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Name without its suffix → name, of every example.
        self._audio: dict[str, str] = {}
        # Suffix, as a column is called → name of the example without its suffix → name.
        self._siblings: dict[str, dict[str, str]] = {}
        self._left_out: Counter[str] = Counter()
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
        """Return `duration`, `num_samples`, and one for each suffix beside the audio, of JSON one for each field."""
        lengths = (self._read(name, reader) for name in itertools.islice(self._audio.values(), _PEEKED))
        first = next((length for length in lengths if isinstance(length, AudioLength)), None)
        columns = [
            Column(_DURATION, None if first is None else first.seconds, numeric=True),
            Column(NUM_SAMPLES, None if first is None else first.num_samples, numeric=True),
        ]
        for suffix, names in self._siblings.items():
            if suffix in (_DURATION, NUM_SAMPLES):  # the audio's own
                continue
            contents = [part(self._read(name, reader)) for name in itertools.islice(names.values(), _PEEKED)]
            readable = [one for one in contents if not isinstance(one, Unreadable)]
            if is_json(suffix):
                columns += summarise({suffix: one} for one in readable)
            else:  # numbers only where all are: one spoken digit among the transcripts is still text
                numeric = bool(readable) and all(number(one) is not None for one in readable)
                columns.append(Column(suffix, next(iter(readable), None), numeric, bool(readable) and not numeric))
        return columns

    def default_column(self, columns: Sequence[Column]) -> str:
        """Return `duration`."""
        return _DURATION

    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield the audio files in the order of their names, a thousand at a time."""
        values = list(map(self._column, keys))
        stems = list(self._audio)
        yield named_rows([], [[] for _ in keys], self._left_out)
        for start in range(0, len(stems), _CHUNK):
            chunk = stems[start : start + _CHUNK]
            columns = [list(map(value, chunk)) for value in values]
            yield named_rows([self._audio[stem] for stem in chunk], columns, {})
            self.source.report((start + len(chunk)) / len(stems))

    def _column(self, key: str) -> Callable[[str], object]:
        """Make a function from an example's name without its suffix to its value in a column."""
        if key in (_DURATION, NUM_SAMPLES):
            names, path = self._audio, tuple({key} - {_DURATION})
        else:
            parts = key.split(".")
            known = (count for count in range(len(parts), 0, -1) if ".".join(parts[:count]) in self._siblings)
            count = next(known, len(parts))
            names, path = self._siblings.get(".".join(parts[:count]), {}), tuple(parts[count:])

        def value(stem: str) -> object:
            name = names.get(stem)
            return None if name is None else self._read(name, lambda suffix: column_reader(suffix, path))

        return value

    def _read(self, name: str, reader_of: Callable[[str], Read]) -> object:
        """Return what the reader of its suffix makes of a file; Unreadable if it can't be read."""
        try:
            with opened_payload(os.path.join(self.source.path, name)) as payload:
                return reader_of(name.rpartition(".")[2].lower())(payload)
        except Unreadable as error:
            return error.with_traceback(None)
