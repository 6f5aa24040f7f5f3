"""Folders that Hugging Face's datasets saved."""

import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import load_lengths
from batchtune.manifests.inputs import expand

ROWS = [{"id": f"utt{number}", "duration": number + 0.5} for number in range(20)]


@pytest.fixture
def saved(tmp_path):
    """A folder with rows that datasets saved, in splits if `splits` names them: saved(num_shards=3)."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()

    def save(*splits, **options):
        rows = datasets.Dataset.from_list(ROWS)
        made = datasets.DatasetDict.fromkeys(splits, rows) if splits else rows
        made.save_to_disk(tmp_path / "saved", **options)
        return tmp_path / "saved"

    return save


@pytest.mark.parametrize("shards", [1, 3])
def test_saved_durations_are_read(saved, shards):
    path = saved(num_shards=shards)
    (path / "cache-1.arrow").touch()
    assert len(expand(path, None)) == shards
    lengths = load_lengths(path)
    assert lengths.unit == "s"
    assert lengths.values.tolist() == [number + 0.5 for number in reversed(range(20))]


def test_saved_splits_are_named(saved):
    path = saved("train", "dev")
    with pytest.raises(ManifestError, match="'dev', 'train'"):
        load_lengths(path)
    assert load_lengths(path / "dev").count == 20
