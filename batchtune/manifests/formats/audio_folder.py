"""Audio files of a folder, with what belongs to them."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from batchtune.manifests.base import Column, Format, Rows, summarise
from batchtune.manifests.formats.members import CHUNK, NUM_SAMPLES, ValuePath, kind_of, member_reader, named_rows
from batchtune.manifests.headers import AUDIO_SUFFIXES, AudioLength, opened_payload
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, number

_DURATION = "duration"
_PEEKED_FILES = 20
_UNREAD_AUDIO = frozenset(("aac", "ac3", "amr", "ape", "au", "caf", "snd", "sph", "voc", "w64", "webm", "wma", "wv"))
_CONVERT = "audio in a format that is not read: convert it to WAV or FLAC"


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
                is_unread = parts[-1].lower() in _UNREAD_AUDIO
                self._left_out[_CONVERT if is_unread else "no audio file"] += 1

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether it is a folder."""
        return bool(head.names)

    def columns(self) -> Sequence[Column]:
        """Return `duration`, `num_samples`, and one for each suffix next to the audio, of JSON one for each field."""
        columns = [
            Column(_DURATION, next(iter(self._first_values(self._audio)), None), numeric=True),
            Column(NUM_SAMPLES, next(iter(self._first_values(self._audio, (NUM_SAMPLES,))), None), numeric=True),
        ]
        for suffix, names in self._siblings.items():
            if suffix in (_DURATION, NUM_SAMPLES):  # the audio's own
                continue
            values = self._first_values(names)
            if kind_of(suffix) == "json":
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
        yield named_rows([], [[] for _ in keys], self._left_out)
        for start in range(0, len(stems), CHUNK):
            chunk = stems[start : start + CHUNK]
            columns = []
            for names, path in files:
                columns.append([self._value(names.get(stem), path) for stem in chunk])
            yield named_rows([self._audio[stem] for stem in chunk], columns, {}, len(self._estimated))
            self._estimated.clear()
            self.source.report((start + len(chunk)) / len(stems))

    def _first_values(self, names: Mapping[str, str], path: ValuePath = ()) -> list[object]:
        """Return the values in the first files, without those that can't be read."""
        values = [self._value(name, path) for name in itertools.islice(names.values(), _PEEKED_FILES)]
        self._estimated.clear()
        return [value for value in values if not isinstance(value, Unreadable)]

    def _files(self, key: str) -> tuple[Mapping[str, str], ValuePath]:
        """Return the files of a column, by the name of the example without its suffix, and the path to the value."""
        if key == _DURATION:
            return self._audio, ()
        if key == NUM_SAMPLES:
            return self._audio, (NUM_SAMPLES,)
        parts = key.split(".")
        for count in range(len(parts), 0, -1):
            suffix = ".".join(parts[:count])
            if suffix in self._siblings:
                return self._siblings[suffix], tuple(parts[count:])
        return {}, ()

    def _value(self, name: str | None, path: ValuePath) -> object:
        """Return the value in a file, None without one; Unreadable if it can't be read."""
        if name is None:
            return None
        reader = member_reader(name.rpartition(".")[2].lower(), path)
        try:
            with opened_payload(os.path.join(self.source.path, name)) as payload:
                content = reader.content(payload)
        except Unreadable as error:
            return error.with_traceback(None)
        if isinstance(content, AudioLength) and content.is_estimate:
            self._estimated.add(name)
        return reader.value(content)
