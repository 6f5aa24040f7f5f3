"""Lhotse's cuts, as a JSON list or as JSON Lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.jsonlines import Identified, Objects, begins_with_list, first_keys
from batchtune.manifests.rows import Column, Rows
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, number

_HINT = "This format is one JSON list of cuts, or one whole cut on every line, as Lhotse's CutSet.to_file writes them."
_MAKE_CUTS = "Make cuts of it: lhotse cut simple -r RECORDINGS -s SUPERVISIONS cuts.jsonl.gz."
_TYPES = {'"MonoCut"', '"MultiCut"', '"MixedCut"', '"PaddingCut"', '"Cut"'}
_PARTS = {"supervisions": "[", "recording": "{", "features": "{"}

# What else Lhotse writes in this way, by keys that nothing else has together.
_OTHERS = {
    "recordings": {"id", "sources", "sampling_rate", "num_samples", "duration"},
    "features": {"num_frames", "num_features", "frame_shift", "storage_type", "duration"},
    "supervisions": {"id", "recording_id", "start", "duration", "channel"},
}


class _TimedCut(Identified, gc=False):
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


_Track = TypeVar("_Track", bound=_TimedTrack)


class Lhotse:
    """Cuts as Lhotse's `CutSet` writes them: MonoCut, MultiCut, PaddingCut, MixedCut, and the Cut of old.

    Durations, numbers of frames and texts are those that the cut has in Lhotse (checked against 1.33): of a
    MixedCut only the tracks that are not muted count.
    """

    name = "lhotse"
    description = "Lhotse's cuts, a JSON list or one on every line"
    units: Mapping[str, Unit] = {}
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the first object is a cut, or another of Lhotse's manifests, so that the error can say so."""
        keys = first_keys(head)
        return _is_cut(keys) or _other(keys) is not None

    def columns(self, source: Source) -> Sequence[Column]:
        """`id`, `duration` and, where cuts have them, `num_frames` of their features and the supervisions' `text`.

        Raises:
            ManifestError: It holds no cuts but recordings, supervisions or features.
        """
        _refuse_others(source)
        return Objects(source, _Whole, _HINT).columns(_COLUMNS)

    def default_column(self, columns: Sequence[Column]) -> str:
        """What is read where the user names nothing."""
        return "duration"

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """Those of a block of lines at a time, or of the whole list at once."""
        if all(key is None or key.split(".")[0] in _TIMED for key in (length_key, target_key)):
            return Objects(source, _Timed, _HINT).rows(_TIMED, length_key, target_key)
        return Objects(source, _Whole, _HINT).rows(_COLUMNS, length_key, target_key)


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
    """As `num_frames` of Lhotse's cuts: of the features, cut as the cut is; None where there are none."""
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
    """The texts of its supervisions, joined by spaces; None where none has any."""
    cuts: Sequence[_WholeCut] = [cut] if cut.tracks is None else [track.cut for track in _audible(cut.tracks)]
    found = [one.text for each in cuts for one in each.supervisions or () if one.text is not None]
    if not all(isinstance(text, str) for text in found):
        return Unreadable("a text that is none", shortened(next(text for text in found if not isinstance(text, str))))
    return " ".join(found) if found else None


def _audible(tracks: Sequence[_Track]) -> Sequence[_Track]:
    return [track for track in tracks if not track.mute] or tracks


_TIMED: dict[str, Callable[[_Timed | _Whole], object]] = {"id": lambda cut: cut.id, "duration": _duration}
_COLUMNS: dict[str, Callable[[_Whole], object]] = {**_TIMED, "num_frames": _num_frames, "text": _text}

FORMAT = Lhotse()
