"""The example's stream: what SpeechBrain's function and our stage deliver is what the sweep simulated."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchtune.epochs.table import BucketTable
from batchtune.manifests import ReadOptions, load_stream
from batchtune.streams.bucketed import StreamBatching
from batchtune.streams.simulated import (
    AnyBatching,
    StoredStream,
    simulate_stream,
)
from batchtune.streams.speechbrain import PivotSettings
from batchtune.streams.stream_sweep import StreamSettings

pytest.importorskip("webdataset")
pytestmark = pytest.mark.slow
HAS_SPEECHBRAIN = importlib.util.find_spec("speechbrain") is not None
with_speechbrain = pytest.mark.skipif(
    not HAS_SPEECHBRAIN, reason="speechbrain is not installed"
)

EXAMPLES = Path(__file__).parents[1] / "examples" / "streams"
# Runs the example; then reads its stream again with one and two workers, of which each has the sweep's random numbers.
READ = """
import json, random, sys
from batchtune.streams.bucketed import stream_random
from read_stream import *

def seeded(worker):
    random.setstate(stream_random(SEED, 0, 0, worker).getstate())

out = Path(sys.argv[1])
main(["--out", str(out)])
shards = str(out / "shards" / "train-{000..023}.tar")
stream = json.loads((out / "run" / "stream.json").read_text())
row = stream["rows"][stream["recommended_speechbrain"]]
found = {"own": {}, "speechbrain": {}}
for workers in (1, 2):
    own = figures(own_loader(shards, out / "run" / "stream.yaml", workers))
    found["own"][workers] = own["names"]
    if len(sys.argv) == 3:
        theirs = speechbrain_loader(shards, row, workers, worker_init_fn=seeded)
        found["speechbrain"][workers] = figures((batch.id, batch.signal) for batch in theirs)["names"]
(out / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's folder and what it printed; an empty module takes torchaudio's place where that does not load."""
    folder = tmp_path_factory.mktemp("stream")
    path = [str(EXAMPLES), str(EXAMPLES.parents[1])]
    if (
        HAS_SPEECHBRAIN
        and subprocess.run(
            [sys.executable, "-c", "import torchaudio"], capture_output=True
        ).returncode
    ):
        (folder / "empty").mkdir()
        (folder / "empty" / "torchaudio.py").touch()
        path.append(str(folder / "empty"))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            READ,
            str(folder),
            *(["speechbrain"] if HAS_SPEECHBRAIN else []),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def simulated(folder: Path, way: AnyBatching, workers: int) -> Iterator[list[str]]:
    """The names in each batch of the first epoch, worker after worker."""
    stream = load_stream(
        str(folder / "shards" / "*.tar"), ReadOptions(length_key="wav.num_samples")
    )
    settings = StreamSettings(workers=workers, shuffle_buffer=0)
    sizes = [shard.count for shard in stream.shards]
    stored = StoredStream.of(stream.values, None, sizes, settings, settings.seed)
    cut = simulate_stream(stored, way, 0).cut
    for batch in np.split(cut.examples, cut.layout.starts[1:]):
        yield [f"utterance{place:06}" for place in batch]


def swept(folder: Path, which: str) -> AnyBatching:
    stream = json.loads((folder / "run" / "stream.json").read_text())
    row = stream["rows"][stream[which]]
    if row["algorithm"] == "speechbrain":
        names = (
            "target_batch_numel",
            "max_batch_numel",
            "max_batch_size",
            "max_padding_ratio",
        )
        return PivotSettings(
            buffersize=row["buffer_size"], **{name: row[name] for name in names}
        )
    table = BucketTable.of(row["boundaries"], row["batch_sizes"])
    names = ("algorithm", "buffer_size", "max_padding_ratio")
    return StreamBatching(table=table, **{name: row[name] for name in names})


def test_our_stage_delivers_the_batches_that_were_simulated(
    ran: tuple[Path, str],
) -> None:
    folder, text = ran
    read = json.loads((folder / "found.json").read_text())["own"]
    way = swept(folder, "recommended")
    assert read["1"] == list(simulated(folder, way, 1))
    assert sorted(read["2"]) == sorted(simulated(folder, way, 2))
    assert "BucketedStream, read" in text


@with_speechbrain
def test_speechbrain_delivers_the_batches_that_were_simulated(
    ran: tuple[Path, str],
) -> None:
    folder, _ = ran
    read = json.loads((folder / "found.json").read_text())["speechbrain"]
    way = swept(folder, "recommended_speechbrain")
    assert read["1"] == list(simulated(folder, way, 1))
    assert sorted(read["2"]) == sorted(simulated(folder, way, 2))
