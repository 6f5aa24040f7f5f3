"""How fast lengths are read from tar shards, next to WebDataset: `python tests/benchmarks/tar_scan.py`.

Three ways to the same lengths, side by side in one run, with the shards in the page cache: from the headers of the
wavs (here), from a field of the json members alone (the least that WebDataset can be made to read), and by decoding
the wavs with soundfile. The wavs are as long as utterances of read speech are, 2 to 16 s. Needs webdataset and
soundfile, and 1.5 GB for the shards.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "shards"))

import soundfile  # noqa: E402
import webdataset  # noqa: E402
from make_shards import make_shards  # noqa: E402

from batchtune.manifests.formats import FORMATS  # noqa: E402
from batchtune.manifests.source import Source  # noqa: E402

ROUNDS = 5

Way = Callable[[list[Path]], list[float]]


def scan(shard: Path) -> list[float]:
    """The lengths of one shard, in seconds."""
    lengths: list[float] = []
    for rows in FORMATS["webdataset"](Source(shard)).rows(["wav"]):
        lengths += rows.columns[0]  # type: ignore[arg-type]
    return lengths


def ours(shards: list[Path]) -> list[float]:
    """The headers of the wavs, in one process."""
    return [length for shard in shards for length in scan(shard)]


def ours_with(pool: ProcessPoolExecutor) -> Way:
    """The same, shards at a time."""
    return lambda shards: [
        length for lengths in pool.map(scan, shards) for length in lengths
    ]


def webdataset_json(shards: list[Path]) -> list[float]:
    """The json members alone, which hold the duration too."""
    samples = webdataset.WebDataset(
        [str(shard) for shard in shards],
        shardshuffle=False,
        select_files=lambda name: name.endswith(".json"),
    )
    return [json.loads(sample["json"])["duration"] for sample in samples]


def webdataset_decoded(shards: list[Path]) -> list[float]:
    """Every wav decoded."""
    lengths = []
    for sample in webdataset.WebDataset(
        [str(shard) for shard in shards], shardshuffle=False
    ):
        audio, rate = soundfile.read(io.BytesIO(sample["wav"]))
        lengths.append(len(audio) / rate)
    return lengths


def compare(shards: list[Path], processes: int, rounds: int) -> dict[str, float]:
    """The best time of each way in seconds, taken in turn; all must give the same lengths."""
    with ProcessPoolExecutor(processes) as pool:
        ways: dict[str, Way] = {
            "serial": ours,
            "parallel": ours_with(pool),
            "webdataset_json": webdataset_json,
            "webdataset_decoded": webdataset_decoded,
        }
        expected = ours(shards)  # also fills the page cache
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for name, way in ways.items():
                started = time.perf_counter()
                lengths = way(shards)
                best[name] = min(best[name], time.perf_counter() - started)
                if lengths != expected:
                    raise SystemExit(f"{name} gives other lengths")
    return best


def main() -> None:
    """Prints samples per second and how many times faster the headers are, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--wavs", type=int, default=500)
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=(2.0, 16.0),
        help="shortest and longest wav",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(
            Path(folder), arguments.shards, arguments.wavs, arguments.seconds
        )
        best = compare(shards, arguments.processes, arguments.rounds)
    samples = arguments.shards * arguments.wavs
    ratios = {
        f"{way}_over_{other}": round(best[other] / best[way], 1)
        for way in ("serial", "parallel")
        for other in ("webdataset_json", "webdataset_decoded")
    }
    rates = {
        f"{name}_samples_per_second": round(samples / seconds)
        for name, seconds in best.items()
    }
    print(
        json.dumps(
            {
                "samples": samples,
                "wav_seconds": arguments.seconds,
                "processes": arguments.processes,
                **rates,
                **ratios,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
