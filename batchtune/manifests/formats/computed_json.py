"""JSON whose lengths are computed: Lhotse's cuts, and the mixtures of LibriSpeechMix."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Column, Format, Rows
from batchtune.manifests.columns import PEEKED_ROWS, summarise, walk
from batchtune.manifests.formats.json import JSON_LINES
from batchtune.manifests.json_objects import Objects, begins_with_list, first_keys
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, fault, number

_CUTS = "This format is one JSON list of cuts, or one whole cut on every line, as Lhotse's CutSet.to_file writes them."
_MIXTURES = (
    'This format holds one whole JSON object on every line: {"delays": [0.0, 2.5], "durations": [5.8, 10.4], …}.'
)
_MAKE_CUTS = "Make cuts of it: lhotse cut simple -r RECORDINGS -s SUPERVISIONS cuts.jsonl.gz."
_TYPES = {'"MonoCut"', '"MultiCut"', '"MixedCut"', '"PaddingCut"', '"Cut"'}
_PARTS = {"supervisions": "[", "recording": "{", "features": "{"}

# What else Lhotse writes in this way, by keys that nothing else has together.
_OTHERS = {
    "recordings": {"id", "sources", "sampling_rate", "num_samples", "duration"},
    "features": {"num_frames", "num_features", "frame_shift", "storage_type", "duration"},
    "supervisions": {"id", "recording_id", "start", "duration", "channel"},
}


class _Identified(msgspec.Struct, gc=False):
    id: Any = None


class _TimedCut(_Identified, gc=False):
    duration: Any = None


class _TimedTrack(msgspec.Struct, gc=False):
    cut: _TimedCut
    type: Any = None
    offset: Any = 0.0
    mute: Any = False


class _Timed(_TimedCut, gc=False):
    """As much of a cut as its duration depends on; with tracks it is a MixedCut. Several times faster to decode."""

    tracks: list[_TimedTrack] | None = None


class _Supervision(msgspec.Struct, gc=False):
    text: Any = None


class _Features(msgspec.Struct, gc=False):
    frame_shift: Any = None
    sampling_rate: Any = None


class _WholeCut(_TimedCut, gc=False):
    """The last three are those of a PaddingCut."""

    supervisions: list[_Supervision] | None = None
    features: _Features | None = None
    num_frames: Any = None
    frame_shift: Any = None
    sampling_rate: Any = None


class _WholeTrack(_TimedTrack, gc=False):
    cut: _WholeCut


class _Whole(_WholeCut, gc=False):
    """As much of a cut as all columns depend on."""

    tracks: list[_WholeTrack] | None = None


Track = TypeVar("Track", bound=_TimedTrack)
T = TypeVar("T", bound=_Identified)
Getters = Mapping[str, Callable[[T], object]]


class Lhotse(Format):
    """Cuts as Lhotse's `CutSet` writes them: MonoCut, MultiCut, PaddingCut, MixedCut, and the Cut of old.

    Durations, numbers of frames and texts are those that the cut has in Lhotse (checked against 1.33): of a
    MixedCut only the tracks that are not muted count.
    """

    name = "lhotse"
    description = "Lhotse's cuts, a JSON list or one on every line"
    folder_kind = JSON_LINES

    def fits(self, head: Head) -> bool:
        """Whether the first object is a cut, or another of Lhotse's manifests, so that the error can say so."""
        keys = first_keys(head)
        return _is_cut(keys) or _other(keys) is not None

    def columns(self, source: Source) -> Sequence[Column]:
        """`id`, `duration` and, if cuts have them, `num_frames` of their features and the supervisions' `text`.

        Raises:
            ManifestError: It holds no cuts but recordings, supervisions or features.
        """
        _refuse_others(source)
        return _columns(Objects(source, _Whole, "id", _CUTS), _OF_CUTS)

    def default_column(self, columns: Sequence[Column]) -> str:
        """`duration`."""
        return "duration"

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """Those of a block of lines at a time, or of the whole list at once."""
        if _are_in(_OF_TIMED_CUTS, length_key, target_key):
            return _rows(Objects(source, _Timed, "id", _CUTS), _OF_TIMED_CUTS, length_key, target_key)
        return _rows(Objects(source, _Whole, "id", _CUTS), _OF_CUTS, length_key, target_key)


class _TimedMixture(_Identified, gc=False):
    """As much of a mixture as its duration depends on."""

    delays: Any = None
    durations: Any = None


class _Mixture(_TimedMixture, gc=False):
    texts: Any = None


class LibriSpeechMix(Format):
    """JSON Lines with `delays` and `durations`, as https://github.com/NaoyukiKanda/LibriSpeechMix publishes them.

    A mixture lasts until its last utterance ends: `duration` = max(delay + duration), in s.
    """

    name = "librispeechmix"
    description = "one JSON object on every line, with lists of delays and durations"

    def fits(self, head: Head) -> bool:
        """Whether the first line is an object with both lists."""
        keys = first_keys(head) if b'"delays"' in head.data and not begins_with_list(head) else {}
        return keys.get("delays") == keys.get("durations") == "["

    def columns(self, source: Source) -> Sequence[Column]:
        """`id`, the `duration` of the mixture, the `durations` and the `texts` of its utterances as lists."""
        return _columns(Objects(source, _Mixture, "id", _MIXTURES), _OF_MIXTURES)

    def default_column(self, columns: Sequence[Column]) -> str:
        """`duration`."""
        return "duration"

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """One `Rows` for every block of the file."""
        if _are_in(_OF_TIMED_MIXTURES, length_key, target_key):
            return _rows(Objects(source, _TimedMixture, "id", _MIXTURES), _OF_TIMED_MIXTURES, length_key, target_key)
        return _rows(Objects(source, _Mixture, "id", _MIXTURES), _OF_MIXTURES, length_key, target_key)


def _columns(objects: Objects[T], getters: Getters[T]) -> list[Column]:
    """The columns that the first objects have, and `duration`; `id` and `text…` are texts, the others numbers."""
    found: list[Mapping[str, object]] = []
    for entry in objects.first(PEEKED_ROWS):
        values = {name: get(entry) for name, get in getters.items()}
        found.append({name: one for name, one in values.items() if one is not None or name == "duration"})
    # A number that is written as something else is still no text to be measured.
    return [replace(column, text=column.text and column.name.startswith(("id", "text"))) for column in summarise(found)]


def _are_in(getters: Mapping[str, object], *keys: str | None) -> bool:
    return all(key is None or key.split(".")[0] in getters for key in keys)


def _rows(objects: Objects[T], getters: Getters[T], length_key: str, target_key: str | None) -> Iterator[Rows]:
    """All rows; the keys are names of columns, perhaps with an index into a list (`durations.0`)."""
    for chunk in objects.chunks():
        lengths = _values(chunk.objects, getters, length_key)
        targets = None if target_key is None else _values(chunk.objects, getters, target_key)
        yield Rows(lengths, targets, partial(chunk.place, 0), ids=partial(_ids, chunk.objects))


def _ids(objects: Sequence[_Identified]) -> list[str | None]:
    return [one.id if isinstance(one.id, str) else None for one in objects]


def _values(objects: Sequence[T], getters: Getters[T], key: str) -> list[object]:
    name, *path = key.split(".")
    values = list(map(getters[name], objects))
    return [walk(one, path) for one in values] if path else values


def _is_cut(keys: Mapping[str, str]) -> bool:
    if keys.get("type") in _TYPES:
        return "duration" in keys or "tracks" in keys
    parts = any(keys.get(name) == begin for name, begin in _PARTS.items())
    return parts and keys.keys() >= {"id", "start", "duration"}


def _other(keys: Mapping[str, str]) -> str | None:
    return next((name for name, needed in _OTHERS.items() if keys.keys() >= needed), None)


def _refuse_others(source: Source) -> None:
    keys = first_keys(source.head)
    other = None if _is_cut(keys) else _other(keys)
    if other is None:
        return
    plain = "json-list" if begins_with_list(source.head) else "nemo"
    hint = f"{_MAKE_CUTS} Or take the durations as they are with --format {plain} --length-key duration."
    raise ManifestError(f"{source.path} holds Lhotse's {other}, no cuts", hint)


def _duration(cut: _Timed | _Whole) -> object:
    """As `MixedCut.duration` where there are tracks: the end of the last, rounded to 8 digits."""
    if cut.tracks is None:
        return cut.duration
    ends = []
    for track in _audible(cut.tracks):
        offset, duration = number(track.offset), number(track.cut.duration)
        if offset is None or duration is None or not math.isfinite(offset + duration):
            seen = f"{shortened(track.offset)} + {shortened(track.cut.duration)}"
            return Unreadable("a track without a length", seen)
        ends.append(offset + duration)
    return round(max(ends), 8) if ends else Unreadable("a mix without tracks", "[]")


def _num_frames(cut: _Whole) -> object:
    """As `num_frames` of Lhotse's cuts: of the features, cut as the cut is; None if there are none."""
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
    return _frames(number(_duration(cut)), number(grid.frame_shift), number(grid.sampling_rate))


def _frames(duration: float | None, frame_shift: float | None, sampling_rate: float | None) -> object:
    """As Lhotse's `compute_num_frames`."""
    if duration is None or frame_shift is None or sampling_rate is None:
        return Unreadable("frames without their rate")
    samples, hop = duration * sampling_rate, frame_shift * sampling_rate
    if not (math.isfinite(samples) and math.isfinite(hop) and round(hop) > 0):
        return Unreadable("frames without their rate")
    return (round(samples) + round(hop) // 2) // round(hop)


def _text(cut: _Whole) -> object:
    """The texts of its supervisions, joined by spaces; None if none has any."""
    cuts: Sequence[_WholeCut] = [cut] if cut.tracks is None else [track.cut for track in _audible(cut.tracks)]
    found = [one.text for each in cuts for one in each.supervisions or () if one.text is not None]
    if not all(isinstance(text, str) for text in found):
        return Unreadable("a text that is none", shortened(next(text for text in found if not isinstance(text, str))))
    return " ".join(found) if found else None


def _audible(tracks: Sequence[Track]) -> Sequence[Track]:
    return [track for track in tracks if not track.mute] or tracks


def _mixed_duration(mixture: _TimedMixture) -> object:
    delays, durations = mixture.delays, mixture.durations
    if not isinstance(delays, list) or not isinstance(durations, list):
        return None
    if len(delays) != len(durations):
        return Unreadable("not as many delays as durations", f"{len(delays)} delays, {len(durations)} durations")
    if not durations:
        return Unreadable("an empty list", "[]")
    if not (_NUMBERS.issuperset(map(type, delays)) and _NUMBERS.issuperset(map(type, durations))):
        for value in (*delays, *durations):
            found = number(value)
            if found is None or not math.isfinite(found):
                return Unreadable(fault(value, math.nan if found is None else found), shortened(value))
    try:
        return max(map(operator.add, map(float, delays), map(float, durations)))
    except OverflowError:  # a whole number beyond all floats
        return math.inf


_NUMBERS = {int, float}
_OF_TIMED_CUTS: dict[str, Callable[[_Timed | _Whole], object]] = {"id": lambda cut: cut.id, "duration": _duration}
_OF_CUTS: dict[str, Callable[[_Whole], object]] = {**_OF_TIMED_CUTS, "num_frames": _num_frames, "text": _text}
_OF_TIMED_MIXTURES: dict[str, Callable[[_TimedMixture], object]] = {
    "id": lambda mixture: mixture.id,
    "duration": _mixed_duration,
    "durations": lambda mixture: mixture.durations,
}
_OF_MIXTURES: dict[str, Callable[[_Mixture], object]] = {**_OF_TIMED_MIXTURES, "texts": lambda mixture: mixture.texts}

LHOTSE = Lhotse()
LIBRISPEECHMIX = LibriSpeechMix()
