"""The example's three loaders: the same clips, the same features; each is tuned by the command."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "loaders"
CLIPS, BATCH_SIZE = 40, 16


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


needs_webdataset = pytest.mark.skipif(not installed("webdataset"), reason="webdataset is not installed")
needs_dali = pytest.mark.skipif(not installed("nvidia.dali"), reason="DALI is not installed")

# Prints the largest difference from torch's features, and how many clips are in each batch of an epoch.
COMPARE = """
import json, sys
from pathlib import Path

import torch
import torch_loader
from torch.utils.data import DataLoader

folder, name, batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch_loader.augmented = lambda samples: samples
clips = torch_loader.make_dataset(str(folder / "wavs"), batch_size)["dataset"]
wanted = [clips[number] for number in range(len(clips))]
if name == "torch":
    arguments = torch_loader.make_dataset(str(folder / "wavs"), batch_size)
    batches = DataLoader(**arguments, num_workers=2)
elif name == "webdataset":
    import webdataset_loader

    webdataset_loader.augmented = torch_loader.augmented
    made = webdataset_loader.make_batches(str(folder / "shards"), batch_size)
    batches = DataLoader(made, batch_size=None, num_workers=2)
else:
    import dali_loader

    dali_loader.augmented = lambda samples, *others: samples
    batches = dali_loader.make_batches(str(folder / "wavs"), batch_size)
farthest, sizes, unseen = 0.0, [], list(range(len(wanted)))
for batch in batches:
    sizes.append(len(batch["frames"]))
    assert batch["log_mel"].shape == (sizes[-1], batch["frames"].max(), 80)
    for features, frames in zip(batch["log_mel"], batch["frames"].tolist()):
        assert not features[frames:].any()
        alike = {at: float((features[:frames] - wanted[at]).abs().max())
                 for at in range(len(wanted)) if len(wanted[at]) == frames}
        nearest = min(alike, key=alike.get)
        farthest = max(farthest, alike[nearest])
        unseen = [at for at in unseen if at != nearest]
print(json.dumps([farthest, sizes, unseen]))
"""


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio")
    made = ran(["make_audio.py", "--out", str(folder), "--clips", str(CLIPS), "--seconds", "0.3", "1"], folder)
    assert f"{CLIPS} clips" in made
    return folder


def ran(arguments: list[str], folder: Path) -> str:
    """What a script of the example prints."""
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parents[1])])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    ["torch", pytest.param("webdataset", marks=needs_webdataset), pytest.param("dali", marks=needs_dali)],
)
def test_loaders_deliver_the_same_features(name: str, audio: Path) -> None:
    farthest, sizes, unseen = json.loads(ran(["-c", COMPARE, str(audio), name, str(BATCH_SIZE)], audio))
    assert farthest < 1e-3  # of values around 1
    assert unseen == []
    if name == "torch":
        assert sizes == [16, 16, 8]
    elif name == "dali":
        assert sizes == [16, 16, 16]  # the last is filled up
    else:
        assert sum(sizes) == CLIPS


@pytest.mark.slow
@needs_webdataset
@needs_dali
def test_each_loader_is_tuned_by_the_command(tmp_path: Path) -> None:
    small = ["--clips", "96", "--seconds", "0.3", "--trials", "1", "--workers", "2", "--out", str(tmp_path / "out")]
    printed = ran(["tune_loaders.py", *small], tmp_path)
    lines = printed[printed.index("clips/s") :].splitlines()
    for name in ("torch", "WebDataset", "DALI", "DALI eager", "DALI sync_cpu"):
        line = next(line for line in lines if line.startswith(f"{name} ") and line.split(name)[1].split()[0].isdigit())
        rate, idle, *_ = line.removeprefix(name).split()
        assert int(rate) > 0
        assert 0 <= float(idle.rstrip("%")) <= 100
    for name in ("torch", "webdataset", "dali"):
        tuning = json.loads((tmp_path / "out" / f"run-{name}" / "loader.json").read_text())
        assert tuning["epoch_examples"] == 96
        assert tuning["kind"] == ("dali" if name == "dali" else "torch")
        assert {row["outcome"] for row in tuning["rows"]} == {"ok"}
    stages = json.loads((tmp_path / "out" / "run-webdataset" / "loader.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == ["reading", "decode", "augmented", "log_mel", "collate (padded)"]
