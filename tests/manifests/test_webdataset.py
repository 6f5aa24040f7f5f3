"""Tar shards as WebDataset writes and reads them."""

import io
import json
import os
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from manifests.conftest import cases
from samples import SAMPLE_RATE as RATE
from samples import shard, wav

from batchtune.manifests import FORMATS, load_lengths
from batchtune.manifests.formats import Unreadable
from batchtune.manifests.formats.members import key_and_suffix
from batchtune.manifests.source import Source

FORMAT = FORMATS["webdataset"]


def npy(*shape):
    stream = io.BytesIO()
    np.save(stream, np.zeros(shape))
    return stream.getvalue()


def speech(count):
    """Samples of a wav that is (number + 1) * 1000 samples long, a text and a json member."""
    members = []
    for number in range(count):
        members += [
            (f"utt{number}.wav", wav((number + 1) * 1000)),
            (f"utt{number}.txt", b"word " * (number + 1)),
            (
                f"utt{number}.json",
                json.dumps(
                    {"duration": (number + 1) / 16, "speaker": {"id": f"s{number}"}}
                ).encode(),
            ),
        ]
    return members


def rows(path, *columns):
    """Keys and columns of a shard, and nothing checked."""
    found = [[] for _ in ("keys", *columns)]
    for chunk in FORMAT(Source(path)).rows(columns):
        for values, more in zip(found, (chunk.ids(), *chunk.columns), strict=True):
            values.extend(more)
    return found


@pytest.fixture
def write(tmp_path):
    def run(members, name="shard.tar"):
        path = tmp_path / name
        path.write_bytes(members if isinstance(members, bytes) else shard(members))
        return path

    return run


MIXED = [("a.wav", wav(1000)), ("b.flac", wav(3000)), ("c.mix.WAV", wav(2000))]
READ = {
    "audio goes before what its json says": (
        [("a.json", b'{"duration": 9}'), ("a.wav", wav(1000)), ("a.npy", npy(7))],
        [1000 / RATE],
        "s",
    ),
    "arrays have their first dimension": (
        [("a.npy", npy(7, 80)), ("a.txt", b"x")],
        [7],
        None,
    ),
    "a number in a member": ([("a.duration", b"2.5\n")], [2.5], "s"),
    "a number in json": ([("a.json", b'{"duration": 2.5}')], [2.5], "s"),
    "each sample has its own audio suffix": (
        MIXED,
        [3000 / RATE, 2000 / RATE, 1000 / RATE],
        "s",
    ),
}


@cases(READ, "members lengths unit")
def test_the_length_is_found_without_options(read, members, lengths, unit):
    found = read(shard(members))
    assert (found.values.tolist(), found.unit) == (lengths, unit)


ALTERNATING = [(f"{n}.{('flac', 'wav')[n % 2]}", wav(1000)) for n in range(100)]
REFUSED = {
    "of two audio members one needs to be named": (
        [("a.mix.wav", wav(1000)), ("a.clean.wav", wav(1000))],
        "--length-key",
    ),
    "a later sample with several audio members": (
        [*ALTERNATING, ("x.mix.wav", wav(10)), ("x.flac", wav(20))],
        "1 of 101 rows is invalid.*id 'x': 'audio' can't be read: several audio members: 'flac' and another",
    ),
    "a sample without the member": (
        [*speech(1), ("b.txt", b"x")],
        "1 of 2 rows is invalid.*id 'b': 'audio' is missing",
    ),
    "a suffix that comes twice": (
        [*speech(1), ("a.wav", wav(10)), ("a.txt", b"x"), ("a.WAV", wav(20))],
        "id 'a': 'audio' can't be read: two members with one suffix: 'wav'",
    ),
}


@cases(REFUSED, "members message")
def test_a_sample_without_one_length_is_named(refusal, members, message):
    error = refusal(shard(members))
    assert re.search(message, f"{error.message}\n{error.hint}", re.DOTALL)


def test_members_without_a_suffix_are_counted(read):
    left_out = read(shard([("README", b"x"), *speech(1)])).left_out
    assert left_out == {"a member without a suffix": 1}


def test_the_columns_are_listed_with_what_they_hold(write):
    members = [
        *speech(1),
        ("utt0.jpg", b"\xff\xd8\xff\0"),
        ("utt0.cls", b"4"),
        ("utt0.pkl", b"cos\nsystem\n."),
    ]
    columns = FORMAT(Source(write(members))).columns()
    assert {
        column.name: (column.example, column.numeric, column.text) for column in columns
    } == {
        "wav": (1 / 16, True, False),
        "audio": (1 / 16, True, False),
        "txt": ("word ", False, True),
        "json.duration": (1 / 16, True, False),
        "json.speaker.id": ("s0", False, True),
        "jpg": (None, False, False),
        "cls": ("4", True, False),
        "pkl": ("cos\nsystem\n.", False, True),
    }


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (npy(), "an array without dimensions"),
        (b"\x93NUMPY\x01\0", "no array header, or a damaged one"),
        (b"pickle", "no array header, or a damaged one"),
    ],
)
def test_an_array_without_a_length_is_named_with_its_reason(refusal, content, seen):
    message = refusal(shard([("a.npy", npy(7, 80)), ("b.npy", content)])).message
    assert f"id 'b': 'npy' can't be read: {seen}" in message


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b'{"duration": NaN}', "missing"),
        (b'{"duration": "long"}', "(text)"),
        (b'{"duration": null}', "missing"),
        (b'{"length": 3}', "missing"),
        (b"[1, 2]", "(a list)"),
        (b'{"duration": ', "malformed JSON"),
        (b'{"duration": "\xe9"}', "malformed JSON"),
        (b'{"a":' * 100_000, "malformed JSON"),
        (b"", "malformed JSON"),
    ],
)
def test_json_without_a_valid_length_is_named_with_its_reason(refusal, content, seen):
    message = refusal(
        shard([*speech(2), ("bad.json", content)]), length_key="json.duration"
    ).message
    assert "1 of 3 rows is invalid" in message
    assert "id 'bad'" in message
    assert seen in message


def test_nothing_is_written_whatever_the_names_are(write, tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    names = [
        "../out.wav",
        "/tmp/batchtune-never.wav",
        "a/../../b.wav",
        "inside.wav",
        "C:\\x.wav",
    ]
    assert load_lengths(write([(name, wav(1000)) for name in names])).count == 5
    assert {entry.name for entry in tmp_path.iterdir()} == {"inside", "shard.tar"}
    assert not list((tmp_path / "inside").iterdir())
    assert not os.path.exists("/tmp/batchtune-never.wav")


@given(name=st.text(st.sampled_from("ab./\n_A"), max_size=9))
@example(name="a/.b")
@example(name="a\nb/c.d/.e")
def test_a_name_is_taken_apart_as_webdataset_does(name):
    key, suffix = pytest.importorskip("webdataset.tariterators").base_plus_ext(name)
    assert key_and_suffix(name) == (key, (suffix or "").lower())


@given(
    names=st.lists(
        st.builds(
            "{}{}{}".format,
            st.sampled_from(["", "d/", "__m__/", "e.f/"]),
            st.sampled_from("ab_"),
            st.sampled_from(["", ".wav", ".WAV", ".txt", ".a.b", "__"]),
        ),
        max_size=12,
    )
)
def test_members_are_grouped_as_webdataset_does(names, tmp_path_factory):
    tariterators = pytest.importorskip("webdataset.tariterators")
    data = shard([(name, f"{number}".encode()) for number, name in enumerate(names)])
    path = tmp_path_factory.getbasetemp() / "grouped.tar"
    path.write_bytes(data)
    members = (
        {**one, "__url__": ""}
        for one in tariterators.tar_file_iterator(io.BytesIO(data))
    )
    try:
        samples = list(tariterators.group_by_keys(members))
    except ValueError:  # a suffix twice: an invalid row here
        assert any(
            isinstance(length, Unreadable) and "two members" in length.reason
            for length in rows(path, "txt")[1]
        )
        return
    texts = [sample["txt"].decode() if "txt" in sample else None for sample in samples]
    others = [sample["a.b"].decode() if "a.b" in sample else None for sample in samples]
    keys = [sample["__key__"] for sample in samples]
    assert rows(path, "txt", "a.b") == [keys, texts, others]
