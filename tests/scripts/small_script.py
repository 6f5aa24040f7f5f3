"""A training script, in the variants that tests need: `python small_script.py VARIANT`."""

import os
import signal
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

VARIANT = sys.argv[1]
FAILS_ABOVE = 20  # examples
DEVICE = "cuda" if VARIANT == "cuda" else "cpu"


class Lengths(Dataset):
    def __init__(self, count=40):
        self.lengths = [20 + 37 * index % 80 for index in range(count)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.randn(self.lengths[index], 16)


class Stream(IterableDataset):
    """Gives whole batches of one to eight examples, or, as `stream`, single examples."""

    def __iter__(self):
        examples = Lengths()
        first = 0
        while first < len(examples):
            count = 1 if VARIANT == "stream" else 1 + first % 8
            rows = range(first, min(first + count, len(examples)))
            batch = collate([examples[index] for index in rows])
            yield batch[0] if VARIANT == "stream" else batch
            first += count


def collate(examples):
    if VARIANT == "packed":
        positions = [torch.arange(len(example)) for example in examples]
        return {"x": torch.cat(examples)[None], "position_ids": torch.cat(positions)}
    return pad_sequence(examples, batch_first=True)


def loss_of(model, batch):
    if VARIANT == "packed":
        batch = batch["x"]
    if len(batch) > FAILS_ABOVE:
        if VARIANT in ("oom", "swallowed"):
            torch.empty(1 << 42)
        if VARIANT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if VARIANT == "bug":
            raise KeyError("no such speaker")
        if VARIANT == "ends":
            sys.exit(0)
    loss = model(batch.to(DEVICE)).square().mean()
    return loss * float("nan") if VARIANT == "not finite" else loss


def main():
    if VARIANT == "arguments":
        sys.exit("usage: small_script.py --data FOLDER")
    if VARIANT == "input":
        input("Go on? ")
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
        multiprocessing_context="spawn" if VARIANT == "spawn" else None,
    )
    if VARIANT == "stream":
        loader = DataLoader(Stream(), 4, collate_fn=collate)
    if VARIANT == "whole batches":
        loader = DataLoader(Stream(), batch_size=None)
    other = DataLoader(Lengths(30), 4, collate_fn=collate)
    if VARIANT == "no loader":
        sys.modules["nvidia.dali"] = sys
        return
    for _ in loader:  # statistics of the features
        pass
    for _ in range(3):
        batches = zip(loader, other, strict=False) if VARIANT == "two" else loader
        for batch in batches:
            batch = batch[0] if VARIANT == "two" else batch
            optimizer.zero_grad()
            try:
                loss_of(model, batch).backward()
            except RuntimeError:
                if VARIANT != "swallowed":
                    raise
                continue
            if VARIANT != "no step":
                optimizer.step()
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
