"""Trains a model of a local config on random examples with transformers' Trainer, for `--workload transformers:FOLDER`.

Run by itself: `python -m batchtune.scripts.named.transformers_script FOLDER "" task=causal-lm max_steps=2 …`. `length`
is that of the longest example in tokens, or in hundredths of a second of audio at 16 kHz; `target_length` that of the
longest labels of ctc; `lora` is the rank of adapters of all linear layers. Other options are those of
TrainingArguments, such as bf16.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import transformers

from batchtune.scripts.named.examples import Example, examples, pad
from batchtune.workloads import parse_options

MODELS: dict[str, Any] = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "ctc": transformers.AutoModelForCTC,
    "speech-seq2seq": transformers.AutoModelForSpeechSeq2Seq,
}


def make(task: str, config: Any, length: int, target_length: int) -> Example:
    """Return an example."""
    vocabulary = config.get_text_config().vocab_size

    def tokens(count: int) -> torch.Tensor:
        # From the middle of the vocabulary, where no special tokens are.
        return torch.randint(vocabulary // 4, vocabulary // 2 + 1, (count,))

    if task == "ctc":
        audio = torch.randn(160 * length)
        return {"input_values": audio, "labels": tokens(target_length)}
    if task == "speech-seq2seq":
        # Whisper pads all audio to 30 seconds, and halves the number of frames: only texts differ in length.
        frames = 2 * config.max_source_positions
        features = torch.zeros(1).expand(config.num_mel_bins, frames)
        return {"input_features": features, "labels": tokens(length)}
    ids = tokens(length)
    labels = torch.tensor([0]) if task == "sequence-classification" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def train(path: str, options: dict[str, Any]) -> None:
    """Train random weights on one device, without logs and checkpoints."""
    task = options.pop("task")
    lora = options.pop("lora", None)
    config = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    config.get_text_config().pad_token_id = 0  # classifiers of batches need one
    model = MODELS[task].from_config(config)
    if lora is not None:
        import peft

        adapters = peft.LoraConfig(r=lora, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    made = examples(partial(make, task, config), options)
    defaults = {
        "output_dir": ".",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(**{**defaults, **options})
    # With several GPUs the Trainer would split each batch among them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    trainer = transformers.Trainer(
        model, arguments, data_collator=pad, train_dataset=made
    )
    trainer.train()


if __name__ == "__main__":
    train(sys.argv[1], parse_options(sys.argv[3:]))
