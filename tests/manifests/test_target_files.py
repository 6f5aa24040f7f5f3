"""Target lengths from a file of their own."""

import pytest

from batchtune.errors import ManifestError

WAV2VEC = "/data\na.wav\t100\nb.wav\t200\nc.wav\t300\n"
KALDI = "a 1.5\nb 2.5\nc 3.5\n"


@pytest.fixture
def load(read, tmp_path):
    """Reads a manifest with its targets, which are written too: load(manifest, targets, name, **options)."""

    def run(manifest, targets, name="targets", **options):
        files = {"manifest": manifest, name: targets}
        return read(files, "manifest", target_file=str(tmp_path / name), **options)

    return run


WORDS = {"measure": "words"}


@pytest.mark.parametrize(
    ("targets", "name", "options", "lengths", "counts"),
    [
        ("A B | C |\nA\nA B |\n", "valid.ltr", {}, [3, 1, 5], "words"),
        ("one two\nthree\nx\n", "a.txt", {}, [1, 5, 7], "characters"),
        ("one two\nthree\nx\n", "a.txt", WORDS, [1, 1, 2], "words"),
        ("7\n8\n9\n", "a", {}, [9, 8, 7], "numbers"),
    ],
)
def test_lines_are_aligned_and_it_is_told_what_they_are(
    load, targets, name, options, lengths, counts
):
    found = load(WAV2VEC, targets, name, **options)
    assert found.values.tolist() == [300, 200, 100]
    assert found.targets.tolist() == lengths
    said = f"Target lengths are the {counts} in "
    assert any(note.startswith(said) for note in found.notes)


@pytest.mark.parametrize(
    ("targets", "message"),
    [("1\n2\n", "has more examples"), ("1\n2\n3\n4\n", "has fewer examples")],
)
def test_as_many_lines_as_examples_are_needed(load, targets, message):
    with pytest.raises(ManifestError, match=message):
        load(WAV2VEC, targets)


@pytest.mark.parametrize(
    ("targets", "options", "lengths"),
    [
        ("c 9\nb 8\na 7\nunused 1\n", {}, [9, 8, 7]),
        ("c 9,31\nb 8,31\na 7,31\n", {}, [9, 8, 7]),
        ("a HELLO YOU\nb HI\nc X\n", {}, [1, 2, 9]),
        ("a HELLO YOU\nb HI\nc X\n", WORDS, [1, 1, 2]),
    ],
    ids=["numbers", "shapes", "texts", "words"],
)
def test_files_of_kaldi_and_espnet_are_joined_by_id(load, targets, options, lengths):
    found = load(KALDI, targets, **options)
    assert found.values.tolist() == [3.5, 2.5, 1.5]
    assert found.targets.tolist() == lengths


def test_an_example_without_a_target_is_invalid_and_named(load):
    with pytest.raises(ManifestError, match=r"line 2, id 'b': '.*targets' is missing"):
        load(KALDI, "a 7\nc 9\n")


def test_both_lengths_of_an_espnet_folder(read, tmp_path):
    files = {
        "speech_shape": "a 100,80\nb 200,80\n",
        "text_shape.char": "b 20,31\na 10,31\n",
    }
    found = read(files, target_file=str(tmp_path / "text_shape.char"))
    assert (found.values.tolist(), found.unit) == ([200, 100], "frames")
    assert found.targets.tolist() == [20, 10]


def test_each_of_several_manifests_has_its_target_file(read, refusal, tmp_path):
    files = {
        "a.tsv": "/data\na\t3\n",
        "b.tsv": "/data\nb\t2\n",
        "a.ltr": "X X X\n",
        "b.ltr": "X X\n",
    }
    found = read(files, "{a,b}.tsv", target_file=f"{tmp_path}/{{a,b}}.ltr")
    assert found.values.tolist() == found.targets.tolist() == [3, 2]
    error = refusal({}, "{a,b}.tsv", target_file=f"{tmp_path}/a.ltr")
    assert "1 target file for 2 manifests" in error.message
