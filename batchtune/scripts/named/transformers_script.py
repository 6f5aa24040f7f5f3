"""Trains a model of a local config on random examples with transformers' Trainer, for `--workload transformers:CONFIG`.

Run by itself: `python -m batchtune.scripts.named.transformers_script CONFIG task=causal-lm max_steps=2 …`. `length` is
that of the longest example, `target_length` that of the longest labels (default: 32), where they have their own;
`lora` is the rank of adapters of all linear layers. Other options are those of TrainingArguments, such as bf16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # which transformers reads when it is imported
import transformers

from batchtune.scripts.named import TASKS
from batchtune.scripts.named.examples import Example, RandomExamples, pad
from batchtune.workloads import parse_options


def build(path: str, task: str, lora: int | None) -> Any:
    """Return a model with random weights."""
    config = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    text_config = config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = 0  # classifiers of batches need one
    config.ctc_zero_infinity = True  # random labels may be longer than their audio
    model = getattr(transformers, TASKS[task].model_class).from_config(config)
    if lora is None:
        return model
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=lora, target_modules="all-linear")
    )


def maker(task: str, config: Any) -> Callable[[int, int], Example]:
    """Return a function that makes an example."""
    vocabulary = config.get_text_config().vocab_size

    def tokens(length: int) -> torch.Tensor:
        # From the middle of the vocabulary, where no special tokens are.
        return torch.randint(vocabulary // 4, vocabulary // 2 + 1, (length,))

    def text(length: int, target_length: int) -> Example:
        ids = tokens(length)
        labels = {
            "seq2seq-lm": tokens(target_length),
            "sequence-classification": torch.tensor([0]),
        }
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels.get(task, ids),
        }

    def audio(length: int, target_length: int) -> Example:
        return {"input_values": torch.randn(length), "labels": tokens(target_length)}

    def whisper(length: int, target_length: int) -> Example:
        # The encoder halves the number of frames.
        frames = 2 * config.max_source_positions
        features = torch.randn(config.num_mel_bins, frames)
        return {"input_features": features, "labels": tokens(length)}

    return {"ctc": audio, "speech-seq2seq": whisper}.get(task, text)


def train(path: str, options: dict[str, Any]) -> None:
    """Train on one device, without logs and checkpoints."""
    task = options.pop("task")
    model = build(path, task, options.pop("lora", None))
    examples = RandomExamples(
        maker(task, model.config),
        options.pop("length", 100),
        options.pop("target_length", 32),
    )
    defaults = {
        "output_dir": ".",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "remove_unused_columns": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    arguments = transformers.TrainingArguments(**{**defaults, **options})
    # With several GPUs the Trainer would split each batch among them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    trainer = transformers.Trainer(
        model, arguments, data_collator=pad, train_dataset=examples
    )
    trainer.train()


if __name__ == "__main__":
    train(sys.argv[1], parse_options(sys.argv[2:]))
