"""A script that trains on several ranks: `torchrun ranked_script.py [FAULT]`; only rank 1 has the fault.

With `--accelerate` that library trains it.
"""

import argparse
import contextlib
import time

import torch
from frames import Lengths, collate, layers
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("fault", nargs="?", default="")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accelerate", action="store_true")
OPTIONS = parser.parse_args()
FAILS_ABOVE = 200  # examples


def fail():
    """Have the fault."""
    match OPTIONS.fault:
        case "caught":
            torch.empty(1 << 42)
        case "hangs":
            time.sleep(1000)


class Model(torch.nn.Module):
    """Two layers, which fail on rank 1 in a large batch."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, batch):
        """Return the loss."""
        if len(batch) > FAILS_ABOVE and distributed.get_rank() == 1:
            fail()
        return self.layers(batch).square().mean()


def train_plainly(loader, model):
    """Train in a loop of one's own."""
    distributed.init_process_group("gloo")
    sampler = DistributedSampler(loader.dataset, shuffle=True)
    loader = DataLoader(
        loader.dataset,
        4,
        sampler=sampler,
        collate_fn=collate,
        num_workers=OPTIONS.workers,
        persistent_workers=OPTIONS.workers > 0,
    )
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            if (index + 1) % OPTIONS.accumulate:
                with parallel.no_sync():
                    parallel(batch).backward()
                continue
            parallel(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def train_with_accelerate(loader, model):
    """Train with accelerate, which gets one batch ahead."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=OPTIONS.accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    for _ in range(4):
        for batch in loader:
            with (
                contextlib.suppress(RuntimeError if OPTIONS.fault == "caught" else ()),
                accelerator.accumulate(model),
            ):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = DataLoader(
        Lengths(400), 4, shuffle=True, collate_fn=collate, num_workers=OPTIONS.workers
    )
    if OPTIONS.accelerate:
        train_with_accelerate(data, Model())
    else:
        train_plainly(data, Model())
