"""What any batch is: how many examples, how long, how many bytes, in words, and bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchtune.loaders.worker import digests_of, facts_of, leaves, moved, words_of


class Padded(NamedTuple):
    data: torch.Tensor
    lengths: torch.Tensor


@dataclass
class Speech:
    wav: torch.Tensor
    text: list[str]


class Thing:
    def __init__(self):
        self.wav, self._hidden, self.name = torch.ones(3, 40), torch.ones(99), "thing"
        self.itself = self


@pytest.mark.parametrize(
    ("batch", "examples", "total"),
    [
        (torch.ones(4, 100), 4, 400),
        (np.ones((4, 100, 80)), 4, 400),
        (
            [torch.ones(4, 1, 300), torch.zeros(4, dtype=torch.long)],
            4,
            1200,
        ),  # with channels, and labels
        (
            {"x": torch.ones(100, 4, 80), "n": torch.tensor([100, 50, 50, 50])},
            4,
            400,
        ),  # time first
        (Speech(torch.ones(3, 40), ["a", "b", "c"]), 3, 120),
        (Thing(), 3, 120),
        ([{"x": torch.ones(5, 2)}, {"x": torch.ones(9, 2)}], 2, 18),
        (["a", "b"], 2, None),
        (torch.zeros(8), 8, None),
        ("text", None, None),
        (7, None, None),
        ({}, None, None),
    ],
)
def test_facts(batch, examples, total):
    facts = facts_of(batch)
    assert (facts.examples, facts.total_length) == (examples, total)


@pytest.mark.parametrize(
    ("batch", "examples"),
    [(torch.ones(700, 80), 8), (torch.ones(5, 70), 5), ("text", 8)],
)
def test_a_batch_holds_no_more_examples_than_were_requested(batch, examples):
    assert facts_of(batch, 8).examples == examples


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.ones(32, 1600), "32 × 1600"),
        ({"id": ["a"] * 4, "wav": torch.ones(4, 9), "n": torch.ones(4)}, "4 × 9 (wav)"),
        ("text", "a str without tensors"),
        ({"loss": torch.tensor(1.0)}, "a number (loss)"),
    ],
)
def test_words(batch, words):
    assert words_of(batch) == words


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
]


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_digests_are_equal_only_if_all_bits_are(values, dtype, data):
    one = torch.tensor(values).to(dtype)
    assert digests_of({"x": one}) == digests_of({"x": one.clone()})
    other = one.clone()
    place = data.draw(st.integers(0, len(values) - 1))
    other[place] = 1 - values[place]
    assert digests_of(one) != digests_of(other)
    assert digests_of(one) != digests_of(one.unsqueeze(0))
    assert digests_of(one) != digests_of(one.to(torch.complex128))


def test_digests_of_other_values():
    assert digests_of({"id": ["a", "b"]}) != digests_of({"id": ["b", "a"]})
    assert digests_of(torch.ones(4, 4).T) == digests_of(torch.ones(4, 4))
    assert digests_of(torch.tensor(0.0)) != digests_of(torch.tensor(-0.0))


def test_a_batch_is_moved_with_its_structure():
    batch = {"pair": Padded(torch.ones(2), torch.ones(2)), "list": [torch.ones(1), "a"]}
    there = moved(batch, "meta", non_blocking=True)
    assert isinstance(there["pair"], Padded)
    assert {
        str(value.device)
        for _, value in leaves(there)
        if isinstance(value, torch.Tensor)
    } == {"meta"}
    assert there["list"][1] == "a"
