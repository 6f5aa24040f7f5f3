"""Trains a small Llama with Transformers' Trainer: `python examples/scripts/llama.py`."""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

FOLDER = Path(__file__).parent
VOCABULARY = 4000


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's arguments, with other defaults."""

    output_dir: str = "runs/llama"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    gradient_checkpointing: bool = True
    num_train_epochs: float = 1
    learning_rate: float = 1e-3
    lr_scheduler_type: str = "cosine"
    eval_strategy: str = "epoch"
    save_steps: float = 10
    save_total_limit: int = 2
    logging_steps: float = 5
    dataloader_num_workers: int = 2
    report_to: str = "none"


class Code(Dataset):
    """Made sequences with the lengths of the manifest: each token follows from the one before."""

    def __init__(self, manifest):
        with open(manifest, newline="") as rows:
            self.lengths = [int(row["num_tokens"]) for row in csv.DictReader(rows)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = (index + 7 * torch.arange(self.lengths[index])) % 100 + 3
        return {"input_ids": tokens}


def collate(examples):
    """Pads the tokens; padding is neither attended to nor part of the loss."""
    tokens = [example["input_ids"] for example in examples]
    mask = [torch.ones_like(one) for one in tokens]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(tokens, batch_first=True, padding_value=-100),
    }


def main():
    """Trains, evaluates and saves."""
    parser = HfArgumentParser(Arguments)
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_cache=False,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        data_collator=collate,
        train_dataset=Code(FOLDER / "code_train.csv"),
        eval_dataset=Code(FOLDER / "code_valid.csv"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
