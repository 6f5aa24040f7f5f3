"""Folders that Hugging Face's datasets saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import load_lengths
from batchtune.manifests.inputs import hf_files

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder with a state.json, and empty files beside it: folder({"_data_files": …}, "data.arrow")."""

    def make(state: object, *names: str) -> Path:
        content = state if isinstance(state, str) else json.dumps(state)
        (tmp_path / "state.json").write_text(content)
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return make


def state(*names: str, **more: object) -> dict[str, object]:
    return {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", **more}


def test_the_files_are_those_of_the_state_in_its_order(folder: Folder) -> None:
    path = folder(state("b.arrow", "a.arrow"), "a.arrow", "b.arrow", "cache-1.arrow")
    assert hf_files(path) == [path / "b.arrow", path / "a.arrow"]


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"epoch": 3}', '{"_data_files": "x"}', "[" * 100_000])
def test_the_state_of_another_program_is_none(folder: Folder, content: str) -> None:
    assert hf_files(folder(content)) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"_data_files": "x"}', '{"_data_files": [{}]}', "\xff"])
def test_a_damaged_state_is_refused(folder: Folder, content: str) -> None:
    path = folder(content)
    (path / "dataset_info.json").write_text("{}")
    with pytest.raises(ManifestError, match=r"state\.json is not as datasets writes it") as caught:
        hf_files(path)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["../data.arrow", "/etc/passwd", "..", "", "a\\b.arrow", "a\0b", "C:\\a.arrow"])
def test_files_outside_the_folder_are_refused(folder: Folder, name: str) -> None:
    with pytest.raises(ManifestError, match="not a plain file name"):
        hf_files(folder(state(name)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (state("a.arrow", "b.arrow"), r"b\.arrow is absent, though state\.json names it"),
        (state(), "names no data files"),
        ({"_data_files": [{"filename": "a.arrow", "skip": 0, "take": 5}]}, "only a part of the rows"),
    ],
    ids=["absent", "empty", "part"],
)
def test_a_data_set_that_is_not_whole_is_refused(folder: Folder, content: object, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        hf_files(folder(content, "a.arrow"))


def test_rows_in_another_order_are_refused(folder: Folder) -> None:
    path = folder(state("a.arrow", _indices_data_files=[{"filename": "indices.arrow"}]), "a.arrow")
    with pytest.raises(ManifestError) as caught:
        hf_files(path)
    assert caught.value.hint is not None
    assert "flatten_indices" in caught.value.hint


def test_the_splits_of_a_dictionary_are_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ManifestError, match=r"DatasetDict.*'train', 'test'") as caught:
        hf_files(tmp_path)
    assert caught.value.hint == f"Name one of them, for example {tmp_path / 'train'}."


@pytest.mark.parametrize("content", ["{}", "{", '{"splits": [1]}', '{"splits": []}'])
def test_a_damaged_dictionary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(ManifestError):
        hf_files(tmp_path)


# With the real package.

ROWS = [
    {
        "id": f"utt{number}",
        "text": "x" * (number + 1),
        "duration": number + 0.5,
        "input_ids": list(range(number % 4 + 1)),
        "info": {"turns": [{"words": number + 1}, {"words": 1}]},
    }
    for number in range(20)
]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Rows saved by datasets: saved(num_shards=3)."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()

    def save(change: Callable[[Any], Any] = lambda dataset: dataset, **options: Any) -> Path:
        change(datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved", **options)
        return tmp_path / "saved"

    return save


@pytest.mark.parametrize("shards", [1, 3])
def test_saved_durations_are_read(saved: Callable[..., Path], shards: int) -> None:
    path = saved(num_shards=shards)
    assert len(hf_files(path) or ()) == shards
    lengths = load_lengths(path)
    assert lengths.unit == "s"
    assert lengths.values.tolist() == [number + 0.5 for number in reversed(range(20))]


def test_saved_choices_of_rows_are_read(saved: Callable[..., Path]) -> None:
    path = saved(lambda dataset: dataset.shuffle(seed=1).select([3, 4]).rename_column("text", "words"))
    assert load_lengths(path).count == 2


def test_saved_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=dataset, dev=dataset.select([0])).save_to_disk(tmp_path)
    with pytest.raises(ManifestError, match="'train', 'dev'"):
        load_lengths(tmp_path)
    assert load_lengths(tmp_path / "dev").count == 1


def test_saved_invalid_rows_are_named_with_their_file(saved: Callable[..., Path]) -> None:
    path = saved(lambda dataset: dataset.map(lambda row: {"duration": row["duration"] - 10.5}), num_shards=2)
    with pytest.raises(ManifestError, match=r"11 of 20 rows are invalid:\n.*data-00000-of-00002\.arrow, id 'utt0'"):
        load_lengths(path)
