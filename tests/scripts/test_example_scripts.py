"""The training scripts among the examples: batchtune tunes each without changing it, and runs it in its batches."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cli.conftest import run_in

from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    Probe,
    Script,
    Sweep,
    read_result,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Tuned(NamedTuple):
    """How a script of the examples is tuned and run.

    Memory is for 5 to 20 of the longest examples; `per_unit` of its own batches are one unit of the manifest. `shorter`
    is an option for an epoch of few steps, `checkpoint` what that leaves.
    """

    script: list[str]
    source: list[str]
    memory: str
    per_unit: int
    shorter: str
    checkpoint: str


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
}
FEW = ["--num-lengths=3", "--max-lengths=3", "--tolerance=0.1"]
BUCKETS = "--num-buckets=3:5"  # with more, 400 examples need more batches

Batchtune = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a script; an empty module takes torchaudio's place where that does not load."""
    imported = subprocess.run(
        [sys.executable, "-c", "import torchaudio"], capture_output=True, check=False
    )
    environment = {"OMP_NUM_THREADS": "1"}
    if imported.returncode != 0:
        folder = tmp_path_factory.mktemp("empty")
        (folder / "torchaudio.py").touch()
        environment["PYTHONPATH"] = str(folder)
    return environment


@pytest.fixture(autouse=True)
def examples_stay_as_they_are():
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
def batchtune(tmp_path, environment):
    """`batchtune("tune", ...)` in an empty folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        ran = run_in(tmp_path, *words, env=environment)
        assert ran.returncode == 0, ran.stderr
        return ran

    return run


@pytest.mark.process
def test_the_manifests_are_those_that_are_made(tmp_path):
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


def check_learned(folder: Path, per_unit: int) -> Script:
    """Checks what the probe learned of a script, and that made batches take what the script's own do."""
    device = read_result(folder / PROBE_FILE, Probe).device
    script = device.script
    assert script is not None
    assert script.per_unit == per_unit
    # Of packed batches none is made; where steps are slow, fewer are compared.
    compared = [0] if script.packed else [1, 2, 3]
    assert len(script.twins) in [device.world_size * count for count in compared]
    # Within 2%, or a MiB of the heap.
    for twin in script.twins:
        most = max(0.02 * twin.own_bytes, 1 << 20)
        assert abs(twin.made_bytes - twin.own_bytes) <= most, twin
    return script


def assert_shown_on_a_page(script: Script) -> None:
    learned = f"({script.loader}): {'; '.join(script.batches)}."
    assert any(learned in page.read_text() for page in EXAMPLES.glob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # each trial that runs out of memory starts the script anew
@pytest.mark.parametrize("name", TUNED)
def test_it_is_probed_run_and_recorded_as_it_is(name, tmp_path, batchtune):
    """`tune` would prove the table, too: test_a_script_is_tuned_run_recorded_and_reported."""
    tuned = TUNED[name]
    manifest, *options = tuned.source
    source = [str(EXAMPLES / manifest), *options]
    command = command_of(name)
    memory = f"--memory={tuned.memory}"
    batchtune("probe-oom", *source, *FEW, memory, "--", *command)
    assert [path.name for path in tmp_path.iterdir()] == ["batchtune-run"]
    script = check_learned(tmp_path / "batchtune-run", tuned.per_unit)
    if name in ("speechbrain", "packed"):
        assert_shown_on_a_page(script)
    # Under these limits, the own batches of the longest examples do not fit.
    batchtune("sweep-buckets", *source, BUCKETS, "--keep=nothing")
    said = batchtune("run", *source, "--", *command, tuned.shorter).stderr
    assert "gives the batches of" in said
    assert list((tmp_path / "runs").glob(tuned.checkpoint))
    assert "Recorded training" in batchtune("report").stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_is_tuned_run_recorded_and_reported(tmp_path, batchtune):
    """The commands of the scripts' first page, without a manifest."""
    for name in ("plain.py", "speech_train.csv", "speech_valid.csv"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    script = ["--", sys.executable, "plain.py"]
    run = tmp_path / "batchtune-run"
    tuned = batchtune("tune", *FEW, BUCKETS, "--memory=700MiB", *script)
    assert "the script's own data set (" in tuned.stderr
    assert "▶ recommended" in tuned.stdout, tuned.stdout + tuned.stderr
    assert not (tmp_path / "runs").exists()  # the probe trains in a scratch folder
    assert_shown_on_a_page(check_learned(run, 100))
    sweep = read_result(run / SWEEP_FILE, Sweep)
    assert sweep.lengths.count == 400 and sweep.recommended_row is not None
    proof = sweep.proof  # the script itself ran these batches, in a fresh process
    assert proof is not None and proof.holds and proof.steps >= 12
    # What it would gain is told against its own DataLoader.
    assert sweep.current is not None and sweep.current.batches == 50
    current = "Your current config is fixed batches of 8 (as the script's DataLoader"
    assert current in " ".join(tuned.stdout.split())

    trained = batchtune("run", *script)
    given = f"{run.name}/sampler.yaml, {sweep.recommended_row.batches} an epoch."
    assert "the DataLoader of Speech gives the batches of" in trained.stderr
    assert given in trained.stderr
    assert "epoch 0: valid loss" in trained.stdout
    assert (tmp_path / "runs" / "plain" / "epoch-0.pt").is_file()

    recorded = batchtune("record", f"--run={run}", *script)
    assert f"Recorded in {run}" in recorded.stderr
    shown = batchtune("report").stdout
    assert "▶ recommended" in shown and "Recorded training: 50 steps" in shown
    assert (tmp_path / "plain.py").read_bytes() == (EXAMPLES / "plain.py").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "memory", "per_unit", "look_ahead", "ranks"),
    [
        (["lightning_asr.py", "--devices=2"], "600MiB", 100, 0, 2),
        (["wav2vec2.py"], "704MiB", 16000, 2, 1),
    ],
    ids=["lightning's own ranks", "wav2vec2"],
)
def test_it_is_probed_as_it_is(
    tmp_path, batchtune, command, memory, per_unit, look_ahead, ranks
):
    """Ranks are tuned and verified in test_script_ranks.py; `run` hands wav2vec2's Trainer its batches as llama's."""
    script, *options = command
    words = ["probe-oom", str(EXAMPLES / "speech_train.csv"), "--target-key=text"]
    words += ["--num-lengths=2", "--max-lengths=2", "--tolerance=0.1"]
    started = [sys.executable, str(EXAMPLES / script), *options]
    batchtune(*words, f"--memory={memory}", "--", *started)
    folder = tmp_path / "batchtune-run"
    learned = check_learned(folder, per_unit)
    assert (learned.accumulation, learned.look_ahead) == (2, look_ahead)
    # The gradient of a step, from Lightning's closures and the Trainer's steps; only the first model has batch norm.
    gradient = learned.gradient
    assert gradient is not None and gradient.again is not None
    assert gradient.again < 0.01 < (gradient.any_counts or 0.0)
    assert bool(gradient.batch_norm) == (ranks > 1)
    device = read_result(folder / PROBE_FILE, Probe).device
    assert device.world_size == ranks
