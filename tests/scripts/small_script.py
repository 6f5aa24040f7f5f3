"""A training script, in the variants that tests need: `python small_script.py VARIANT`."""

import os
import signal
import sys

import torch
import uncompiled  # noqa: F401
from frames import Lengths, collate, layers
from torch.utils.data import DataLoader

VARIANT = sys.argv[1]
FAILS_ABOVE = 30  # examples
DEVICE = "cuda" if VARIANT == "cuda" else "cpu"


def loss_of(model, batch):
    if len(batch) > FAILS_ABOVE:
        if VARIANT == "oom":
            torch.empty(1 << 42)
        if VARIANT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return model(batch.to(DEVICE)).square().mean()


def main():
    torch.set_num_threads(1)
    model = layers().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Lengths(),
        4,
        collate_fn=collate,
        shuffle=True,
        num_workers=1,
        multiprocessing_context="spawn" if VARIANT == "killed" else None,
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
