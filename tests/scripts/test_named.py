"""Workloads named by their framework: their commands, their errors, and the scripts, which run by themselves."""

import importlib.util
import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from cli.conftest import run_here_in, write_lengths

from batchtune.cli.options import ManifestOptions, ModelTask, WorkloadOptions
from batchtune.errors import UsageError
from batchtune.scripts.learning import Learned
from batchtune.scripts.named import named_command, script_options
from batchtune.scripts.named.train import examples, pad, train_torch

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
CONFIGS = {
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


@pytest.mark.parametrize(
    ("workload", "beside", "option", "words"),
    [
        (f"transformers:{MODELS}", "ctc", "lora=2", [MODELS, "", "task=ctc", "lora=2"]),
        (f"lightning:{MODELS}:lit", None, "devices=1", [MODELS, "lit", "devices=1"]),
        (f"speechbrain:{MODELS}", MODELS, "lr=0.1", [MODELS, MODELS, "--lr=0.1"]),
    ],
)
def test_a_model_becomes_a_command(workload, beside, option, words):
    command = named_command(workload, beside, [option])
    assert command[-len(words) :] == words


def test_made_examples_count_as_the_manifest_does():
    made = {"per_unit": 1.0, "target_per_unit": 1.0}
    assert script_options("torch:a.py:b", {}, "tokens") == made
    given = {"per_unit": 100.0, "target_per_unit": 2.0}
    assert script_options("transformers:a", given, "s") == given
    assert script_options("lightning:a.py:b", {}, "s") == {}
    with pytest.raises(UsageError, match="the lengths are in s"):
        script_options("transformers:a", {}, "s")


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match="'org/model' does not exist"):
        named_command("transformers:org/model", None, [])
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
def test_a_flag_belongs_to_its_framework(workload, loss, message):
    options = WorkloadOptions(workload=workload, loss=loss)
    with pytest.raises(UsageError, match=message):
        options.asked(ManifestOptions(manifest=[]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Tagger", {"loss": "cross_entropy", "dim": 4, "bf16": True}),
        ("recognizer", {"loss": "mse", "features": 80, "length": 50}),
        ("tagger", {"loss": "mse"}),
        ("Tagger", {"loss": "energy", "vocab": 50}),
    ],
)
def test_a_torch_model_trains(monkeypatch, name, options):
    monkeypatch.setattr(sys, "path", [*sys.path])
    train_torch(MODELS, name, options)


def run(patch, kind, *arguments):
    """Runs the script of a framework in this process."""
    module = "batchtune.scripts.named.train"
    patch.setattr(sys, "argv", [module, kind, *arguments])
    runpy.run_module(module, run_name="__main__")


@pytest.fixture
def made_model(tmp_path, monkeypatch, torchaudio_or_none, capsys):
    """`made_model(task, *options)`: what transformers' Trainer prints that trains a model of a local config."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)

    def train_task(task, *options):
        config = tmp_path / "config.json"
        config.write_text(json.dumps(CONFIGS[task]))
        run(monkeypatch, "transformers", str(config), "", f"task={task}", *options)
        assert os.listdir(tmp_path) == ["config.json"]
        return capsys.readouterr().out

    return train_task


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", get_args(ModelTask))
def test_a_model_of_transformers_trains(made_model, task):
    assert "train_loss" in made_model(task, "max_steps=2", "length=50")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("causal-lm", "input_ids: [B, L] int64"),
        ("ctc", "labels: [B, T] int64"),
        ("speech-seq2seq", "labels: [B, L] int64"),
    ],
)
def test_made_examples_show_their_axes(task, line):
    pytest.importorskip("transformers")
    from batchtune.scripts.named.train import made_example

    config = SimpleNamespace(vocab_size=64, max_source_positions=20, num_mel_bins=8)
    config.get_text_config = lambda: config
    # Of some examples the largest token alone grows with the length, by chance.
    torch.manual_seed(0)
    made = examples(partial(made_example, task, config), {})
    assert line in Learned.from_examples(made, pad).lines


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora_trains_adapters(made_model):
    options = ["lora=2", "gradient_checkpointing=true", "max_steps=1"]
    assert "train_loss" in made_model("causal-lm", *options)


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_trains(tmp_path, monkeypatch, caplog):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run(monkeypatch, "lightning", MODELS, "lit", "max_steps=2", "accelerator=cpu")
    assert "`max_steps=2` reached" in caplog.text


@pytest.mark.slow
def test_a_named_model_is_probed(tmp_path):
    lengths = [10 + number % 90 for number in range(4000)]
    manifest = write_lengths(tmp_path / "lengths.csv", lengths, "num_tokens")
    words = ["probe-oom", str(manifest), "--workload", f"torch:{MODELS}:Tagger"]
    words += ["--loss", "cross_entropy", "--set", "dim=64", "--memory", "500MiB"]
    words += ["--num-lengths=2", "--max-batch-size=4", "--device=cpu", "--json"]
    ran = run_here_in(tmp_path, *words, env={})
    assert ran.returncode == 0, ran.stderr
    probe = json.loads(ran.stdout)
    assert probe["workload"]["options"] == {
        "per_unit": 1.0,
        "target_per_unit": 1.0,
    }
    assert probe["workload"]["command"][4:6] == [MODELS, "Tagger"]
    assert probe["device"]["script"]["batches"] == ["inputs: [B, L] int64"]
