"""The example's shards: their lengths are those that webdataset and soundfile decode."""

import io
from pathlib import Path

import pytest
from started import python

from batchtune.manifests import ReadOptions, load_lengths

webdataset = pytest.importorskip("webdataset")
soundfile = pytest.importorskip("soundfile")

# webdataset leaves it to the garbage collector to close the shards that it has read.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MAKER = Path(__file__).parents[1] / "examples" / "shards" / "make_shards.py"


@pytest.mark.process
def test_lengths_are_those_that_webdataset_and_soundfile_decode(tmp_path):
    python(MAKER, "--shards", 3, "--wavs", 40, "--out", tmp_path)
    paths = sorted(map(str, tmp_path.iterdir()))
    decoded = {"wav.num_samples": [], "wav": [], "txt": []}
    for sample in webdataset.WebDataset(paths, shardshuffle=False):
        audio, rate = soundfile.read(io.BytesIO(sample["wav"]))
        decoded["wav.num_samples"].append(len(audio))
        decoded["wav"].append(len(audio) / rate)
        decoded["txt"].append(len(sample["txt"].decode()))
    decoded["json.duration"] = decoded["wav"]
    assert (len(paths), len(decoded["wav"])) == (3, 120)
    for column, lengths in decoded.items():
        found = load_lengths(paths, ReadOptions(length_key=column))
        assert found.values.tolist() == sorted(lengths, reverse=True), column
