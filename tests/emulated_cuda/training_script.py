"""A training script: `python training_script.py DEVICE [resets] [catches] [long]`."""

import sys

import torch
from torch.utils.data import DataLoader

DEVICE, *HABITS = sys.argv[1:]
EXAMPLES = 12_000 if "long" in HABITS else 40


def length(index):
    """Of two lengths, both measured, tables need fewer batches than a fixed size, however long a step takes."""
    if "long" in HABITS:
        return 20 + 79 * (index % 7 < 3)
    return 20 + 37 * index % 80


def train(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch.to(DEVICE)).square().mean().backward()
    optimizer.step()
    if "resets" in HABITS:
        torch.cuda.reset_peak_memory_stats(DEVICE)


def main():
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh()).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    examples = [torch.randn(length(index), 16) for index in range(EXAMPLES)]
    pad = torch.nn.utils.rnn.pad_sequence
    loader = DataLoader(examples, 4, collate_fn=lambda batch: pad(batch, True))
    steps = 0
    for batch in loader:
        try:
            train(model, optimizer, batch)
        except torch.OutOfMemoryError:
            if "catches" not in HABITS:
                raise
        steps += 1
    print(f"{steps} steps")


main()
