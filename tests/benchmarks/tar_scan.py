"""How fast lengths are read from tar shards, next to WebDataset: `python tests/benchmarks/tar_scan.py`.

Three ways to the same lengths, side by side in one run, with the shards in the page cache: from the headers of the
wavs (here), from a field of the json members alone (the least that WebDataset can be made to read), and by decoding
the wavs with soundfile. The wavs are as long as utterances of read speech are, 2 to 16 s. Needs webdataset and
soundfile, and 1.5 GB for the shards.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "shards"))

import soundfile  # noqa: E402
import webdataset  # noqa: E402
from make_shards import make_shards  # noqa: E402

from batchtune.manifests.inputs import FORMATS  # noqa: E402
from batchtune.manifests.source import Source  # noqa: E402

SHARDS = 10
WAVS = 500
ROUNDS = 5
SECONDS = (2.0, 16.0)  # the shortest and longest wav


def scan(shard):
    """The lengths of one shard, in seconds."""
    lengths = []
    for rows in FORMATS["webdataset"](Source(shard)).rows(["wav"]):
        lengths += rows.columns[0]
    return lengths


def ours(shards):
    """The headers of the wavs, in one process."""
    return [length for shard in shards for length in scan(shard)]


def webdataset_json(shards):
    """The json members alone, which hold the duration too."""
    samples = webdataset.WebDataset(
        [str(shard) for shard in shards],
        shardshuffle=False,
        select_files=lambda name: name.endswith(".json"),
    )
    return [json.loads(sample["json"])["duration"] for sample in samples]


def webdataset_decoded(shards):
    """Every wav decoded."""
    lengths = []
    for sample in webdataset.WebDataset(
        [str(shard) for shard in shards], shardshuffle=False
    ):
        audio, rate = soundfile.read(io.BytesIO(sample["wav"]))
        lengths.append(len(audio) / rate)
    return lengths


WAYS = {
    "headers": ours,
    "webdataset_json": webdataset_json,
    "webdataset_decoded": webdataset_decoded,
}


def compare(shards):
    """The best time of each way in seconds, taken in turn; all must give the same lengths."""
    expected = ours(shards)  # also fills the page cache
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            started = time.perf_counter()
            lengths = way(shards)
            best[name] = min(best[name], time.perf_counter() - started)
            if lengths != expected:
                raise SystemExit(f"{name} gives other lengths")
    return best


def main():
    """Prints samples per second and how many times faster the headers are."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(Path(folder), SHARDS, WAVS, SECONDS)
        best = compare(shards)
    samples = SHARDS * WAVS
    for name, seconds in best.items():
        times = seconds / best["headers"]
        print(f"{name}: {samples / seconds:,.0f} samples/s, {times:.1f} times the time")


if __name__ == "__main__":
    main()
