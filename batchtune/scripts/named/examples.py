"""Random examples of different lengths, and the user's model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from batchtune.workloads.loading import load_object

Example = dict[str, Tensor]

_COUNT = 200


def examples(make: Callable[[int, int], Example], options: dict[str, Any]) -> Any:
    """Return a data set of what `make(length, target_length)` returns, from half of the longest lengths to these.

    Takes these, `length` (default: 100) and `target_length` (default: 16), out of the options.
    """
    length = options.pop("length", 100)
    target_length = options.pop("target_length", 16)
    draw = random.Random(0).randint
    return [
        make(
            draw(length // 2, length),
            draw(target_length // 2, target_length),
        )
        for _ in range(_COUNT)
    ]


def pad(examples: Sequence[Example]) -> Example:
    """Return a batch, its parts padded to the longest: `[B, L, ...]`; labels with -100, which losses leave out."""
    batch = {}
    for name in examples[0]:
        values = [example[name] for example in examples]
        padding = -100 if name == "labels" else 0
        batch[name] = pad_sequence(values, batch_first=True, padding_value=padding)
    return batch


def build(file: str, name: str, options: Mapping[str, Any]) -> Any:
    """Return the Module that a file holds, or that its class or function makes with these options."""
    model = load_object(file, name)
    if isinstance(model, torch.nn.Module):
        return model
    return model(**options)
