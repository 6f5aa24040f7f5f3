"""Trains a CTC speech recognizer in plain PyTorch: `python examples/scripts/plain.py`."""

import argparse
import csv
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(__file__).parent
ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # a character's class is its place here + 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Speech(Dataset):
    """Made utterances: 100 frames a second, and each character has a sound of its own."""

    def __init__(self, manifest):
        with open(manifest, newline="") as rows:
            self.rows = list(csv.DictReader(rows))
        generator = torch.Generator().manual_seed(0)
        self.sounds = torch.randn(len(ALPHABET) + 1, 40, generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        tokens = torch.tensor([ALPHABET.index(char) + 1 for char in row["text"]])
        num_frames = int(float(row["duration"]) * 100)
        spoken = torch.arange(num_frames) * len(tokens) // num_frames
        features = self.sounds[tokens[spoken]] + torch.randn(num_frames, 40)
        return features, tokens, row["ID"]


def collate(examples):
    """Pads the features and the tokens, and keeps the ids."""
    features, tokens, ids = zip(*examples, strict=True)
    feature_lengths = torch.tensor([len(one) for one in features])
    token_lengths = torch.tensor([len(one) for one in tokens])
    features = pad_sequence(features, batch_first=True)
    tokens = pad_sequence(tokens, batch_first=True)
    return features, feature_lengths, tokens, token_lengths, ids


class Recognizer(nn.Module):
    """A convolution that halves the number of frames, then three layers of a transformer."""

    def __init__(self, dim=144):
        super().__init__()
        self.subsample = nn.Conv1d(40, dim, kernel_size=3, stride=2, padding=1)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.classify = nn.Linear(dim, len(ALPHABET) + 1)

    def forward(self, features, lengths):
        """Returns the log-probabilities of each frame, and how many frames count."""
        hidden = self.subsample(features.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        frames = torch.arange(hidden.shape[1], device=lengths.device)
        hidden = self.encoder(hidden, src_key_padding_mask=frames >= lengths[:, None])
        return self.classify(hidden).log_softmax(-1), lengths


def loss_of(model, batch):
    """Returns the CTC loss of a batch."""
    features, feature_lengths, tokens, token_lengths = (x.to(DEVICE) for x in batch[:4])
    scores, lengths = model(features, feature_lengths)
    scores = scores.transpose(0, 1)
    return nn.functional.ctc_loss(
        scores, tokens, lengths, token_lengths, zero_infinity=True
    )


def main():
    """Trains, validates and saves a checkpoint after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default="runs/plain")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train = DataLoader(
        Speech(FOLDER / "speech_train.csv"),
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=collate,
        num_workers=2,
    )
    valid = DataLoader(
        Speech(FOLDER / "speech_valid.csv"), batch_size=8, collate_fn=collate
    )
    model = Recognizer().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        model.train()
        for step, batch in enumerate(train):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}", flush=True)
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, batch).item() for batch in valid]
        print(f"epoch {epoch}: valid loss {sum(losses) / len(losses):.3f}", flush=True)
        torch.save(model.state_dict(), options.out / f"epoch-{epoch}.pt")


if __name__ == "__main__":
    main()
