"""Trains a small Whisper with Transformers' Trainer: `python examples/scripts/whisper.py`.

Whisper pads all audio to one length (here to 4 s, not to 30), so that only its texts differ in length.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)

FOLDER = Path(__file__).parent
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
PAD, START, END, FIRST = 0, 1, 2, 3  # a character's token is its place here + FIRST


@dataclass
class Arguments(Seq2SeqTrainingArguments):
    """The Trainer's arguments, with other defaults."""

    output_dir: str = "runs/whisper"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    num_train_epochs: float = 1
    learning_rate: float = 1e-3
    warmup_steps: float = 5
    eval_strategy: str = "epoch"
    save_steps: float = 10
    save_total_limit: int = 2
    logging_steps: float = 5
    dataloader_num_workers: int = 2
    report_to: str = "none"


class Speech(Dataset):
    """Made utterances: 100 frames a second, and each character has a sound of its own."""

    def __init__(self, manifest):
        with open(manifest, newline="") as rows:
            self.rows = list(csv.DictReader(rows))
        generator = torch.Generator().manual_seed(0)
        self.sounds = torch.randn(len(ALPHABET), 80, generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        characters = torch.tensor([ALPHABET.index(char) for char in row["text"]])
        num_frames = int(float(row["duration"]) * 100)
        spoken = torch.arange(num_frames) * len(characters) // num_frames
        features = torch.zeros(80, 400)
        features[:, :num_frames] = self.sounds[characters[spoken]].T
        labels = torch.cat([characters + FIRST, torch.tensor([END])])
        return {"input_features": features, "labels": labels}


def collate(examples):
    """Stacks the features and pads the labels; padding is not part of the loss."""
    features = torch.stack([example["input_features"] for example in examples])
    labels = [example["labels"] for example in examples]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_features": features, "labels": labels}


def main():
    """Trains, evaluates and saves."""
    parser = HfArgumentParser(Arguments)
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    config = WhisperConfig(
        vocab_size=1000,
        d_model=128,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=512,
        max_source_positions=200,
        max_target_positions=128,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
    )
    trainer = Seq2SeqTrainer(
        WhisperForConditionalGeneration(config),
        arguments,
        data_collator=collate,
        train_dataset=Speech(FOLDER / "speech_train.csv"),
        eval_dataset=Speech(FOLDER / "speech_valid.csv"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
