"""What a user names, and the sources that it means."""

import io
import os
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from manifests.conftest import write_files

from batchtune.errors import ManifestError
from batchtune.manifests import load_lengths
from batchtune.manifests.inputs import expand

ROW = '{"id": "a", "duration": 1}\n'


def write(folder, *names):
    write_files(folder, dict.fromkeys(names, ROW))


def named(folder, spec, wanted=None):
    """The names of the sources, with blanks between."""
    sources = expand(f"{folder}/{spec}", wanted)
    return " ".join(str(source.path.relative_to(folder)) for source in sources)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("a.json", "a.json"),
        ("m_{0..2}.json", "m_0.json m_1.json m_2.json"),
        ("m_{2..0}.json", "m_2.json m_1.json m_0.json"),
        ("m_{08..10}.json", "m_08.json m_09.json m_10.json"),
        ("m__OP_0..1_CL_.json", "m_0.json m_1.json"),
        ("{a,b}_{0..1}.json", "a_0.json a_1.json b_0.json b_1.json"),
        ("m_{x}.json", "m_{x}.json"),
    ],
)
def test_braces_are_expanded_as_shells_and_nemo_do(tmp_path, spec, names):
    assert named(tmp_path, spec) == names


def test_a_pattern_means_all_that_match_in_order(tmp_path):
    write(tmp_path, "m_1.json", "m_0.json", "n_0.json", "deep/m_2.json")
    assert named(tmp_path, "m_*.json") == "m_0.json m_1.json"
    assert named(tmp_path, "**/m_*.json") == "deep/m_2.json m_0.json m_1.json"


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path):
    with pytest.raises(ManifestError, match="nothing matches"):
        expand(f"{tmp_path}/m_*.json", None)


def test_what_exists_is_taken_as_it_is_whatever_its_name(tmp_path):
    names = ["a{0..2}.json", "b*.json", "c,d.json", "[e].json"]
    write(tmp_path, *names)
    assert [named(tmp_path, name) for name in names] == names


def test_a_list_is_separated_by_commas(tmp_path):
    specs = f"a.json,{tmp_path}/m_{{0,1}}.json"
    assert named(tmp_path, specs) == "a.json m_0.json m_1.json"


def test_the_same_file_in_other_words_is_the_same_file(tmp_path):
    write(tmp_path, "a.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    for other in (tmp_path / "link.json", str(tmp_path / "*.json")):
        with pytest.raises(ManifestError, match=r"a\.json is named more than once"):
            expand([tmp_path / "a.json", other], None)


def test_links_to_folders_are_followed_but_not_round_in_circles(tmp_path):
    write(tmp_path, "data/a.wav", "elsewhere/b.wav")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    assert expand(tmp_path / "data", None)[0].names == ("a.wav", "link/b.wav")


@pytest.mark.parametrize(
    "spec",
    [
        "{0..99999999}",
        "{0..9999}{0..9999}",
        "a,{{0..9999..2}{a..z}{a..z},b}",
        "_OP_0..99999999_CL_",
    ],
)
def test_absurdly_many_files_are_an_error(spec):
    with pytest.raises(ManifestError, match="means"):
        expand(spec, None)


@given(
    st.text(st.characters(exclude_characters="/."), max_size=30)
)  # not the machine's own folders
@example("a{b,")
@example("0,\0")
@example(",")
def test_any_words_mean_sources_or_a_user_error(spec):
    try:
        assert expand(spec, None)
    except ManifestError as error:
        assert error.hint


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("utt2dur utt2num_frames text", "utt2dur"),
        ("utt2num_samples speech_shape", "utt2num_samples"),
        ("b.tar a.tar deep/c.tar.gz README.md", "a.tar b.tar deep/c.tar.gz"),
        ("b.parquet a.parquet", "a.parquet b.parquet"),
        ("x.jsonl y.jsonl.gz z.txt", "x.jsonl y.jsonl.gz"),
    ],
)
def test_a_folder_means_the_data_in_it(tmp_path, names, found):
    write(tmp_path, *names.split())
    assert named(tmp_path, "") == found


def test_audio_files_of_a_folder_are_one_source(tmp_path):
    write(tmp_path, "b.wav", "a.flac", "a.txt", "deep/c.ogg", ".hidden.wav")
    (source,) = expand(tmp_path, None)
    assert (source.path, source.names) == (tmp_path, ("a.flac", "b.wav", "deep/c.ogg"))


def test_a_large_folder_is_read_in_parts_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("batchtune.manifests.inputs._FILES_AT_ONCE", 2)
    write(tmp_path, "a.wav", "a.txt", "b.wav", "c.wav")
    parts = [one.names for one in expand(tmp_path, None)]
    assert parts == [("a.wav", "b.wav"), ("c.wav",)]


def test_a_mixed_folder_is_an_error_that_names_its_formats(tmp_path):
    write(tmp_path, "a.wav", "b.wav", "c.tar")
    with pytest.raises(ManifestError, match="2 files of audio, 1 file of webdataset"):
        expand(tmp_path, None)


def test_a_named_format_says_what_is_meant_in_a_folder(tmp_path):
    write(tmp_path, "a.wav", "c.tar", "utt2dur")
    assert named(tmp_path, "", "webdataset") == "c.tar"


def test_standard_input_is_read_through_a_dash(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(b'{"duration": 2}\n{"duration": 3}\n'))
    monkeypatch.setattr(sys, "stdin", stream)
    assert load_lengths("-").values.tolist() == [3.0, 2.0]
    # Nothing is left of it.
    with pytest.raises(ManifestError, match="standard input is empty"):
        load_lengths("-")


@pytest.mark.parametrize(
    ("name", "content"), [("b.csv", "id,dur\na,1\n"), ("utt2num_frames", "a 100\n")]
)
def test_what_is_read_together_has_the_column_of_the_first(refusal, name, content):
    error = refusal({"a.csv": "id,duration\na,1\n", name: content}, f"{{a.csv,{name}}}")
    assert f"{name} has no column 'duration'" in error.message


def test_all_broken_files_are_named_or_skipped_on_request(read, refusal):
    broken = {"b.json": '{"duration": 2}\n{"dur', "c.json": ""}
    message = refusal({"a.json": ROW, "d.json": ROW, **broken}, "*.json").message
    assert "2 of 4 sources can't be read" in message
    assert "b.json, line 2" in message
    assert "c.json is empty" in message
    lengths = read({}, "*.json", skip_invalid=True)
    assert lengths.values[-1] == 1.0
    assert any("b.json, line 2" in note for note in lengths.notes)


def test_invalid_rows_of_several_files_are_named_with_their_file(refusal, tmp_path):
    files = {"a.csv": "id,duration\nx,1\n", "b.csv": "id,duration\ny,0\n"}
    message = refusal(files, "*.csv").message
    assert "1 of 2 rows is invalid" in message
    assert f"{tmp_path}/b.csv, line 2, id 'y': 'duration' is '0' (zero)" in message


@pytest.mark.parametrize("spec", [".", "*.jsonl"], ids=["folder", "pattern"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_among_files_is_refused(refusal, tmp_path, spec, kind):
    if kind == "pipe":
        os.mkfifo(tmp_path / "b.jsonl")
    else:
        (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    said = {"pipe": "not an ordinary file", "device": "a device"}[kind]
    assert f"b.jsonl is {said}" in refusal({"a.jsonl": ROW}, spec).message
