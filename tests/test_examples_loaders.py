"""The example's three loaders: the same clips, the same features; each is tuned by the command."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from started import python

EXAMPLES = Path(__file__).parents[1] / "examples" / "loaders"
CLIPS = 40  # in batches of 16
PACKAGES = {"torch": "torch", "webdataset": "webdataset", "dali": "nvidia.dali"}


def installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


# Prints for each loader the largest difference from torch's features, the size of each batch, and how many clips lack.
COMPARE = """
import json, sys
from pathlib import Path

import torch
import torch_loader
from torch.utils.data import DataLoader

folder, found = Path(sys.argv[1]), {}
torch.set_num_threads(1)
torch_loader.augmented = lambda samples: samples
arguments = torch_loader.make_dataset(str(folder / "wavs"))
wanted = [arguments["dataset"][number] for number in range(len(arguments["dataset"]))]
for name in sys.argv[2:]:
    if name == "torch":
        batches = DataLoader(**arguments, num_workers=2)
    elif name == "webdataset":
        import webdataset_loader
        webdataset_loader.augmented = torch_loader.augmented
        batches = DataLoader(webdataset_loader.make_batches(str(folder / "shards")), batch_size=None, num_workers=2)
    else:
        import dali_loader
        dali_loader.augmented = lambda samples, *others: samples
        batches = dali_loader.make_batches(str(folder / "wavs"))
    farthest, sizes, missing = 0.0, [], set(range(len(wanted)))
    for batch in batches:
        sizes.append(len(batch["frames"]))
        assert batch["log_mel"].shape == (sizes[-1], batch["frames"].max(), 80)
        for features, frames in zip(batch["log_mel"], batch["frames"].tolist()):
            assert not features[frames:].any()
            same = [(at, one) for at, one in enumerate(wanted) if len(one) == frames]
            alike = {at: float((features[:frames] - one).abs().max()) for at, one in same}
            nearest = min(alike, key=alike.get)
            farthest = max(farthest, alike[nearest])
            missing.discard(nearest)
    found[name] = [farthest, sizes, len(missing)]
print(json.dumps(found))
"""


def ran(arguments, folder):
    """What a script of the example prints."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parents[1])]),
        "TMPDIR": str(folder),
        "OMP_WAIT_POLICY": "passive",
    }
    return python(*arguments, cwd=EXAMPLES, env=env).stdout


@pytest.mark.slow
def test_loaders_deliver_the_same_features(tmp_path):
    options = ["--out", tmp_path, "--clips", CLIPS, "--seconds", 0.3, 1]
    made = ran(["make_audio.py", *options], tmp_path)
    assert f"{CLIPS} clips" in made
    there = [name for name, package in PACKAGES.items() if installed(package)]
    found = json.loads(ran(["-c", COMPARE, tmp_path, *there], tmp_path))
    for name, (farthest, sizes, missing) in found.items():
        assert farthest < 1e-3, name  # of values around 1
        assert missing == 0, name
        if name == "webdataset":
            assert sum(sizes) == CLIPS
        else:
            # DALI fills up the last.
            assert sizes == [16, 16, 16 if name == "dali" else 8]
