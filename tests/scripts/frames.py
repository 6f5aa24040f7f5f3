"""Data and a model of scripts and tests: features of frames."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Lengths(Dataset):
    """Features of 20 to 99 frames."""

    def __init__(self, count=40):
        self.lengths = [20 + 37 * index % 80 for index in range(count)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.randn(self.lengths[index], 16)


class Rows(Dataset):
    """Example i has the i-th length, and holds its index."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((int(self.lengths[index]),), float(index))


def collate(examples):
    return pad_sequence(examples, batch_first=True)


def layers():
    """Takes 256 activations for each frame."""
    return torch.nn.Sequential(
        torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16)
    )
