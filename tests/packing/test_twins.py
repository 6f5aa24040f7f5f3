"""The twins of other trainers' packers, list for list against the real ones."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from public_lengths import SETS, folder
from real_packers import axolotl_multipack, trl_data_utils, verl_balancing

from batchtune.packing.twins import (
    axolotl_batches,
    axolotl_epoch_length,
    slime_steps,
    trl_bfd,
    verl_micro_batches,
)

FEW = range(100)
MANY = range(100, 1100)


def public_lengths(max_tokens: int) -> list[list[int]]:
    """The public data sets, shuffled and cut at the cap."""
    data = folder()
    if data is None:
        pytest.skip("the public lengths are not here")
    shuffle = np.random.default_rng(0).permutation
    return [
        shuffle(np.minimum(read(data), max_tokens)).tolist() for read in SETS.values()
    ]


def made_up(random_: random.Random, most: int, cap: int) -> list[int]:
    """Lengths with many equal ones, few, or a long tail."""
    longest = random_.choice([3, 20, cap])
    count = random_.randint(1, most)
    if random_.random() < 0.5:
        return [random_.randint(1, min(longest, cap)) for _ in range(count)]
    return [min(cap, 1 + int(random_.lognormvariate(2, 1.5))) for _ in range(count)]


# verl


class MadeProcesses:
    """torch.distributed for ranks that are threads."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.given: list[torch.Tensor] = []

    def is_initialized(self) -> bool:
        return True

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        if self.barrier.wait() == 0:
            self.given.clear()
        self.barrier.wait()
        self.given.append(tensor.clone())
        self.barrier.wait()
        values = torch.stack(self.given)
        reduced = values.amax(0) if op == self.ReduceOp.MAX else values.amin(0)
        self.barrier.wait()
        tensor.copy_(reduced)


def real_verl(
    lengths_of_ranks: list[list[int]],
    max_tokens: int,
    at_least: int | None,
    multiple: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    module = verl_balancing()
    ranks = len(lengths_of_ranks)
    monkeypatch.setattr(module, "dist", MadeProcesses(ranks))

    def of_rank(lengths: list[int]) -> Any:
        offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
        input_ids = SimpleNamespace(is_nested=True, offsets=lambda: offsets)
        try:
            return module.rearrange_micro_batches(
                {"input_ids": input_ids},
                max_tokens,
                dp_group=object(),
                num_batches_divided_by=multiple,
                min_num_micro_batch=at_least,
            )[1]
        except ValueError:
            return None

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, lengths_of_ranks))


def our_verl(
    lengths_of_ranks: list[list[int]],
    max_tokens: int,
    at_least: int | None,
    multiple: int | None,
) -> Any:
    try:
        return verl_micro_batches(
            lengths_of_ranks,
            max_tokens,
            at_least=at_least or 1,
            multiple=multiple or 1,
        )
    except ValueError:
        return [None] * len(lengths_of_ranks)


def assert_verl_agrees(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        made = random.Random(seed)
        cap = made.choice([20, 100, 8192])
        ranks = made.randint(1, 3)
        lengths = [made_up(made, 40, cap) for _ in range(ranks)]
        at_least = made.choice([None, None, 3])
        multiple = made.choice([None, None, 2, 4])
        arguments = (lengths, cap, at_least, multiple)
        assert real_verl(*arguments, monkeypatch) == our_verl(*arguments), arguments


def test_verl_makes_the_same_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_verl_agrees(FEW, monkeypatch)


@pytest.mark.slow
def test_verl_on_many_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_verl_agrees(MANY, monkeypatch)
    for lengths in public_lengths(8192):
        for first in range(0, min(len(lengths), 8192) // 512 * 512, 512):
            ranks = [lengths[first + rank : first + 512 : 4] for rank in range(4)]
            arguments = (ranks, 8192, None, None)
            assert real_verl(*arguments, monkeypatch) == our_verl(*arguments)


def test_verl_exceeded_the_cap_before_it_was_kept() -> None:
    lengths = [[6, 6, 6]]
    assert verl_micro_batches(lengths, 9, keeps_cap=False) == [[[0, 1], [2]]]
    assert verl_micro_batches(lengths, 9) == [[[0], [2], [1]]]


# axolotl


def real_axolotl(lengths: list[int], order: list[int], options: dict[str, Any]) -> Any:
    sampler = axolotl_multipack().MultipackBatchSampler(
        order,
        batch_size=options["batch_size"],
        batch_max_len=options["max_tokens"],
        lengths=np.array(lengths),
        bin_size=options["bin_size"],
        group_size=options["group_size"],
        drop_last=options["drop_last"],
    )
    return [
        [[int(index) for index in held] for held in batch]
        for batch in sampler.generate_batches()
    ]


def assert_axolotl_agrees(seeds: range) -> None:
    for seed in seeds:
        made = random.Random(seed)
        cap = made.choice([20, 100, 8192])
        lengths = made_up(made, 60, cap)
        if made.random() < 0.3:
            lengths += [0, cap + 1]
        order = made.sample(range(len(lengths)), len(lengths))
        options = {
            "max_tokens": cap,
            "bin_size": made.choice([1, 3, 200]),
            "batch_size": made.choice([1, 2, 3]),
            "group_size": made.choice([10, 100_000]),
            "drop_last": made.random() < 0.5,
        }
        real = real_axolotl(lengths, order, options)
        assert real == axolotl_batches(lengths, order, **options), options


def test_axolotl_makes_the_same_batches() -> None:
    assert_axolotl_agrees(FEW)


@pytest.mark.slow
def test_axolotl_on_many_cases() -> None:
    assert_axolotl_agrees(MANY)
    options = {
        "max_tokens": 4096,
        "bin_size": 200,
        "batch_size": 2,
        "group_size": 100_000,
        "drop_last": True,
    }
    for every in public_lengths(4096):
        lengths = every[:10_000]
        order = list(range(len(lengths)))
        real = real_axolotl(lengths, order, options)
        assert real == axolotl_batches(lengths, order, **options)


def test_an_epoch_of_axolotl_is_the_shortest_of_four() -> None:
    made = random.Random(0)
    lengths = made_up(made, 300, 8192)
    drawn: list[list[int]] = []

    class Shuffled:
        def __iter__(self) -> Any:
            drawn.append(made.sample(range(len(lengths)), len(lengths)))
            return iter(drawn[-1])

    sampler = axolotl_multipack().MultipackBatchSampler(
        Shuffled(), 1, 50, np.array(lengths), 4, drop_last=True
    )
    length = len(sampler)
    counts = [
        len(axolotl_batches(lengths, order, 50, bin_size=4)) for order in drawn[-4:]
    ]
    assert length == axolotl_epoch_length(counts)


# TRL


def table_of(lengths: list[int]) -> pa.Table:
    """A column of tokens, each its example's number."""
    tokens = [[example] * length for example, length in enumerate(lengths)]
    return pa.table({"input_ids": pa.array(tokens, type=pa.list_(pa.int32()))})


def examples_of(packed: dict[str, Any]) -> list[list[int]]:
    """The examples that each packed row holds."""
    return [
        [held[place] for place in np.cumsum([0, *sizes])[:-1]]
        for held, sizes in zip(packed["input_ids"], packed["seq_lengths"], strict=True)
    ]


def real_trl(lengths: list[int], max_tokens: int) -> Any:
    from datasets import Dataset

    data = Dataset(table_of(lengths))
    packed = trl_data_utils().pack_dataset(data, max_tokens, "bfd").with_format(None)
    return examples_of(packed[:])


def assert_trl_agrees(seeds: range) -> None:
    for seed in seeds:
        made = random.Random(seed)
        cap = made.choice([2, 20, 100])
        lengths = made_up(made, 60, cap + 5)
        real = trl_data_utils()._pack_bfd(table_of(lengths), cap)
        assert examples_of(real.to_pydict()) == trl_bfd(lengths, cap), lengths


def test_trl_packs_the_same_rows() -> None:
    assert_trl_agrees(FEW)


def test_trl_packs_every_1000_rows_and_leaves_out_empty_ones() -> None:
    made = random.Random(1)
    lengths = [made.randint(1, 60) for _ in range(2400)]
    lengths[700:700] = [0, 0]
    assert real_trl(lengths, 50) == trl_bfd(lengths, 50)


@pytest.mark.slow
def test_trl_on_many_cases() -> None:
    assert_trl_agrees(MANY)
    for every in public_lengths(8192):
        # In units of 8 tokens, as the real one is given all tokens.
        lengths = [-(-length // 8) for length in every[:10_000]]
        assert real_trl(lengths, 1024) == trl_bfd(lengths, 1024)


# slime, whose files no package registry has: its schedules were recorded at 624b824a.


SLIME_LENGTHS = [50, 54, 6, 34, 66, 63, 52, 39, 62, 46, 75, 28, 65]
SLIME_LENGTHS += [18, 37, 18, 13, 80, 120, 9, 18, 20, 5, 10, 4]


@pytest.mark.parametrize(
    ("world_size", "global_batch_size", "multiple", "steps"),
    [
        (
            2,
            12,
            1,
            [
                [[[0, 2, 3], [4, 11], [6], [10]], [[1, 7], [5], [8], [9]]],
                [[[12, 13, 16], [17, 21]], [[14, 15, 19, 20, 22, 23], [18]]],
            ],
        ),
        (
            1,
            20,
            4,
            [
                [
                    [
                        [0, 2, 3, 19],
                        *([1, 7], [4, 11], [5], [6, 9], [8], [10, 16], [12]),
                        *([17], [18], [14], [13, 15]),
                    ]
                ]
            ],
        ),
    ],
)
def test_slime_makes_the_recorded_schedule(
    world_size: int, global_batch_size: int, multiple: int, steps: Any
) -> None:
    found = slime_steps(
        SLIME_LENGTHS,
        100,
        world_size=world_size,
        global_batch_size=global_batch_size,
        multiple=multiple,
    )
    assert found == steps


def test_slime_balances_the_work_of_ranks_as_recorded() -> None:
    # Of a model with a hidden size of 64, by slime's calculate_fwd_flops.
    work = [11498240, 2967552, 6279936, 2967552, 2126592, 14458880, 22917120, 1463040]
    found = slime_steps(
        SLIME_LENGTHS[12:20],
        100,
        world_size=2,
        global_batch_size=8,
        multiple=2,
        work=work,
    )
    assert found == [[[[2, 3, 7], [6]], [[0, 1, 4], [5]]]]


def test_a_step_of_slime_needs_a_sequence_for_each_rank() -> None:
    with pytest.raises(ValueError, match="3 sequences, but its ranks need 4"):
        slime_steps([50, 54, 6], 100, world_size=4, global_batch_size=3)
