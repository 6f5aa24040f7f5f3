"""Lhotse's manifests: cuts in every shape, compared with Lhotse itself, and what is no cut."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from batchtune.manifests import FORMATS, ReadOptions, load_lengths
from batchtune.manifests.source import Head

Write = Callable[[Sequence[object]], str]


def _lines(cuts: Sequence[object]) -> str:
    return "".join(json.dumps(cut) + "\n" for cut in cuts)


def _list(cuts: Sequence[object]) -> str:
    return json.dumps(cuts, indent=2)


both = pytest.mark.parametrize("write", [_lines, _list], ids=["lines", "list"])


def _cut(name: str, duration: object, **more: object) -> dict[str, object]:
    cut = {"id": name, "start": 0, "duration": duration, "channel": 0, "supervisions": [], "type": "MonoCut"}
    return {**cut, **more}


def _track(duration: object, offset: object = 0.0, kind: str = "MonoCut", **more: object) -> dict[str, object]:
    return {"cut": {"id": "a", "duration": duration}, "type": kind, "offset": offset, **more}


def _mix(name: str, *tracks: object) -> dict[str, object]:
    return {"id": name, "tracks": list(tracks), "type": "MixedCut"}


# ---- durations ----


@both
def test_a_cut_is_as_long_as_its_duration(read, write: Write) -> None:
    for kind in ("MonoCut", "MultiCut", "PaddingCut", "Cut"):
        lengths = read(write([_cut("a", 2.5, type=kind), _cut("b", 10.000000001, type=kind)]))
        assert (lengths.values.tolist(), lengths.unit) == ([10.000000001, 2.5], "s")


@both
def test_a_mix_lasts_until_its_last_track_ends(read, write: Write) -> None:
    assert read(write([_mix("m", _track(3.0), _track(2.5, 4.25))])).values.tolist() == [6.75]


def test_muted_tracks_count_only_where_there_are_no_others(read) -> None:
    assert read(_lines([_mix("m", _track(9.0, mute=True))])).values.tolist() == [9.0]
    assert read(_lines([_mix("m", _track(3.0), _track(9.0, mute=True))])).values.tolist() == [3.0]


@pytest.mark.parametrize(
    ("tracks", "said"),
    [
        ([], "is 0.0 (zero)"),
        ([_track("abc")], "can't be read: a track without a length"),
        ([_track(2.0, None)], "can't be read: a track without a length"),
        ([_track("inf"), _track(1.0)], "can't be read: a track without a length"),
        ([{"cut": _mix("inner", _track(1.0))}], "can't be read: a track without a length"),
    ],
)
def test_a_mix_that_has_no_length_is_an_invalid_row(refusal, tracks: list[object], said: str) -> None:
    message = refusal(_lines([_cut("good", 1.0), _mix("bad", *tracks)])).message
    assert f"line 2, id 'bad': 'duration' {said}" in message


# ---- texts ----


def test_a_mix_has_the_texts_of_its_tracks(read) -> None:
    def spoken(text: str, **more: object) -> dict[str, object]:
        return {"cut": {"duration": 1, "supervisions": [{"text": text}]}, "type": "MonoCut", **more}

    mix = _mix("m", spoken("ONE"), _track(1.0, kind="PaddingCut"), spoken("TWO", offset=1), spoken("X", mute=True))
    assert read(_lines([mix]), target_key="text").targets.tolist() == [len("ONE TWO")]


def test_texts_can_be_the_targets(read) -> None:
    cuts = [_cut("a", 2.0, supervisions=[{"text": "AB"}, {"text": "C"}]), _cut("b", 1.0, supervisions=[{"text": "A"}])]
    lengths = read(_lines(cuts), target_key="text")
    assert (lengths.values.tolist(), lengths.targets.tolist()) == ([2.0, 1.0], [4.0, 1.0])


# ---- what it is, and what it is not ----


def test_other_lines_are_not_taken_for_cuts() -> None:
    for entry in [
        {"audio_filepath": "a.wav", "duration": 2.5, "text": 'the "type": "MonoCut"'},
        {"id": "a", "start": 0, "duration": 2.5, "text": "a", "recording": "a.wav"},
        {"id": "a", "type": "utterance", "duration": 2.5, "supervisions": "none"},
        {"id": "a", "recording_id": "r", "start": 0, "duration": 2.5},
        {"meta": {"id": "a", "type": "MonoCut"}, "duration": 2.5},
    ]:
        assert not FORMATS["lhotse"].fits(Head(_lines([entry]).encode(), complete=True))


@both
def test_a_cut_without_a_type_is_known_by_its_parts(read, write: Write) -> None:
    cut = _cut("a", 2.5)
    del cut["type"]
    assert read(write([cut])).values.tolist() == [2.5]


# ---- damage ----


@both
def test_a_cut_of_another_shape_is_named_with_its_line(refusal, write: Write) -> None:
    error = refusal(write([_cut("a", 1.0), _mix("b", {"type": "MonoCut"})]))
    assert f"{'line' if write is _lines else 'item'} 2: Object missing required field `cut`" in error.message
    assert "`$.tracks[0]`" in error.message
    assert "CutSet.to_file" in error.hint


@pytest.mark.parametrize("content", ['{"id": ' + '{"a":' * 100_000, "[" * 100_000, '[{"tracks": ' * 50_000])
def test_cuts_nested_too_deeply_are_an_error(refusal, content: str) -> None:
    assert "nested too deeply" in refusal(content, format="lhotse").message


# ---- against lhotse itself ----


@pytest.fixture(scope="module")
def lhotse() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lhotse")


@pytest.fixture
def cuts(lhotse: ModuleType) -> list[Any]:
    """Cuts with features, and as many without."""
    made = []
    for index, seconds in enumerate((10.0, 7.31, 33949 / 22050)):
        rate = 16000 if index < 2 else 22050
        times = {"start": 0.0, "duration": seconds}
        recording = lhotse.Recording(f"r{index}", [], rate, round(seconds * rate), seconds)
        stored = {"storage_type": "", "storage_path": "", "storage_key": ""}
        features = lhotse.Features("fbank", 1000, 80, 0.01, rate, **times, **stored)
        spoken = [lhotse.SupervisionSegment(f"s{index}", f"r{index}", **times, text=text) for text in ("ONE TWO", "X")]
        for name, more in (("whole", {"supervisions": spoken, "features": features}), ("bare", {})):
            made.append(lhotse.MonoCut(f"{name}{index}", **times, channel=0, recording=recording, **more))
    return made


def _variants(lhotse: ModuleType, cuts: Sequence[Any]) -> list[Any]:
    first, bare = cuts[0], cuts[1]
    found = list(cuts)
    found += [cut.truncate(offset=0.33, duration=0.987654321) for cut in cuts]
    found += [cut.pad(duration=11.123456789, preserve_id=False) for cut in cuts]
    found += [cut.pad(duration=12.0, direction="both") for cut in cuts[:2]]
    found += [cut.mix(cuts[2], offset_other_by=offset, snr=10) for cut in (first, bare) for offset in (0.1, 3.7)]
    found += [first.append(cuts[2]).append(first), bare.append(cuts[3]).append(cuts[3]), cuts[4].append(cuts[4])]
    found += [cut.perturb_speed(factor) for cut in (cuts[1], cuts[3], cuts[5]) for factor in (0.9, 1.1)]
    found += [bare.append(cuts[3]).perturb_speed(0.9), cuts[3].perturb_tempo(1.1)]
    found += list(lhotse.CutSet.from_cuts([bare]).cut_into_windows(3.0))
    return found


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz", "cuts.json", "cuts.json.gz"])
def test_files_that_lhotse_writes_are_read(tmp_path: Path, lhotse: ModuleType, cuts: list[Any], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = lhotse.CutSet.from_cuts(_variants(lhotse, cuts))
        whole.to_file(tmp_path / name)
        real = [cut for cut in lhotse.CutSet.from_file(tmp_path / name) if cut.supervisions]
    found = load_lengths(tmp_path / name, ReadOptions(target_key="text", skip_invalid=True))
    pairs = [(cut.duration, len(" ".join(one.text for one in cut.supervisions))) for cut in real]
    assert found.targets is not None
    assert sorted(zip(found.values.tolist(), found.targets.tolist(), strict=True)) == sorted(pairs)
    durations = [cut.duration for cut in lhotse.CutSet.from_file(tmp_path / name)]
    assert load_lengths(tmp_path / name).values.tolist() == sorted(durations, reverse=True)
