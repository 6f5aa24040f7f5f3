"""Lhotse's cuts, and LibriSpeechMix's mixtures: JSON whose lengths are computed from its objects."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Column, summarise, walk
from batchtune.manifests.formats.json import JSON_LINES, Getter, JsonFormat, begins_with_list, first_keys
from batchtune.manifests.source import Head
from batchtune.manifests.values import Unreadable, fault, number

_CUTS = {'"MonoCut"', '"MultiCut"', '"MixedCut"', '"PaddingCut"', '"Cut"'}
# Lhotse's other manifests, by keys that nothing else has together.
_OTHERS = {
    "recordings": {"id", "sources", "sampling_rate", "num_samples", "duration"},
    "features": {"num_frames", "num_features", "frame_shift", "storage_type", "duration"},
    "supervisions": {"id", "recording_id", "start", "duration", "channel"},
}


class _Cut(msgspec.Struct, gc=False):
    """The fields of a cut that its duration needs, several times faster to decode; a MixedCut has tracks."""

    id: Any = None
    duration: Any = None
    tracks: tuple[_Track, ...] | None = None


class _Track(msgspec.Struct, gc=False):
    cut: _Cut
    type: Any = None
    offset: Any = 0.0
    mute: Any = False


class _Supervision(msgspec.Struct, gc=False):
    text: Any = None


class _Features(msgspec.Struct, gc=False):
    frame_shift: Any = None
    sampling_rate: Any = None


class _WholeCut(_Cut, gc=False):
    """The fields of a cut that all columns need. The last three are those of a PaddingCut."""

    tracks: tuple[_WholeTrack, ...] | None = None
    supervisions: list[_Supervision] | None = None
    features: _Features | None = None
    num_frames: Any = None
    frame_shift: Any = None
    sampling_rate: Any = None


class _WholeTrack(_Track, gc=False):
    cut: _WholeCut


class _Mixture(msgspec.Struct, gc=False):
    id: Any = None
    delays: Any = None
    durations: Any = None
    texts: Any = None


Track = TypeVar("Track", bound=_Track)


class _Computed(JsonFormat):
    """A format whose columns are computed from its objects, which are of type `kind`."""

    length_column = "duration"
    kind: ClassVar[type[Any]]
    # Column → an object's value; lists may be indexed (`durations.0`).
    values: ClassVar[Mapping[str, Callable[[Any], object]]]

    def columns(self) -> Sequence[Column]:
        """Return the columns of the first objects, and `duration`; `id` and `text…` are texts, the others numbers."""
        rows: list[Mapping[str, object]] = []
        for entry in self.first(self.kind):
            values = {name: get(entry) for name, get in self.values.items()}
            rows.append({name: value for name, value in values.items() if value is not None or name == "duration"})
        columns = []
        for column in summarise(rows):
            # A number that is written as something else is not a text to be counted.
            is_text = column.text and column.name.startswith(("id", "text"))
            columns.append(replace(column, text=is_text))
        return columns

    def getters(self, keys: Sequence[str]) -> tuple[type[Any], list[Getter]]:
        """Return getters of computed columns."""

        def getter(name: str, *path: str) -> Getter:
            get = self.values[name]
            if not path:
                return lambda objects: list(map(get, objects))
            return lambda objects: [walk(get(entry), path) for entry in objects]

        return self.kind, [getter(*key.split(".")) for key in keys]


def _duration(cut: _Cut) -> object:
    """Return the duration; with tracks, as `MixedCut.duration` does: the last end, rounded to 8 digits."""
    if cut.tracks is None:
        return cut.duration
    ends = []
    for track in _audible(cut.tracks):
        offset = number(track.offset)
        duration = number(track.cut.duration)
        if offset is None or duration is None or not math.isfinite(offset + duration):
            seen = f"{shortened(track.offset)} + {shortened(track.cut.duration)}"
            return Unreadable("a track without a length", seen)
        ends.append(offset + duration)
    if not ends:
        return Unreadable("a mix without tracks", "[]")
    return round(max(ends), 8)


def _num_frames(cut: _WholeCut) -> object:
    """Return the frames of the features, cut as the cut is, as Lhotse's `num_frames`; None without any."""
    first: _WholeCut = cut
    if cut.tracks is not None:
        audible = _audible(cut.tracks)
        unpadded = [track for track in audible if track.type != "PaddingCut"]
        if not audible:
            return None
        first = (unpadded or audible)[0].cut
    elif cut.features is None:
        return cut.num_frames
    grid = first.features
    if grid is None:
        if first.num_frames is None:
            return None
        grid = _Features(first.frame_shift, first.sampling_rate)
    duration = number(_duration(cut))
    frame_shift = number(grid.frame_shift)
    rate = number(grid.sampling_rate)
    if duration is not None and frame_shift is not None and rate is not None:
        samples = duration * rate
        hop = frame_shift * rate
        if math.isfinite(samples) and math.isfinite(hop) and round(hop) > 0:
            return (round(samples) + round(hop) // 2) // round(hop)  # as Lhotse's `compute_num_frames`
    return Unreadable("frames without their rate")


def _text(cut: _WholeCut) -> object:
    """Join the texts of its supervisions with spaces; None if none has any."""
    cuts = [cut]
    if cut.tracks is not None:
        cuts = [track.cut for track in _audible(cut.tracks)]
    texts = []
    for part in cuts:
        for supervision in part.supervisions or ():
            if isinstance(supervision.text, str):
                texts.append(supervision.text)
            elif supervision.text is not None:
                return Unreadable("not text", shortened(supervision.text))
    return " ".join(texts) if texts else None


def _audible(tracks: Sequence[Track]) -> Sequence[Track]:
    return [track for track in tracks if not track.mute] or tracks


class Lhotse(_Computed):
    """Cuts as Lhotse's `CutSet` writes them: MonoCut, MultiCut, PaddingCut, MixedCut, and the Cut of old.

    Durations, numbers of frames and texts are those of Lhotse (checked against 1.33): of a MixedCut only the tracks
    that are not muted count.
    """

    name = "lhotse"
    description = "Lhotse's cuts, a JSON list or one on every line"
    folder_kind = JSON_LINES
    hint = "This format is a JSON list of cuts, or one whole cut on every line, as Lhotse's CutSet.to_file writes them."
    kind = _WholeCut
    values: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "id": operator.attrgetter("id"),
        "duration": _duration,
        "num_frames": _num_frames,
        "text": _text,
    }

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first object is a cut, or another of Lhotse's manifests, so that the error can say so."""
        keys = first_keys(head)
        return _is_cut(keys) or _other(keys) is not None

    def columns(self) -> Sequence[Column]:
        """Return the columns of cuts. Raises ManifestError for recordings, supervisions or features alone."""
        head = self.source.head
        keys = first_keys(head)
        if not _is_cut(keys) and (other := _other(keys)):
            plain = "json-list" if begins_with_list(head) else "nemo"
            hint = "Make cuts of it: lhotse cut simple -r RECORDINGS -s SUPERVISIONS cuts.jsonl.gz. Or take the"
            hint = f"{hint} durations as they are with --format {plain} --length-key duration."
            raise ManifestError(f"{self.source.path} contains Lhotse's {other}, not cuts", hint)
        return super().columns()

    def getters(self, keys: Sequence[str]) -> tuple[type[Any], list[Getter]]:
        """Return getters of computed columns, of objects without the fields that only the others need."""
        kind, getters = super().getters(keys)
        if {"id", "duration"}.issuperset(keys):
            kind = _Cut
        return kind, getters


def _is_cut(keys: Mapping[str, str]) -> bool:
    if keys.get("type") in _CUTS:
        return "duration" in keys or "tracks" in keys
    parts = (("supervisions", "["), ("recording", "{"), ("features", "{"))
    return keys.keys() >= {"id", "start", "duration"} and any(keys.get(name) == begin for name, begin in parts)


def _other(keys: Mapping[str, str]) -> str | None:
    return next((name for name, needed in _OTHERS.items() if keys.keys() >= needed), None)


def _mixed_duration(mixture: _Mixture) -> object:
    delays = mixture.delays
    durations = mixture.durations
    if not isinstance(delays, list) or not isinstance(durations, list):
        return None
    if len(delays) != len(durations):
        return Unreadable("not as many delays as durations", f"{len(delays)} delays, {len(durations)} durations")
    if not durations:
        return Unreadable("an empty list", "[]")
    for value in (*delays, *durations):
        seconds = number(value)
        if seconds is None:
            seconds = math.nan
        if not math.isfinite(seconds):
            return Unreadable(fault(value, seconds), shortened(value))
    return max(map(operator.add, map(float, delays), map(float, durations)))


class LibriSpeechMix(_Computed):
    """JSON Lines with `delays` and `durations`, as https://github.com/NaoyukiKanda/LibriSpeechMix publishes them.

    A mixture lasts until its last utterance ends: `duration` = max(delay + duration), in s.
    """

    name = "librispeechmix"
    description = "one JSON object on every line, with lists of delays and durations"
    hint = 'This format holds one whole JSON object on every line: {"delays": [0.0, 2.5], "durations": [5.8, 10.4], …}.'
    kind = _Mixture
    values: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "id": operator.attrgetter("id"),
        "duration": _mixed_duration,
        **{name: operator.attrgetter(name) for name in ("durations", "texts")},
    }

    @staticmethod
    def fits(head: Head) -> bool:
        """Return whether the first line is an object with both lists."""
        keys = first_keys(head) if b'"delays"' in head.data and not begins_with_list(head) else {}
        return keys.get("delays") == keys.get("durations") == "["
