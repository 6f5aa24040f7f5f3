"""Trains a small wav2vec 2.0 with CTC and Transformers' Trainer: `python examples/scripts/wav2vec2.py`."""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    set_seed,
)

FOLDER = Path(__file__).parent
ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # a character's class is its place here + 1
SAMPLE_RATE = 16000


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's arguments, with other defaults."""

    output_dir: str = "runs/wav2vec2"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    num_train_epochs: float = 1
    learning_rate: float = 1e-3
    eval_strategy: str = "epoch"
    save_steps: float = 10
    save_total_limit: int = 2
    logging_steps: float = 5
    dataloader_num_workers: int = 2
    report_to: str = "none"


class Speech(Dataset):
    """Made utterances: each character has a pitch of its own."""

    def __init__(self, manifest):
        with open(manifest, newline="") as rows:
            self.rows = list(csv.DictReader(rows))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        labels = torch.tensor([ALPHABET.index(char) + 1 for char in row["text"]])
        num_samples = int(float(row["duration"]) * SAMPLE_RATE)
        spoken = torch.arange(num_samples) * len(labels) // num_samples
        pitches = 200 * 1.1 ** labels[spoken]
        tone = torch.sin(2 * torch.pi * torch.cumsum(pitches / SAMPLE_RATE, 0))
        audio = tone + 0.1 * torch.randn(num_samples)
        return {"input_values": audio, "labels": labels}


def collate(examples):
    """Pads audio and labels; padding is neither attended to nor part of the loss."""
    audio = [example["input_values"] for example in examples]
    mask = [torch.ones(len(one), dtype=torch.long) for one in audio]
    labels = [example["labels"] for example in examples]
    return {
        "input_values": pad_sequence(audio, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main():
    """Trains, evaluates and saves."""
    parser = HfArgumentParser(Arguments)
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    config = Wav2Vec2Config(
        vocab_size=len(ALPHABET) + 1,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        feat_extract_norm="layer",
        layerdrop=0.0,
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    trainer = Trainer(
        Wav2Vec2ForCTC(config),
        arguments,
        data_collator=collate,
        train_dataset=Speech(FOLDER / "speech_train.csv"),
        eval_dataset=Speech(FOLDER / "speech_valid.csv"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
