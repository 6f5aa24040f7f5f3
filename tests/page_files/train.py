"""The `train.py` of the documentation's commands: a script, a step, and loaders, on made sequences."""

import csv

import torch
from torch.utils.data import DataLoader, Dataset

RATE = 16_000
STRIDE = 400


class Sequences(Dataset):
    def __init__(self):
        with open("train.csv", encoding="utf-8") as stream:
            self.rows = list(csv.DictReader(stream))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return torch.ones(int(RATE * float(self.rows[number]["duration"])))


def pad(examples):
    return torch.nn.utils.rnn.pad_sequence(examples, batch_first=True)


def make_loader_arguments():
    return {"dataset": Sequences(), "batch_size": 8, "collate_fn": pad}


def make_dataset():
    return make_loader_arguments()


def make_loader():
    return DataLoader(**make_loader_arguments())


class MyStep:
    def __init__(self, layers=2):
        self.sizes = [1, *[64] * int(layers), 1]

    def setup(self, device):
        layers = map(torch.nn.Linear, self.sizes, self.sizes[1:])
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def make_batch(self, shape):
        return torch.ones(shape.batch_size, int(RATE * shape.length))

    def step(self, batch):
        self.model(batch[:, ::STRIDE, None]).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train():
    step = MyStep(layers=4)
    step.setup("cpu")
    loader = DataLoader(Sequences(), batch_size=8, shuffle=True, collate_fn=pad)
    for batch in loader:
        step.step(batch)


if __name__ == "__main__":
    train()
