"""The training scripts among the examples: batchtune tunes each without changing it, and runs it in its batches."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cli.conftest import run_here_in
from scripts.test_feeding import supervise
from shared_nursery import SharedNursery

from batchtune.configs import read_any_sampler_yaml
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.probe.supervisor import worker_program
from batchtune.processes.worker import Nursery
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    BatchShape,
    Probe,
    Sweep,
    read_result,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PAGES = " ".join(" ".join(page.read_text() for page in EXAMPLES.glob("*.md")).split())


class Example(NamedTuple):
    """A script of the examples, its manifest, and what is known of it.

    Memory is for 5 to 20 of the longest examples; `per_unit` of its own batches are one unit of the manifest.
    """

    command: list[str]
    manifest: str
    columns: dict[str, str]
    memory_mib: int
    per_unit: int
    accumulation: int
    look_ahead: int
    ranks: int = 1


SPEECH = ("speech_train.csv", {"target_key": "text"})
CODE = ("code_train.csv", {})
FOUND = {
    "ddp": Example([*TORCHRUN, "ddp.py"], *SPEECH, 576, 100, 1, 0, 2),
    "lightning's own ranks": Example(
        ["lightning_asr.py", "--devices=2"], *SPEECH, 600, 100, 2, 0, 2
    ),
    "speechbrain": Example(
        ["speechbrain_asr.py", "speechbrain_asr.yaml"], *SPEECH, 640, 16000, 1, 0
    ),
    "llama": Example(["llama.py"], *CODE, 672, 1, 2, 2),
    "packed": Example(["packed_llama.py"], *CODE, 672, 1, 1, 1),
    "whisper": Example(
        ["whisper.py"], "speech_train.csv", {"length_key": "text"}, 640, 1, 2, 2
    ),
    "wav2vec2": Example(["wav2vec2.py"], *SPEECH, 704, 16000, 2, 2),
}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory):
    """One nursery for the scripts; an empty module takes torchaudio's place where that does not load."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            importlib.import_module("torchaudio")
        except (ImportError, OSError):
            empty = tmp_path_factory.mktemp("empty")
            (empty / "torchaudio.py").touch()
            patch.setenv("PYTHONPATH", str(empty))
        patch.setenv("OMP_NUM_THREADS", "1")
        nursery = SharedNursery(*worker_program(script=True))
        patch.setattr("batchtune.probe.supervisor.Nursery", lambda *_: nursery)
        yield
        Nursery.close(nursery)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command_of(example):
    words = [
        str(EXAMPLES / word) if (EXAMPLES / word).is_file() else word
        for word in example.command
    ]
    return [sys.executable, *words]


def lengths_of(example):
    options = ReadOptions(**example.columns)
    return load_lengths(str(EXAMPLES / example.manifest), options)


@pytest.mark.process
def test_the_manifests_are_those_that_are_made(tmp_path):
    made = tmp_path / "scripts"
    made.mkdir()
    for name in ("scripts/make_manifests.py", "stdlib_lengths.csv"):
        shutil.copy(EXAMPLES.parent / name, tmp_path / name)
    subprocess.run([sys.executable, str(made / "make_manifests.py")], check=True)
    for path in EXAMPLES.glob("*.csv"):
        assert (made / path.name).read_bytes() == path.read_bytes()


def check_learned(device, per_unit):
    """Checks what the probe learned of a script, and that made batches take what the script's own do."""
    script = device.script
    assert script.per_unit == per_unit
    # Of packed batches none is made; where steps are slow, fewer are compared.
    compared = [0] if script.packed else [1, 2, 3]
    assert len(script.twins) in [device.world_size * count for count in compared]
    # Within 2%, or a MiB of the heap.
    for twin in script.twins:
        most = max(0.02 * twin.own_bytes, 1 << 20)
        assert abs(twin.made_bytes - twin.own_bytes) <= most, twin
    return script


def assert_shown(script):
    """A page of the examples shows what was learned."""
    assert f"({script.loader}): {'; '.join(script.batches)}." in PAGES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOUND)
def test_it_is_measured_as_it_is(name, folder):
    """`tune` searches, and proves the table: test_a_script_is_tuned_run_recorded_and_reported."""
    example = FOUND[name]
    lengths = lengths_of(example)
    longest = lengths.longest

    def shape(size):
        if name == "packed":
            return BatchShape.packed([int(longest)] * size)
        return BatchShape(size, longest, lengths.worst_target(longest))

    started = supervise(
        *command_of(example),
        lengths=lengths,
        memory_bytes=example.memory_mib << 20,
        memory_fraction=0.9,
    )
    with started as supervisor:
        device = supervisor.start()
        fits, too_large = (
            supervisor.measure(shape(size), index).trial
            for index, size in enumerate((2, lengths.count))
        )
    assert (fits.outcome, too_large.outcome) == ("ok", "oom")
    script = check_learned(device, example.per_unit)
    found = (script.accumulation, script.look_ahead, device.world_size)
    assert found == (example.accumulation, example.look_ahead, example.ranks)
    assert script.packed == (name == "packed")
    if name in ("speechbrain", "packed"):
        assert_shown(script)
    if name in ("lightning's own ranks", "wav2vec2"):
        # From Lightning's closures, and the Trainer's steps; only the first model has batch norm.
        gradient = script.gradient
        assert gradient.again < 0.01 < (gradient.any_counts or 0.0)
        assert bool(gradient.batch_norm) == (name != "wav2vec2")
    assert os.listdir(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_packed_steps_keep_their_sequences_and_losses(folder):
    """Steps of 4 rows of 4 sequences, in as few rows as hold them."""
    command = command_of(FOUND["packed"])
    manifest = str(EXAMPLES / "code_train.csv")
    own = ["--current=batch_size=4", "--accumulate=4", "--max-tokens=3000"]
    swept = run_here_in(folder, "sweep-buckets", manifest, *own)
    assert swept.returncode == 0, swept.stderr
    accumulate = read_any_sampler_yaml(folder / "batchtune-run/sampler.yaml").accumulate
    assert accumulate < 4
    short = ["--max_steps=4", "--logging_steps=1", "--eval_strategy=no"]
    short += ["--per_device_train_batch_size=4", "--dataloader_num_workers=0"]
    losses = []
    for number, start in ((4, ["record"]), (accumulate, ["run", manifest])):
        words = [*command, *short, f"--gradient_accumulation_steps={number}"]
        words.append(f"--output_dir={start[0]}")
        ran = run_here_in(folder, *start, "--", *words)
        assert ran.returncode == 0, ran.stderr
        state = (folder / start[0] / "checkpoint-4/trainer_state.json").read_text()
        logged = json.loads(state)["log_history"]
        # The last entry is of the whole training.
        losses.append([entry["loss"] for entry in logged[:4]])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind", ["plain", "accelerate", "lightning", "trainer", "speechbrain"]
)
def test_a_training_that_accumulates_stays_the_same(kind, folder, capfd):
    """The script is tuned and run as it is: the examples of its 20 steps, losses and parameters are the same."""
    script = [sys.executable, str(Path(__file__).with_name("accumulating_script.py"))]
    script.append(kind)
    subprocess.run([*script, "own.pt"], check=True)
    few = ["--num-lengths=2", "--max-lengths=2", "--tolerance=0.3", "--num-buckets=3"]
    for command in (["tune", "--memory=700MiB", *few], ["run"]):
        ran = run_here_in(folder, *command, "--", *script, "cut.pt", env={})
        assert ran.returncode == 0, ran.stderr + capfd.readouterr().err
    assert read_any_sampler_yaml(folder / "batchtune-run/sampler.yaml").accumulate == 4
    assert "gives the batches of" in capfd.readouterr().err
    own, own_steps = torch.load("own.pt")
    cut, cut_steps = torch.load("cut.pt")
    assert len(own_steps) == 20
    for (examples, loss), same in zip(own_steps, cut_steps, strict=True):
        assert same == (examples, pytest.approx(loss, rel=1e-4))
    assert all(torch.allclose(own[name], cut[name], atol=1e-4) for name in own)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_script_is_tuned_run_recorded_and_reported(folder, capfd):
    """The commands of the scripts' first page, without a manifest."""

    def batchtune(*words):
        ran = run_here_in(folder, *words, env={})  # from the nursery of scripts
        assert ran.returncode == 0, ran.stderr + capfd.readouterr().err
        return ran

    for name in ("plain.py", "speech_train.csv", "speech_valid.csv"):
        shutil.copy(EXAMPLES / name, folder)
    script = ["--", sys.executable, "plain.py"]
    run = folder / "batchtune-run"
    few = ["--num-lengths=3", "--max-lengths=3", "--tolerance=0.1"]
    # With more buckets, 400 examples need more batches.
    tuned = batchtune("tune", *few, "--num-buckets=3:5", "--memory=700MiB", *script)
    assert "the script's own data set (" in tuned.stderr
    assert "▶ recommended" in tuned.stdout, tuned.stdout + tuned.stderr
    assert not (folder / "runs").exists()  # the probe trains in a scratch folder
    assert_shown(check_learned(read_result(run / PROBE_FILE, Probe).device, 100))
    sweep = read_result(run / SWEEP_FILE, Sweep)
    proof = sweep.proof  # the script itself ran these batches, in a fresh process
    assert proof.holds and proof.steps >= 12
    # What it would gain is told against its own DataLoader.
    current = "Your current config is fixed batches of 8 (as the script's DataLoader"
    assert current in " ".join(tuned.stdout.split())

    capfd.readouterr()
    batchtune("run", *script)
    trained = capfd.readouterr()
    given = f"{run.name}/sampler.yaml, {sweep.recommended_row.batches} an epoch."
    assert given in trained.err
    assert (folder / "runs" / "plain" / "epoch-0.pt").is_file()

    batchtune("record", f"--run={run}", *script, "--batch-size=64")
    assert "Recorded training: 7 steps" in batchtune("report").stdout
