"""Trains a torch model on random examples in a plain loop, for `--workload torch:FILE.py:NAME --loss LOSS`.

Run by itself: `python -m batchtune.scripts.named.torch_script FILE.py NAME loss=mse …`. Options:

    loss        cross_entropy (outputs `[B, ..., classes]`), mse, or a function of the file, loss(outputs, inputs)
    features    inputs are frames of so many features, `[B, L, features]`; without, tokens `[B, L]`
    vocab       tokens are below (default: 100)
    length      of the longest example (default: 100)
    bf16        true: with autocast
    others      arguments of the model
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from batchtune.scripts.named.examples import Example, build, examples, pad
from batchtune.workloads import parse_options
from batchtune.workloads.loading import load_object


def cross_entropy(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return the loss of outputs `[B, ..., classes]`."""
    scores = outputs.flatten(0, -2)
    targets = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, targets)


def mse(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return the loss of outputs of any shape."""
    return F.mse_loss(outputs, torch.zeros_like(outputs))


LOSSES = {"cross_entropy": cross_entropy, "mse": mse}


def train(file: str, name: str, options: dict[str, Any]) -> None:
    """Train with AdamW for an epoch."""
    loss_name = options.pop("loss")
    loss_of = LOSSES.get(loss_name) or load_object(file, loss_name)
    features = options.pop("features", None)
    vocabulary = options.pop("vocab", 100)

    def make(length: int, target_length: int) -> Example:
        if features is None:
            return {"inputs": torch.randint(vocabulary, (length,))}
        return {"inputs": torch.randn(length, features)}

    loader: DataLoader[Example] = DataLoader(
        examples(make, options), batch_size=2, collate_fn=pad
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = options.pop("bf16", False)
    model = build(file, name, options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        inputs = batch["inputs"].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], parse_options(sys.argv[3:]))
