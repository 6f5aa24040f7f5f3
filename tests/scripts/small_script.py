"""A training script, in the variants that tests need: `python small_script.py VARIANT`."""

import os
import signal
import sys

import torch
import uncompiled  # noqa: F401
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

VARIANT = sys.argv[1]
FAILS_ABOVE = 30  # examples
DEVICE = "cuda" if VARIANT == "cuda" else "cpu"


class Lengths(Dataset):
    def __init__(self):
        self.lengths = [20 + 37 * index % 80 for index in range(40)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.randn(self.lengths[index], 16)


def collate(examples):
    if VARIANT == "packed":
        positions = [torch.arange(len(example)) for example in examples]
        return {"x": torch.cat(examples)[None], "position_ids": torch.cat(positions)}
    return pad_sequence(examples, batch_first=True)


def loss_of(model, batch):
    if VARIANT == "packed":
        batch = batch["x"]
    if len(batch) > FAILS_ABOVE:
        if VARIANT == "oom":
            torch.empty(1 << 42)
        if VARIANT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return model(batch.to(DEVICE)).square().mean()


def main():
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16)
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Lengths(),
        4,
        collate_fn=collate,
        shuffle=True,
        num_workers=1,
        multiprocessing_context="spawn" if VARIANT == "packed" else None,
    )
    for _ in loader:  # statistics of the features
        pass
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
