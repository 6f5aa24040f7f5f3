"""Workloads named by their framework: their commands, their errors, and the scripts, which run by themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from batchtune.cli.options import ManifestOptions, Task, WorkloadOptions
from batchtune.errors import UsageError
from batchtune.scripts.learning import Learned
from batchtune.scripts.named import named_command, script_options
from batchtune.scripts.named.examples import examples, pad
from batchtune.scripts.named.torch_script import train

MODELS = str(Path(__file__).with_name("named_models.py"))
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
    "sequence-classification": {"model_type": "llama", **TEXT_MODEL},
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


def test_a_model_becomes_a_command(tmp_path: Path) -> None:
    words = named_command(f"torch:{MODELS}:Tagger", "cross_entropy", ["dim=4"])
    assert words[3:] == [MODELS, "Tagger", "loss=cross_entropy", "dim=4"]
    words = named_command(f"transformers:{tmp_path}", "ctc", [])
    assert words[3:] == [str(tmp_path), "", "task=ctc"]
    words = named_command(f"lightning:{MODELS}:lit", None, ["devices=1"])
    assert words[3:] == [MODELS, "lit", "devices=1"]


def test_a_speechbrain_script_gets_its_own_arguments() -> None:
    words = named_command(f"speechbrain:{MODELS}", MODELS, ["lr=0.1"])
    assert words[1:] == [MODELS, MODELS, "--lr=0.1"]


def test_made_examples_count_as_the_manifest_does() -> None:
    made = {"per_unit": 1.0, "target_per_unit": 1.0}
    assert script_options("torch:a.py:b", {}, "tokens") == made
    given = {"per_unit": 100.0, "target_per_unit": 2.0}
    assert script_options("transformers:a", given, "s") == given
    assert script_options("lightning:a.py:b", {}, "s") == {}
    with pytest.raises(UsageError, match="the lengths are in s"):
        script_options("transformers:a", {}, "s")


@pytest.mark.parametrize("kind", ["torch", "lightning", "transformers", "speechbrain"])
def test_a_missing_file_is_named(kind: str) -> None:
    with pytest.raises(UsageError, match="'org/model' does not exist"):
        named_command(f"{kind}:org/model", None, [])
    with pytest.raises(UsageError, match=r"'no.yaml' does not exist"):
        named_command(f"speechbrain:{MODELS}", "no.yaml", [])


@pytest.mark.parametrize(
    ("workload", "loss", "message"),
    [
        (f"torch:{MODELS}:Tagger", None, "--workload torch:… needs --loss"),
        (f"lightning:{MODELS}:lit", "mse", "--loss is only for --workload torch:…"),
        ("builtin:transformer-lm", "mse", "--loss is only for --workload torch:…"),
    ],
)
def test_a_flag_belongs_to_its_framework(
    workload: str, loss: str | None, message: str
) -> None:
    options = WorkloadOptions(workload=workload, loss=loss)
    with pytest.raises(UsageError, match=message):
        options.asked(ManifestOptions(manifest=[]))


def test_examples_vary_in_both_lengths() -> None:
    def make(length: int, target_length: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(length), "labels": torch.zeros(target_length)}

    options = {"length": 100, "target_length": 20, "dim": 4}
    made = examples(make, options)
    assert options == {"dim": 4}
    assert len({len(example["x"]) for example in made}) > 30
    assert len({len(example["labels"]) for example in made}) == 11
    batch = pad(made)
    assert batch["x"].shape == (200, 100)
    assert (batch["labels"] == -100).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Tagger", {"loss": "cross_entropy", "dim": 4, "bf16": True}),
        ("recognizer", {"loss": "mse", "features": 80, "length": 50}),
        ("tagger", {"loss": "mse"}),
        ("Tagger", {"loss": "energy", "vocab": 50}),
    ],
)
def test_a_torch_model_trains(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    train(MODELS, name, options)


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
@pytest.mark.parametrize("task", get_args(Task))
def test_a_model_of_transformers_trains(tmp_path: Path, task: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[task]))
    options = ["", f"task={task}", "max_steps=2", "length=50"]
    ran = run("transformers", str(config), *options, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "train_loss" in ran.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"config.json", "stand-ins"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("causal-lm", "input_ids: [B, L] int64 < 33"),
        ("ctc", "labels: [B, T] int64 < 33"),
        ("speech-seq2seq", "labels: [B, L] int64 < 33"),
    ],
)
def test_made_examples_show_their_axes(task: str, line: str) -> None:
    pytest.importorskip("transformers")
    from batchtune.scripts.named.transformers_script import make

    config = SimpleNamespace(vocab_size=64, max_source_positions=20, num_mel_bins=8)
    config.get_text_config = lambda: config
    made = examples(partial(make, task, config), {})
    assert line in Learned.from_examples(made, pad).lines


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora_trains_adapters(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["causal-lm"]))
    options = [
        "",
        "task=causal-lm",
        "lora=2",
        "gradient_checkpointing=true",
        "max_steps=1",
    ]
    ran = run("transformers", str(config), *options, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_lightning_module_trains(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    options = ["max_steps=2", "accelerator=cpu"]
    ran = run("lightning", MODELS, "lit", *options, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "`max_steps=2` reached" in ran.stderr


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
    assert probe["workload"]["options"] == {
        "per_unit": 1.0,
        "target_per_unit": 1.0,
    }
    assert probe["workload"]["command"][3:5] == [MODELS, "Tagger"]
    assert probe["device"]["script"]["batches"] == ["inputs: [B, L] int64 < 100"]
