"""Random examples from half of a length to that length, and the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from batchtune.workloads.loading import load_object

Example = dict[str, Tensor]

_COUNT = 400
# Has no factor of _COUNT: the length of a target says nothing about that of its example.
_STRIDE = 37


class RandomExamples(Dataset[Example]):
    """What `make(length, target_length)` returns."""

    def __init__(
        self, make: Callable[[int, int], Example], length: int, target_length: int
    ) -> None:
        self._make = make
        self._length = length
        self._target_length = target_length

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> Example:
        return self._make(
            _size(self._length, index),
            _size(self._target_length, index * _STRIDE % _COUNT),
        )


def _size(longest: int, index: int) -> int:
    return longest - index * longest // (2 * _COUNT)


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
