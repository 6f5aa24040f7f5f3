"""The training scripts among the examples: each trains by itself, and batchtune tunes each without changing it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

# The script, its arguments, an option for an epoch of few steps, and the checkpoint that it leaves.
SCRIPTS = {
    "plain": (["plain.py"], "--batch-size=64", "plain/epoch-0.pt"),
    "ddp": (["ddp.py"], "--batch-size=64", "ddp/epoch-0.pt"),
    "lightning": (["lightning_asr.py"], "--batch-size=64", "lightning/**/*.ckpt"),
    "speechbrain": (
        ["speechbrain_asr.py", "speechbrain_asr.yaml"],
        "--batch_size=64",
        "speechbrain/save/*/encoder.ckpt",
    ),
    "llama": (["llama.py"], "--max_steps=2", "llama/model.safetensors"),
    "packed": (
        ["packed_llama.py"],
        "--max_steps=2",
        "packed_llama/model.safetensors",
    ),
    "whisper": (["whisper.py"], "--max_steps=2", "whisper/model.safetensors"),
    "wav2vec2": (["wav2vec2.py"], "--max_steps=2", "wav2vec2/model.safetensors"),
}


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
    files = [str(EXAMPLES / file) for file in SCRIPTS[name][0]]
    return [sys.executable, *launcher, *files]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_trains_by_itself(
    name: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    _, shorter, checkpoint = SCRIPTS[name]
    ran = subprocess.run(
        [*command_of(name), shorter],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "runs").glob(checkpoint))


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


# The manifest and how to read it, memory for 5 to 20 of the longest examples, and how many units of the script's own
# batches are one unit of the manifest.
TUNED = {
    "plain": (["speech_train.csv", "--target-key=text"], "512MiB", 100),
    "ddp": (["speech_train.csv", "--target-key=text"], "576MiB", 100),
    "lightning": (["speech_train.csv", "--target-key=text"], "544MiB", 100),
    "speechbrain": (["speech_train.csv", "--target-key=text"], "640MiB", 16000),
    "llama": (["code_train.csv"], "672MiB", 1),
    "packed": (["code_train.csv"], "672MiB", 1),
    "whisper": (["speech_train.csv", "--length-key=text"], "640MiB", 1),
    "wav2vec2": (["speech_train.csv", "--target-key=text"], "704MiB", 16000),
}


FEW = ["--num-lengths=3", "--max-lengths=5", "--tolerance=0.1"]
FEW += ["--num-buckets=3:5"]  # with more, 400 examples need more batches


@pytest.mark.slow
@pytest.mark.timeout(900)  # each trial that runs out of memory starts the script anew
@pytest.mark.parametrize("name", TUNED)
def test_it_is_tuned_run_and_recorded_as_it_is(
    name: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    (manifest, *options), memory, per_unit = TUNED[name]
    source = [str(EXAMPLES / manifest), *options]
    shorter = SCRIPTS[name][1]

    def batchtune(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "batchtune", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return f"{ran.stdout}\n{ran.stderr}"

    batchtune("tune", *source, *FEW, f"--memory={memory}", "--", *command_of(name))
    assert [path.name for path in tmp_path.iterdir()] == ["batchtune-run"]
    probe = json.loads((tmp_path / "batchtune-run" / "probe.json").read_text())
    script = probe["device"]["script"]
    assert script["per_unit"] == per_unit
    if name in ("plain", "speechbrain", "packed"):
        learned = f"({script['loader']}): {'; '.join(script['batches'])}."
        assert learned in (EXAMPLES / "README.md").read_text()
    # Within 2%, or a MiB of the heap.
    for twin in script["twins"]:
        most = max(0.02 * twin["own_bytes"], 1 << 20)
        assert abs(twin["made_bytes"] - twin["own_bytes"]) <= most, twin
    assert len(script["twins"]) == 3 * probe["device"]["world_size"]
    said = batchtune("run", *source, "--", *command_of(name), shorter)
    assert "gives the batches of" in said
    batchtune("record", "--", *command_of(name), shorter)
    assert "Recorded training" in batchtune("report")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lightnings_own_ranks_are_tuned_and_verified(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    manifest, *reading = TUNED["lightning"][0]
    words = ["tune", str(EXAMPLES / manifest), *reading, *FEW, "--memory=640MiB"]
    words += ["--verify", "--verify-steps=20", "--time-tolerance=10"]
    command = [*command_of("lightning"), "--devices=2"]
    ran = subprocess.run(
        [sys.executable, "-m", "batchtune", *words, "--", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "batchtune-run"
    device = json.loads((folder / "probe.json").read_text())["device"]
    assert (device["world_size"], len(device["ranks"])) == (2, 2)
    assert device["script"]["accumulation"] == 2
    assert json.loads((folder / "verify.json").read_text())["failures"] == []
