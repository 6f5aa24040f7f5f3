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
from real_packers import (
    axolotl_multipack,
    slime_schedule,
    trl_data_utils,
    verl_balancing,
)

from batchtune.packing.twins import (
    axolotl_batches,
    axolotl_epoch_length,
    slime_steps,
    trl_bfd,
    verl_micro_batches,
)

MANY = pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(100), id="100 cases"),
        pytest.param(range(100, 1100), id="1,000 cases", marks=pytest.mark.slow),
    ],
)


def lengths_of(name: str, max_tokens: int) -> list[int]:
    """A public data set, shuffled and cut at the cap."""
    data = folder()
    if data is None:
        pytest.skip("the public lengths are not here")
    lengths = np.minimum(SETS[name](data), max_tokens)
    return np.random.default_rng(0).permutation(lengths).tolist()


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


@MANY
def test_verl_makes_the_same_micro_batches(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        made = random.Random(seed)
        cap = made.choice([20, 100, 8192])
        ranks = made.randint(1, 3)
        lengths = [made_up(made, 40, cap) for _ in range(ranks)]
        at_least = made.choice([None, None, 3])
        multiple = made.choice([None, None, 2, 4])
        arguments = (lengths, cap, at_least, multiple)
        assert real_verl(*arguments, monkeypatch) == our_verl(*arguments), arguments


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_verl_on_public_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lengths_of(name, 8192)
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


@MANY
def test_axolotl_makes_the_same_batches(seeds: range) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_axolotl_on_public_lengths(name: str) -> None:
    lengths = lengths_of(name, 4096)[:10_000]
    options = {
        "max_tokens": 4096,
        "bin_size": 200,
        "batch_size": 2,
        "group_size": 100_000,
        "drop_last": True,
    }
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


@MANY
def test_trl_packs_the_same_rows(seeds: range) -> None:
    for seed in seeds:
        made = random.Random(seed)
        cap = made.choice([2, 20, 100])
        lengths = made_up(made, 60, cap + 5)
        real = trl_data_utils()._pack_bfd(table_of(lengths), cap)
        assert examples_of(real.to_pydict()) == trl_bfd(lengths, cap), lengths


def test_trl_packs_every_1000_rows_and_leaves_out_empty_ones() -> None:
    made = random.Random(1)
    lengths = [made.randint(1, 60) for _ in range(2400)]
    lengths[700:700] = [0, 0]
    assert real_trl(lengths, 50) == trl_bfd(lengths, 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_trl_on_public_lengths(name: str) -> None:
    # In units of 8 tokens, as the real one is given all tokens.
    lengths = [-(-length // 8) for length in lengths_of(name, 8192)[:10_000]]
    assert real_trl(lengths, 1024) == trl_bfd(lengths, 1024)


# slime


MODEL = SimpleNamespace(
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=128,
    num_layers=2,
    vocab_size=100,
    padded_vocab_size=100,
    num_experts=None,
    multi_latent_attention=False,
    q_lora_rank=None,
    kv_lora_rank=None,
    moe_layer_freq=None,
    moe_router_topk=None,
    moe_ffn_hidden_size=None,
    moe_shared_expert_intermediate_size=None,
    micro_batch_size=None,
    use_dynamic_batch_size=True,
    balance_by_flops=False,
)


def real_slime(
    lengths: list[int], cap: int, options: dict[str, Any], balance: bool
) -> Any:
    module = slime_schedule()
    arguments = SimpleNamespace(
        **{**vars(MODEL), "max_tokens_per_gpu": cap, "balance_data": balance}
    )
    parallel = {
        "dp_size": options["world_size"],
        "cp_size": 1,
        "vpp_size": 2,
        "microbatch_group_size_per_vp_stage": options["multiple"],
    }
    try:
        partitions, indices, counts, _ = module.build_dp_schedule(
            arguments,
            parallel,
            lengths,
            global_batch_size=options["global_batch_size"],
            rollout_indices=list(range(len(lengths))),
        )
    except AssertionError:
        return None
    steps = []
    first = 0
    for count in counts:
        of_ranks = zip(partitions, indices, strict=True)
        steps.append(
            [
                [[part[place] for place in batch] for batch in batches[first:][:count]]
                for part, batches in of_ranks
            ]
        )
        first += count
    return steps


def our_slime(
    lengths: list[int], cap: int, options: dict[str, Any], balance: bool
) -> Any:
    work = None
    if balance:
        of_one = slime_schedule()._calculate_workloads
        work = of_one(lengths, MODEL)
    try:
        steps = slime_steps(lengths, cap, **options, work=work)
    except ValueError:
        return None
    return steps or None


@MANY
def test_slime_makes_the_same_schedule(seeds: range) -> None:
    for seed in seeds:
        made = random.Random(seed)
        cap = made.choice([20, 100, 8192])
        lengths = made_up(made, 80, cap)
        if made.random() < 0.2:
            lengths.append(cap + 1)
        options = {
            "world_size": made.choice([1, 2, 4]),
            "global_batch_size": made.choice([8, 16, 30]),
            "multiple": made.choice([1, 2]),
        }
        arguments = (lengths, cap, options, made.random() < 0.5)
        assert real_slime(*arguments) == our_slime(*arguments), arguments


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("balance", [False, True])
def test_slime_on_public_lengths(name: str, balance: bool) -> None:
    lengths = lengths_of(name, 8192)[:8192]
    options = {"world_size": 8, "global_batch_size": 512, "multiple": 1}
    arguments = (lengths, 8192, options, balance)
    assert real_slime(*arguments) == our_slime(*arguments)
