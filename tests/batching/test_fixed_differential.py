from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from batchtune.batching.fixed import fixed_batches, length_order

COUNTS = st.integers(0, 70)
SIZES = st.integers(1, 80)


def seeded(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


@given(COUNTS, SIZES, st.booleans())
@settings(deadline=None, max_examples=200)
def test_examples_as_they_are_make_the_batches_of_torch(count: int, batch_size: int, drop_last: bool) -> None:
    wanted = list(BatchSampler(SequentialSampler(range(count)), batch_size, drop_last))
    found = fixed_batches(count, batch_size, drop_last=drop_last)
    assert list(found) == wanted
    assert found.buckets.tolist() == [0] * len(wanted)


@given(st.lists(st.integers(0, 99), max_size=70), SIZES, st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_order_makes_the_batches_of_torch(order: list[int], batch_size: int, drop_last: bool) -> None:
    assert list(fixed_batches(order, batch_size, drop_last=drop_last)) == list(
        BatchSampler(order, batch_size, drop_last)
    )


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=70), SIZES, st.booleans())
@settings(deadline=None, max_examples=200)
def test_the_order_by_length_is_that_of_python(values: list[float], batch_size: int, descending: bool) -> None:
    order = sorted(range(len(values)), key=values.__getitem__, reverse=descending)
    assert length_order(values, descending=descending).tolist() == order
    assert list(fixed_batches(length_order(values, descending=descending), batch_size)) == list(
        BatchSampler(order, batch_size, False)
    )


@given(st.integers(1, 70), SIZES, st.booleans(), st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_a_shuffling_data_loader_draws_as_documented(count: int, batch_size: int, drop_last: bool, seed: int) -> None:
    loader: Any = DataLoader(
        range(count),  # type: ignore[arg-type]  # a range is a data set, only not by name
        batch_size=batch_size,
        shuffle=True,
        drop_last=drop_last,
        generator=seeded(seed),
        collate_fn=list,
    )
    ours = seeded(seed)
    for _ in range(3):
        torch.empty((), dtype=torch.int64).random_(generator=ours)
        order = torch.randperm(count, generator=ours).numpy()
        torch.randperm(count, generator=ours)
        assert list(fixed_batches(order, batch_size, drop_last=drop_last)) == list(loader)


def test_a_random_sampler_alone_draws_as_documented() -> None:
    sampler = BatchSampler(RandomSampler(range(50), generator=seeded(4)), 8, False)
    ours = seeded(4)
    for _ in range(3):
        order = torch.randperm(50, generator=ours).numpy()
        torch.randperm(50, generator=ours)
        assert list(fixed_batches(order, 8)) == list(sampler)


def test_a_shuffling_data_loader_without_a_generator_draws_as_documented() -> None:
    loader: Any = DataLoader(range(50), batch_size=8, shuffle=True, collate_fn=list)  # type: ignore[arg-type]  # as above
    with torch.random.fork_rng():
        torch.manual_seed(4)
        wanted = [list(loader) for _ in range(3)]
        torch.manual_seed(4)
        for batches in wanted:
            torch.empty((), dtype=torch.int64).random_()
            seed = int(torch.empty((), dtype=torch.int64).random_())
            order = torch.randperm(50, generator=seeded(seed)).numpy()
            assert list(fixed_batches(order, 8)) == batches


def test_a_batch_size_beyond_all_integers_makes_one_batch() -> None:
    assert list(fixed_batches(3, 10**30)) == [[0, 1, 2]]
    assert list(fixed_batches(3, 10**30, drop_last=True)) == []


@pytest.mark.parametrize(
    ("count_or_order", "batch_size", "message"),
    [
        (3, 0, "batch_size must be at least 1"),
        (-1, 2, "must not be negative"),
        (2.5, 2, "a number of examples"),
        ([[1, 2]], 2, "one-dimensional"),
    ],
)
def test_wrong_arguments_are_refused(count_or_order: Any, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fixed_batches(count_or_order, batch_size)


def test_an_order_of_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="one-dimensional"):
        length_order(np.ones((2, 2)))
