"""Trains a torch model on random examples in a plain loop, for `--workload torch:FILE.py:NAME --loss LOSS`.

Run by itself: `python -m batchtune.scripts.named.torch_script FILE.py NAME loss=mse steps=2 …`. Options:

    loss            cross_entropy (outputs `[B, ..., classes]`), mse, ctc (outputs `[B, time, classes]`), or a function
                    of the file, loss(outputs, inputs)
    length          of the longest example
    features        inputs are frames of so many features, `[B, L, features]`; without, tokens `[B, L]`
    vocab           tokens are below (default: 100)
    target_length   of the longest target of ctc (default: 32)
    bf16            true: with autocast
    accumulation    batches of an optimizer step (default: 1)
    steps           to end after (default: an epoch)
    others          arguments of the model
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from batchtune.scripts.named.examples import Example, RandomExamples, build, pad
from batchtune.workloads import parse_options
from batchtune.workloads.loading import load_object


def cross_entropy(outputs: Tensor, batch: Example) -> Tensor:
    """Return the loss of outputs `[B, ..., classes]`."""
    scores = outputs.flatten(0, -2)
    targets = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, targets)


def mse(outputs: Tensor, batch: Example) -> Tensor:
    """Return the loss of outputs of any shape."""
    return F.mse_loss(outputs, torch.zeros_like(outputs))


def ctc(outputs: Tensor, batch: Example) -> Tensor:
    """Return the loss of outputs `[B, time, classes]`; class 0 is the blank."""
    labels = batch["labels"]
    return F.ctc_loss(
        outputs.log_softmax(-1, dtype=torch.float32).transpose(0, 1),
        labels.clamp(1),
        torch.full([len(outputs)], outputs.shape[1]),
        (labels > 0).sum(1).cpu(),
        zero_infinity=True,
    )


LOSSES = {"cross_entropy": cross_entropy, "mse": mse, "ctc": ctc}


def loss_in(file: str, name: str) -> Callable[[Tensor, Example], Tensor]:
    """Return a loss of outputs and batches: one of these, or the user's own."""
    if name in LOSSES:
        return LOSSES[name]
    function = load_object(file, name)
    return lambda outputs, batch: function(outputs, batch["inputs"])


def examples(options: dict[str, Any]) -> RandomExamples:
    """Return random examples, and take their options out of those of the model."""
    vocabulary = options.pop("vocab", 100)
    features = options.pop("features", None)
    has_targets = options["loss"] == "ctc"

    def make(length: int, target_length: int) -> Example:
        inputs = torch.randint(vocabulary, (length,))
        if features is not None:
            inputs = torch.randn(length, features)
        if not has_targets:
            return {"inputs": inputs}
        return {"inputs": inputs, "labels": torch.ones(target_length, dtype=torch.long)}

    return RandomExamples(
        make, options.pop("length", 100), options.pop("target_length", 32)
    )


def train(file: str, name: str, options: dict[str, Any]) -> None:
    """Train with AdamW."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(examples(options), batch_size=2, collate_fn=pad)
    loss_of = loss_in(file, options.pop("loss"))
    bf16 = options.pop("bf16", False)
    accumulation = options.pop("accumulation", 1)
    batches = accumulation * options.pop("steps", len(loader))
    model = build(file, name, options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def backward(batch: Example) -> None:
        batch = {key: value.to(device) for key, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(model(batch["inputs"]), batch)
        loss.backward()  # type: ignore[no-untyped-call]

    for number, batch in enumerate(itertools.islice(loader, batches), 1):
        backward(batch)
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], parse_options(sys.argv[3:]))
