"""The training scripts among the examples: batchtune tunes each without changing it, and runs it in its batches."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Tuned(NamedTuple):
    """How a script of the examples is tuned and run; `plain.py` is in test_chain.py.

    Memory is for 5 to 20 of the longest examples; `per_unit` of its own batches are one unit of the manifest. `shorter`
    is an option for an epoch of few steps, `checkpoint` what that leaves.
    """

    script: list[str]
    source: list[str]
    memory: str
    per_unit: int
    shorter: str
    checkpoint: str
    max_lengths: int = 3


SPEECH = ["speech_train.csv", "--target-key=text"]
CODE = ["code_train.csv"]
TUNED = {
    "ddp": Tuned(
        *(["ddp.py"], SPEECH, "576MiB", 100),
        *("--batch-size=64", "ddp/epoch-0.pt"),
    ),
    "lightning": Tuned(
        *(["lightning_asr.py"], SPEECH, "544MiB", 100),
        *("--batch-size=64", "lightning/**/*.ckpt"),
    ),
    "speechbrain": Tuned(
        *(["speechbrain_asr.py", "speechbrain_asr.yaml"], SPEECH, "640MiB", 16000),
        *("--batch_size=64", "speechbrain/save/*/encoder.ckpt"),
    ),
    "llama": Tuned(
        *(["llama.py"], CODE, "672MiB", 1),
        *("--max_steps=2", "llama/model.safetensors"),
    ),
    "packed": Tuned(
        *(["packed_llama.py"], CODE, "672MiB", 1),
        *("--max_steps=2", "packed_llama/model.safetensors"),
    ),
    "whisper": Tuned(
        *(["whisper.py"], ["speech_train.csv", "--length-key=text"], "640MiB", 1),
        *("--max_steps=2", "whisper/model.safetensors"),
    ),
    "wav2vec2": Tuned(
        *(["wav2vec2.py"], SPEECH, "704MiB", 16000),
        *("--max_steps=2", "wav2vec2/model.safetensors"),
        max_lengths=5,  # with fewer, a fixed batch size needs no more batches
    ),
}
FEW = ["--num-lengths=3", "--tolerance=0.1"]
FEW += ["--num-buckets=3:5"]  # with more, 400 examples need more batches

Batchtune = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a script; an empty module takes torchaudio's place where that does not load."""
    imported = subprocess.run(
        [sys.executable, "-c", "import torchaudio"], capture_output=True, check=False
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if imported.returncode != 0:
        folder = tmp_path_factory.mktemp("empty")
        (folder / "torchaudio.py").touch()
        environment["PYTHONPATH"] = str(folder)
    return environment


@pytest.fixture(autouse=True)
def examples_stay_as_they_are() -> Iterator[None]:
    before = digests()
    yield
    assert digests() == before


def digests() -> dict[str, str]:
    files = [path for path in EXAMPLES.iterdir() if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def command_of(name: str) -> list[str]:
    launcher = TORCHRUN if name == "ddp" else []
    files = [str(EXAMPLES / file) for file in TUNED[name].script]
    return [sys.executable, *launcher, *files]


@pytest.fixture
def batchtune(tmp_path: Path, environment: dict[str, str]) -> Batchtune:
    """`batchtune("tune", ...)` in an empty folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [sys.executable, "-m", "batchtune", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    return run


@pytest.mark.process
def test_the_manifests_are_those_that_are_made(tmp_path: Path) -> None:
    made = tmp_path / "scripts"
    made.mkdir()
    for path in (
        EXAMPLES / "make_manifests.py",
        EXAMPLES.parent / "stdlib_lengths.csv",
    ):
        (made.parent / path.relative_to(EXAMPLES.parent)).write_bytes(path.read_bytes())
    subprocess.run([sys.executable, str(made / "make_manifests.py")], check=True)
    for path in EXAMPLES.glob("*.csv"):
        assert (made / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)  # each trial that runs out of memory starts the script anew
@pytest.mark.parametrize("name", TUNED)
def test_it_is_tuned_run_and_recorded_as_it_is(
    name: str, tmp_path: Path, batchtune: Batchtune
) -> None:
    tuned = TUNED[name]
    manifest, *options = tuned.source
    source = [str(EXAMPLES / manifest), *options]
    command = command_of(name)
    words = [*source, *FEW, f"--max-lengths={tuned.max_lengths}"]
    batchtune("tune", *words, f"--memory={tuned.memory}", "--", *command)
    assert [path.name for path in tmp_path.iterdir()] == ["batchtune-run"]
    probe = json.loads((tmp_path / "batchtune-run" / "probe.json").read_text())
    script = probe["device"]["script"]
    assert script["per_unit"] == tuned.per_unit
    if name in ("speechbrain", "packed"):
        learned = f"({script['loader']}): {'; '.join(script['batches'])}."
        assert learned in (EXAMPLES / "README.md").read_text()
    # Within 2%, or a MiB of the heap.
    for twin in script["twins"]:
        most = max(0.02 * twin["own_bytes"], 1 << 20)
        assert abs(twin["made_bytes"] - twin["own_bytes"]) <= most, twin
    # Fewer where steps are slow; of packed batches none is made.
    ranks = probe["device"]["world_size"]
    expected = [0] if name == "packed" else [ranks, 2 * ranks, 3 * ranks]
    assert len(script["twins"]) in expected
    said = batchtune("run", *source, "--", *command, tuned.shorter).stderr
    assert "gives the batches of" in said
    assert list((tmp_path / "runs").glob(tuned.checkpoint))
    assert "Recorded training" in batchtune("report").stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lightnings_own_ranks_are_tuned_and_verified(
    tmp_path: Path, batchtune: Batchtune
) -> None:
    manifest, *reading = TUNED["lightning"].source
    words = ["tune", str(EXAMPLES / manifest), *reading, *FEW, "--memory=640MiB"]
    words += ["--max-lengths=3"]
    words += ["--verify", "--verify-steps=20", "--time-tolerance=10"]
    batchtune(*words, "--", *command_of("lightning"), "--devices=2")
    folder = tmp_path / "batchtune-run"
    device = json.loads((folder / "probe.json").read_text())["device"]
    assert (device["world_size"], len(device["ranks"])) == (2, 2)
    script = device["script"]
    assert (script["accumulation"], script["look_ahead"]) == (2, 0)
    assert len(script["twins"]) in (2, 4, 6)
    assert json.loads((folder / "verify.json").read_text())["failures"] == []
