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
        (tmp_path / "dataset_info.json").write_text("{}")
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
    path = folder(content)
    with pytest.raises(ManifestError, match=r"state\.json is not as datasets writes it"):
        hf_files(path)
    (path / "dataset_info.json").unlink()
    assert hf_files(path) is None


@pytest.mark.parametrize("name", ["../data.arrow", "/etc/passwd", "..", "", "a\0b"])
def test_files_outside_the_folder_are_refused(folder: Folder, name: str) -> None:
    with pytest.raises(ManifestError, match="not a plain file name"):
        hf_files(folder(state(name)))


# With the real package.

ROWS = [
    {
        "id": f"utt{number}",
        "duration": number + 0.5,
        "input_ids": list(range(number % 4 + 1)),
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


def test_saved_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=dataset, dev=dataset.select([0])).save_to_disk(tmp_path)
    with pytest.raises(ManifestError, match="'dev', 'train'"):
        load_lengths(tmp_path)
    assert load_lengths(tmp_path / "dev").count == 1
