"""Trains a CTC speech recognizer with Lightning: `python examples/scripts/lightning_asr.py`."""

import argparse
import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(__file__).parent
ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # a character's class is its place here + 1


class Speech(Dataset):
    """Made utterances: 100 frames a second, and each character has a sound of its own."""

    def __init__(self, manifest):
        with open(manifest, newline="") as rows:
            self.rows = list(csv.DictReader(rows))
        generator = torch.Generator().manual_seed(0)
        self.sounds = torch.randn(len(ALPHABET) + 1, 80, generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        tokens = torch.tensor([ALPHABET.index(char) + 1 for char in row["text"]])
        num_frames = int(float(row["duration"]) * 100)
        spoken = torch.arange(num_frames) * len(tokens) // num_frames
        features = self.sounds[tokens[spoken]] + torch.randn(num_frames, 80)
        return {"features": features, "tokens": tokens}


def collate(examples):
    """Pads features and tokens, and counts what is not padding."""
    batch = {}
    for name in ("features", "tokens"):
        values = [example[name] for example in examples]
        batch[name] = pad_sequence(values, batch_first=True)
        batch[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
    return batch


class SpeechData(L.LightningDataModule):
    """The loaders of training and of validation."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def loader(self, name, **options):
        """Returns the loader of one manifest."""
        data = Speech(FOLDER / f"speech_{name}.csv")
        return DataLoader(data, self.batch_size, collate_fn=collate, **options)

    def train_dataloader(self):
        """Returns the loader to train on."""
        return self.loader("train", shuffle=True, num_workers=2)

    def val_dataloader(self):
        """Returns the loader to validate on."""
        return self.loader("valid")


class Recognizer(L.LightningModule):
    """A stack of convolutions in the manner of QuartzNet, with CTC."""

    def __init__(self, dim=256, layers=8, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        blocks = [nn.Conv1d(80, dim, kernel_size=5, stride=2, padding=2)]
        for _ in range(layers):
            blocks += [
                nn.Conv1d(dim, dim, kernel_size=11, padding=5, groups=dim),
                nn.Conv1d(dim, dim, kernel_size=1),
                nn.BatchNorm1d(dim),
                nn.ReLU(),
            ]
        self.encoder = nn.Sequential(*blocks)
        self.classify = nn.Linear(dim, len(ALPHABET) + 1)
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def loss(self, batch):
        """Returns the CTC loss of a batch."""
        hidden = self.encoder(batch["features"].transpose(1, 2)).transpose(1, 2)
        scores = self.classify(hidden).float().log_softmax(-1).transpose(0, 1)
        lengths = (batch["features_lengths"] + 1) // 2
        return self.ctc(scores, batch["tokens"], lengths, batch["tokens_lengths"])

    def training_step(self, batch, batch_idx):
        """Returns the loss to train on."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch, batch_idx):
        """Logs the loss."""
        loss = self.loss(batch)
        self.log("valid_loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self):
        """Returns AdamW with one cycle of the learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.lr,
            total_steps=self.trainer.estimated_stepping_batches,
        )
        scheduler = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    """Trains for some epochs, and keeps the best checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--out", default="runs/lightning")
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=CSVLogger(options.out),
        callbacks=[ModelCheckpoint(monitor="valid_loss"), LearningRateMonitor()],
    )
    trainer.fit(Recognizer(), datamodule=SpeechData(options.batch_size))


if __name__ == "__main__":
    main()
