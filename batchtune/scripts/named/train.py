"""Trains a user's model by its framework: `python -m batchtune.scripts.named.train torch|lightning|transformers …`.

The framework is followed by FILE.py and NAME (by FOLDER and "" for transformers) and by options, such as max_steps=2.
Models of torch and transformers train on random examples of different lengths.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batchtune.workloads import load_object, parse_options

Example = dict[str, Tensor]

_COUNT = 200


def examples(make: Callable[[int, int], Example], options: dict[str, Any]) -> Any:
    """Return a data set of what `make(length, target_length)` returns, from half of the longest lengths to these.

    Takes these, `length` (default: 100) and `target_length` (default: 16), out of the options.
    """
    length = options.pop("length", 100)
    target_length = options.pop("target_length", 16)
    draw = random.Random(0).randint
    return [
        make(
            draw(length // 2, length),
            draw(target_length // 2, target_length),
        )
        for _ in range(_COUNT)
    ]


def pad(examples: Sequence[Example]) -> Example:
    """Return a batch, its parts padded to the longest: `[B, L, ...]`; labels with -100, which losses leave out."""
    batch = {}
    for name in examples[0]:
        values = [example[name] for example in examples]
        padding = -100 if name == "labels" else 0
        batch[name] = pad_sequence(values, batch_first=True, padding_value=padding)
    return batch


def build(file: str, name: str, options: Mapping[str, Any]) -> Any:
    """Return the Module that a file holds, or that its class or function makes with these options."""
    model = load_object(file, name)
    if isinstance(model, torch.nn.Module):
        return model
    return model(**options)


def cross_entropy(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return the loss of outputs `[B, ..., classes]`."""
    scores = outputs.flatten(0, -2)
    targets = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, targets)


def mse(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return the loss of outputs of any shape."""
    return F.mse_loss(outputs, torch.zeros_like(outputs))


LOSSES = {"cross_entropy": cross_entropy, "mse": mse}


def train_torch(file: str, name: str, options: dict[str, Any]) -> None:
    """Train a torch model on random examples in a plain loop, with AdamW, for an epoch.

    Options:
        loss: cross_entropy (outputs `[B, ..., classes]`), mse, or a function of the file, loss(outputs, inputs).
        features: Inputs are frames of this many features, `[B, L, features]`; without, tokens `[B, L]`.
        vocab: Tokens are below (default: 100).
        length: Of the longest example (default: 100).
        bf16: true: with autocast.
        others: Arguments of the model.
    """
    loss_name = options.pop("loss")
    loss_of = LOSSES.get(loss_name) or load_object(file, loss_name)
    features = options.pop("features", None)
    vocabulary = options.pop("vocab", 100)

    def make(length: int, target_length: int) -> Example:
        if features is None:
            return {"inputs": torch.randint(vocabulary, (length,))}
        return {"inputs": torch.randn(length, features)}

    loader: DataLoader[Example] = DataLoader(
        examples(make, options), batch_size=2, collate_fn=pad
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = options.pop("bf16", False)
    model = build(file, name, options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        inputs = batch["inputs"].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_lightning(file: str, name: str, options: dict[str, Any]) -> None:
    """Train a LightningModule on its own data with Lightning's Trainer, without validation, logs and checkpoints.

    The module has a `train_dataloader`, or `data=NAME` names a LightningDataModule of the file. Other options are
    the Trainer's.
    """
    model = build(file, name, {})
    data = None
    if "data" in options:
        data = build(file, options.pop("data"), {})
    # Lightning under its older name, if the file imports that.
    is_older = "pytorch_lightning" in sys.modules
    package = import_module("pytorch_lightning" if is_older else "lightning.pytorch")
    defaults = {
        "devices": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    package.Trainer(**{**defaults, **options}).fit(model, datamodule=data)


MODELS = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "ctc": "AutoModelForCTC",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
}


def made_example(task: str, config: Any, length: int, target_length: int) -> Example:
    """Return an example."""
    vocabulary = config.get_text_config().vocab_size

    def tokens(count: int) -> torch.Tensor:
        # From the middle of the vocabulary, where no special tokens are.
        return torch.randint(vocabulary // 4, vocabulary // 2 + 1, (count,))

    if task == "ctc":
        return {
            "input_values": torch.randn(160 * length),
            "labels": tokens(target_length),
        }
    if task == "speech-seq2seq":
        # Whisper pads all audio to 30 seconds, and halves the number of frames: only texts differ in length.
        frames = 2 * config.max_source_positions
        features = torch.zeros(1).expand(config.num_mel_bins, frames)
        return {"input_features": features, "labels": tokens(length)}
    ids = tokens(length)
    labels = torch.tensor([0]) if task == "sequence-classification" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def train_transformers(path: str, _name: str, options: dict[str, Any]) -> None:
    """Train random weights on one device with transformers' Trainer, without logs and checkpoints.

    `length` is that of the longest example in tokens, or in hundredths of a second of audio at 16 kHz;
    `target_length` that of the longest labels of ctc; `lora` is the rank of adapters of all linear layers. Other
    options are those of TrainingArguments, such as bf16.
    """
    import transformers

    task = options.pop("task")
    lora = options.pop("lora", None)
    config = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    config.get_text_config().pad_token_id = 0  # classifiers of batches need one
    model = getattr(transformers, MODELS[task]).from_config(config)
    if lora is not None:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=lora, target_modules="all-linear")
        )
    made = examples(partial(made_example, task, config), options)
    defaults = {
        "output_dir": ".",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(**{**defaults, **options})
    # With several GPUs the Trainer would split each batch among them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    transformers.Trainer(
        model, arguments, data_collator=pad, train_dataset=made
    ).train()


TRAIN = {
    "torch": train_torch,
    "lightning": train_lightning,
    "transformers": train_transformers,
}


if __name__ == "__main__":
    TRAIN[sys.argv[1]](sys.argv[2], sys.argv[3], parse_options(sys.argv[4:]))
