"""Target lengths from a file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.errors import ManifestError
from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions, load_lengths

WAV2VEC = "/data\na.wav\t100\nb.wav\t200\nc.wav\t300\n"
KALDI = "a 1.5\nb 2.5\nc 3.5\n"


def pairs(lengths: Lengths) -> dict[float, float]:
    assert lengths.targets is not None
    return dict(zip(lengths.values.tolist(), lengths.targets.tolist(), strict=True))


def load(
    folder: Path, manifest: str, targets: str, name: str = "targets", **options: object
) -> Lengths:
    (folder / "manifest").write_text(manifest)
    (folder / name).write_text(targets)
    return load_lengths(
        folder / "manifest", ReadOptions(target_file=str(folder / name), **options)
    )


def test_letters_of_fairseq_are_aligned_line_by_line(tmp_path: Path) -> None:
    found = load(tmp_path, WAV2VEC, "A B | C |\nA\nA B |\n", "valid.ltr")
    assert pairs(found) == {100: 5, 200: 1, 300: 3}


def test_other_texts_are_counted_in_characters_by_default(tmp_path: Path) -> None:
    assert pairs(load(tmp_path, WAV2VEC, "one two\nthree\nx\n")) == {
        100: 7,
        200: 5,
        300: 1,
    }
    assert pairs(load(tmp_path, WAV2VEC, "one two\nthree\nx\n", measure="words")) == {
        100: 2,
        200: 1,
        300: 1,
    }


def test_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    assert pairs(load(tmp_path, WAV2VEC, "7\n8\n9\n")) == {100: 7, 200: 8, 300: 9}


@pytest.mark.parametrize(
    ("targets", "message"),
    [("1\n2\n", "has more examples"), ("1\n2\n3\n4\n", "has fewer examples")],
)
def test_as_many_lines_as_examples_are_needed(
    tmp_path: Path, targets: str, message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        load(tmp_path, WAV2VEC, targets)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("c 9\nb 8\na 7\nunused 1\n", {1.5: 7, 2.5: 8, 3.5: 9}),
        ("c 9,31\nb 8,31\na 7,31\n", {1.5: 7, 2.5: 8, 3.5: 9}),
        ("a HELLO YOU\nb HI\nc X\n", {1.5: 9, 2.5: 2, 3.5: 1}),
    ],
    ids=["numbers", "shapes", "texts"],
)
def test_files_of_kaldi_and_espnet_are_joined_by_id(
    tmp_path: Path, targets: str, found: dict[float, float]
) -> None:
    assert pairs(load(tmp_path, KALDI, targets)) == found


def test_words_of_a_kaldi_text_can_be_counted(tmp_path: Path) -> None:
    assert pairs(
        load(tmp_path, KALDI, "a HELLO YOU\nb HI\nc X\n", measure="words")
    ) == {1.5: 2, 2.5: 1, 3.5: 1}


def test_an_example_without_a_target_is_invalid_and_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"line 2, id 'b': '.*targets' is missing"):
        load(tmp_path, KALDI, "a 7\nc 9\n")


def test_both_lengths_of_an_espnet_folder(tmp_path: Path) -> None:
    (tmp_path / "speech_shape").write_text("a 100,80\nb 200,80\n")
    (tmp_path / "text_shape.char").write_text("b 20,31\na 10,31\n")
    found = load_lengths(
        tmp_path, ReadOptions(target_file=str(tmp_path / "text_shape.char"))
    )
    assert pairs(found) == {100: 10, 200: 20}
    assert found.unit == "frames"


def test_each_of_several_manifests_has_its_target_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.tsv").write_text(f"/data\n{name}\t{ord(name)}\n")
        (tmp_path / f"{name}.ltr").write_text("X " * ord(name) + "\n")
    manifests = f"{tmp_path}/{{a,b}}.tsv"
    found = load_lengths(manifests, ReadOptions(target_file=f"{tmp_path}/{{a,b}}.ltr"))
    assert pairs(found) == {97: 97, 98: 98}
    with pytest.raises(ManifestError, match="1 target file for 2 manifests"):
        load_lengths(manifests, ReadOptions(target_file=f"{tmp_path}/a.ltr"))


@pytest.mark.parametrize(
    ("targets", "name", "counts"),
    [
        ("A B\nC\nD\n", "a.ltr", "words"),
        ("one\ntwo\nx\n", "a.txt", "characters"),
        ("1\n2\n3\n", "a", "numbers"),
    ],
)
def test_it_is_told_what_the_targets_are(
    tmp_path: Path, targets: str, name: str, counts: str
) -> None:
    notes = load(tmp_path, WAV2VEC, targets, name).notes
    assert any(
        note.startswith(f"Target lengths are the {counts} in ") for note in notes
    )
