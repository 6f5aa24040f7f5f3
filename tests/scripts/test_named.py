"""Workloads named by their framework: their commands, their errors, and the scripts, which run by themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.scripts.named import TASKS, NamedScript, named_script
from batchtune.scripts.named.examples import RandomExamples, pad
from batchtune.scripts.named.torch_script import train

MODELS = str(Path(__file__).with_name("named_models.py"))
TOKENS = Lengths.of([4, 10, 40], unit="tokens")
TEXT_MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 16,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **{
        f"{part}_{what}": 2
        for part in ("encoder", "decoder")
        for what in ("layers", "attention_heads", "ffn_dim")
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "causal-lm": {"model_type": "llama", **TEXT_MODEL},
    "masked-lm": {"model_type": "bert", **TEXT_MODEL},
    "sequence-classification": {"model_type": "llama", **TEXT_MODEL},
    "seq2seq-lm": {"model_type": "bart", **ENCODER_DECODER},
    "ctc": {
        "model_type": "wav2vec2",
        **TEXT_MODEL,
        "conv_dim": [8] * 7,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
    "speech-seq2seq": {
        "model_type": "whisper",
        **ENCODER_DECODER,
        "max_source_positions": 20,
    },
}


def named(
    workload: str,
    *settings: str,
    lengths: Lengths = TOKENS,
    per_unit: float | None = None,
    **flags: str,
) -> NamedScript:
    every_flag = {"task": None, "loss": None, "hparams": None, **flags}
    return named_script(workload, every_flag, settings, lengths, per_unit)


def test_a_model_becomes_a_command() -> None:
    script = named(f"torch:{MODELS}:Tagger", "dim=4", loss="cross_entropy")
    assert script.words[3:] == [
        *(MODELS, "Tagger"),
        *("loss=cross_entropy", "length=10", "dim=4"),
    ]
    assert script.options == {"per_unit": 1.0, "length_key": "inputs"}


def test_seconds_become_samples_or_frames(tmp_path: Path) -> None:
    seconds = Lengths.of([0.5, 2.0], unit="s")
    recognizer = f"torch:{MODELS}:recognizer"
    frames = named(recognizer, "features=80", lengths=seconds, loss="ctc")
    assert "length=125" in frames.words
    assert frames.options["per_unit"] == 100.0
    assert frames.options["target_key"] == "labels"
    (tmp_path / "config.json").touch()
    samples = named(f"transformers:{tmp_path}", lengths=seconds, task="ctc")
    assert "length=20000" in samples.words
    given = named(recognizer, "features=80", lengths=seconds, per_unit=50, loss="ctc")
    assert given.options["per_unit"] == 50


def test_a_speechbrain_script_gets_its_own_arguments() -> None:
    script = named(f"speechbrain:{MODELS}", "lr=0.1", hparams=MODELS)
    assert script.words[1:] == [MODELS, MODELS, "--lr=0.1"]
    assert script.options == {}


@pytest.mark.parametrize(
    ("workload", "settings", "flags", "message"),
    [
        ("torch:nowhere.py:Net", [], {"loss": "mse"}, "nowhere.py' is not a file"),
        ("torch:nowhere.py", [], {"loss": "mse"}, "'' is not a file"),
        (
            "transformers:org/model",
            [],
            {"task": "ctc"},
            "org/model/config.json' is not a file",
        ),
        (f"torch:{MODELS}:Tagger", [], {}, "takes --loss of"),
        (f"lightning:{MODELS}:lit", [], {"task": "ctc"}, "takes none of"),
        ("transformers:CONFIG", [], {"task": "causal"}, "unknown task 'causal'"),
        ("transformers:CONFIG", [], {"task": "ctc"}, "the lengths are in tokens"),
        (f"speechbrain:{MODELS}", [], {"hparams": "no.yaml"}, "'no.yaml' is not"),
    ],
)
def test_what_is_wrong_is_one_error(
    tmp_path: Path,
    workload: str,
    settings: list[str],
    flags: dict[str, str],
    message: str,
) -> None:
    (tmp_path / "config.json").touch()
    workload = workload.replace("CONFIG", str(tmp_path))
    with pytest.raises(UsageError, match=message):
        named(workload, *settings, **flags)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "batchtune.scripts.named.find_spec",
        lambda name: None if name == "peft" else find_spec(name),
    )
    with pytest.raises(UsageError, match="peft, which is not installed"):
        named(f"transformers:{MODELS}", "lora=8", task="causal-lm")


def test_examples_vary_in_both_lengths() -> None:
    import torch

    def make(length: int, target_length: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(length), "labels": torch.zeros(target_length)}

    examples = RandomExamples(make, 100, 20)
    lengths = {len(example["x"]) for example in map(examples.__getitem__, range(400))}
    assert lengths == set(range(51, 101))
    batch = pad([examples[0], examples[399]])
    assert batch["x"].shape == (2, 100)
    assert (batch["labels"] == -100).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Tagger", {"loss": "cross_entropy", "dim": 4, "bf16": True}),
        ("tagger", {"loss": "mse", "accumulation": 2}),
        ("recognizer", {"loss": "ctc", "features": 80}),
        ("Tagger", {"loss": "energy", "vocab": 50}),
    ],
)
def test_a_torch_model_trains(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    import torch

    monkeypatch.setattr(sys, "path", [*sys.path])
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (steps.append(self), step(self))
    )
    train(MODELS, name, {"steps": 2, **options})
    assert len(steps) == 2


def run(kind: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script by itself; where torchaudio does not load, transformers gets an empty module."""
    path = str(Path(__file__).parents[2])
    loads = subprocess.run(
        [sys.executable, "-c", "import torchaudio"], capture_output=True, check=False
    )
    if loads.returncode:
        stand_ins = folder / "stand-ins"
        stand_ins.mkdir()
        (stand_ins / "torchaudio.py").touch()
        path += os.pathsep + str(stand_ins)
    words = [sys.executable, "-m", f"batchtune.scripts.named.{kind}_script"]
    return subprocess.run(
        [*words, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_transformers_trains(tmp_path: Path, task: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[task]))
    options = [f"task={task}", "max_steps=2", "length=8000" if task == "ctc" else ""]
    ran = run("transformers", str(config), *filter(None, options), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "train_loss" in ran.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"config.json", "stand-ins"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora_trains_adapters(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["causal-lm"]))
    options = ["task=causal-lm", "lora=2", "gradient_checkpointing=true", "max_steps=1"]
    ran = run("transformers", str(config), *options, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("model.dim=4", None),
        ("model.with_data=false", "`train_dataloader` must be implemented"),
    ],
)
def test_a_lightning_module_trains(
    tmp_path: Path, option: str, error: str | None
) -> None:
    pytest.importorskip("lightning")
    options = ["max_steps=2", "accelerator=cpu", option]
    ran = run("lightning", MODELS, "lit", *options, folder=tmp_path)
    if error is None:
        assert ran.returncode == 0, ran.stderr
        assert "`max_steps=2` reached" in ran.stderr
    else:
        assert error in ran.stderr


@pytest.mark.slow
def test_a_named_model_is_probed(tmp_path: Path) -> None:
    manifest = tmp_path / "lengths.csv"
    rows = (f"{number},{10 + number % 90}\n" for number in range(4000))
    manifest.write_text("id,num_tokens\n" + "".join(rows))
    words = ["probe-oom", str(manifest), "--workload", f"torch:{MODELS}:Tagger"]
    words += ["--loss", "cross_entropy", "--set", "dim=64", "--memory", "500MiB"]
    words += ["--num-lengths", "2", "--max-lengths", "2", "--device", "cpu", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "batchtune", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    probe = json.loads(ran.stdout)
    assert probe["workload"]["options"] == {"per_unit": 1.0, "length_key": "inputs"}
    assert probe["workload"]["command"][3:5] == [MODELS, "Tagger"]
    assert probe["device"]["script"]["batches"] == ["inputs: [B, L] int64 < 100"]
