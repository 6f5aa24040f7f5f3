"""A training script such as users have. Prints what it trains on: a JSON list for each batch."""

import argparse
import json
import os

import torch
from frames import Rows, collate
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accelerate", action="store_true")
asked = parser.parse_args()
if "RANK" not in os.environ:
    import uncompiled  # noqa: F401


def say(what, epoch, numbers):
    line = [what, int(os.environ.get("RANK", "0")), epoch, numbers]
    # At once: two ranks write to one pipe.
    os.write(1, f"{json.dumps(line)}\n".encode())


def indices(batch):
    return [int(index) for index in batch[:, 0]]


model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = Rows([10 + 70 * index % 230 for index in range(60)])
loader = DataLoader(
    data,
    batch_size=4,
    collate_fn=collate,
    num_workers=asked.workers,
)
validation = DataLoader(Rows(range(10, 20)), batch_size=4, collate_fn=collate)
if asked.accelerate:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    say("before", 0, [len(loader)])
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
say("length", 0, [len(loader), len(validation)])
for epoch in range(2):
    for batch in loader:
        say("train", epoch, indices(batch))
        loss = model(batch.unsqueeze(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for batch in validation:
            say("validate", epoch, indices(batch))
