"""The example's shards: their lengths are those that webdataset and soundfile decode, key by key."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.manifests import FORMATS
from batchtune.manifests.source import Source

webdataset = pytest.importorskip("webdataset")
soundfile = pytest.importorskip("soundfile")

# webdataset leaves it to the garbage collector to close the shards that it has read.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MAKER = Path(__file__).parents[1] / "examples" / "shards" / "make_shards.py"


def make(folder: Path, shards: int, wavs: int) -> list[Path]:
    command = [
        sys.executable,
        str(MAKER),
        "--shards",
        str(shards),
        "--wavs",
        str(wavs),
        "--out",
        str(folder),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return sorted(folder.iterdir())


def by_headers(paths: list[Path], column: str) -> dict[str | None, object]:
    found: dict[str | None, object] = {}
    for path in paths:
        for rows in FORMATS["webdataset"](Source(path)).rows([column]):
            found.update(zip(rows.ids(), rows.columns[0], strict=True))
    return found


def by_decoding(paths: list[Path]) -> dict[str, tuple[int, float, str]]:
    """Key → samples, seconds and text."""
    found = {}
    for sample in webdataset.WebDataset(
        [str(path) for path in paths], shardshuffle=False
    ):
        audio, rate = soundfile.read(io.BytesIO(sample["wav"]))
        assert json.loads(sample["json"])["text"] == sample["txt"].decode()
        found[sample["__key__"]] = (
            len(audio),
            len(audio) / rate,
            sample["txt"].decode(),
        )
    return found


@pytest.mark.process
def test_lengths_are_those_that_webdataset_and_soundfile_decode(tmp_path: Path) -> None:
    paths = make(tmp_path, 3, 40)
    decoded = by_decoding(paths)
    assert (len(paths), len(decoded)) == (3, 120)
    assert by_headers(paths, "wav.num_samples") == {
        key: samples for key, (samples, _, _) in decoded.items()
    }
    assert by_headers(paths, "wav") == {
        key: seconds for key, (_, seconds, _) in decoded.items()
    }
    assert by_headers(paths, "json.duration") == {
        key: seconds for key, (_, seconds, _) in decoded.items()
    }
    assert by_headers(paths, "txt") == {
        key: text for key, (_, _, text) in decoded.items()
    }
