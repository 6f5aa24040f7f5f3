"""Packing: the cap, the packers' rules, ranks, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchtune
from batchtune import TimeLaw
from batchtune.buckets.micro_batches import row_of, simulated_row
from batchtune.epochs import RankSplit
from batchtune.packing import DENSE_7B, PACKERS, Budget, Packed, dealt, karmarkar_karp
from batchtune.results import BatchShape

CAP = 40
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=80)
LAW = TimeLaw(
    seconds_per_token=1.0,
    seconds_per_squared_token=0.1,
    seconds_per_sequence=2.0,
    seconds_per_batch=30.0,
)
PACKER = pytest.mark.parametrize("packer", PACKERS)


def first_fit_in_order(lengths):
    """By the definition: each length goes into the first batch with room."""
    batches = []
    for length in lengths:
        fitting = (batch for batch in batches if sum(batch) + length <= CAP)
        batch = next(fitting, None)
        if batch is None:
            batches.append([length])
        else:
            batch.append(length)
    return batches


def best_fit_in_order(lengths):
    """By the definition: each length goes into the fullest batch with room, of several the one last changed first."""
    batches = []
    changed = []
    for time, length in enumerate(lengths):
        fitting = [
            (-sum(batch), changed[place], place)
            for place, batch in enumerate(batches)
            if sum(batch) + length <= CAP
        ]
        if fitting:
            place = min(fitting)[-1]
            batches[place].append(length)
            changed[place] = time
        else:
            batches.append([length])
            changed.append(time)
    return batches


def lengths_in(batches, lengths):
    return [[lengths[index] for index in batch] for batch in batches]


# Packers.


@PACKER
@given(lengths=LENGTHS, world_size=st.integers(1, 5), accumulate=st.integers(1, 3))
def test_no_batch_exceeds_the_cap_and_ranks_have_equally_many(
    packer, lengths, world_size, accumulate
):
    multiple = world_size * accumulate
    dealing = {"world_size": world_size, "accumulate": accumulate}
    try:
        batches = batchtune.pack(lengths, CAP, packer=packer, **dealing)
    except ValueError as error:
        assert "can't be dealt evenly" in str(error)
        fewest = len(batchtune.pack(lengths, CAP, packer=packer))
        assert -(-fewest // multiple) * multiple > len(lengths)
        return
    assert len(batches) % multiple == 0
    found = [index for batch in batches for index in batch]
    assert sorted(found) == list(range(len(lengths)))
    assert all(0 < sum(batch) <= CAP for batch in lengths_in(batches, lengths))


@given(LENGTHS)
def test_first_fit_and_best_fit_are_those_by_definition(lengths):
    descending = sorted(lengths, reverse=True)
    tokens = np.array(descending)
    for packer, defined in (
        ("first-fit", first_fit_in_order),
        ("best-fit", best_fit_in_order),
    ):
        owners = PACKERS[packer](tokens, tokens.astype(float), CAP, 1)
        packed = Packed.of_owners(np.arange(tokens.size), owners)
        assert lengths_in(list(packed.lists()), descending) == defined(descending)


@given(LENGTHS)
def test_even_takes_1_percent_more_than_the_bound_at_most(lengths):
    bound = -(-sum(lengths) // CAP)
    by_first_fit = len(batchtune.pack(lengths, CAP, packer="first-fit"))
    assert len(batchtune.pack(lengths, CAP)) <= max(by_first_fit, int(1.01 * bound))


@pytest.mark.parametrize("max_tokens", [8192, 131_072])
def test_even_evens_out_the_time_of_many_micro_batches(max_tokens):
    made = np.random.default_rng(0)
    lengths = np.clip(made.lognormal(6, 1, 20_000), 1, max_tokens).astype(int)
    bound = -(-int(lengths.sum()) // max_tokens)
    spreads = {}
    for packer in PACKERS:
        budget = Budget(max_tokens=max_tokens, packer=packer)
        packed = budget.packed(lengths)
        seconds = budget.seconds(packed, lengths)
        spreads[packer] = seconds.std() / seconds.mean()
        assert packed.count <= 1.01 * bound
    assert spreads["even"] < 0.8 * min(spreads["first-fit"], spreads["best-fit"])


def test_few_micro_batches_of_many_sequences_are_even():
    lengths = np.random.default_rng(0).integers(1, 100, 50_000)
    max_tokens = int(lengths.sum() * 0.51)
    totals = [
        int(lengths[batch].sum()) for batch in batchtune.pack(lengths, max_tokens)
    ]
    assert max(totals) - min(totals) < 100 and len(totals) == 2


# Ranks.


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_are_as_even_as_by_karmarkar_karp(seconds, world_size):
    seconds = seconds[: len(seconds) // world_size * world_size]
    if not seconds:
        return
    values = np.array(seconds, dtype=np.float64)
    order = dealt(values, world_size)
    assert sorted(order.tolist()) == list(range(values.size))
    of_ranks = values[order].reshape(-1, world_size).sum(axis=0)
    parts = karmarkar_karp(seconds, world_size)
    slowest = max(sum(seconds[index] for index in part) for part in parts)
    assert of_ranks.max() <= slowest


def test_many_micro_batches_are_dealt_evenly_too():
    seconds = np.random.default_rng(0).lognormal(0, 0.5, 80_000)
    of_ranks = seconds[dealt(seconds, 16)].reshape(-1, 16).sum(axis=0)
    assert of_ranks.max() < 1.001 * of_ranks.mean()


@pytest.mark.parametrize("max_tokens", [2048, 8192, 65_536])
@pytest.mark.parametrize("count", [64, 512])
def test_ranks_finish_together_whatever_the_budget(count, max_tokens):
    for seed in range(5):
        made = np.random.default_rng(seed)
        lengths = np.clip(made.lognormal(6.5, 1, count), 1, max_tokens).astype(int)
        work = DENSE_7B.of_sequences(lengths)
        batches = batchtune.pack(lengths, max_tokens, world_size=8, accumulate=2)
        assert all(lengths[batch].sum() <= max_tokens for batch in batches)
        seconds = np.array([work[batch].sum() for batch in batches])
        slowest = seconds.reshape(-1, 8).sum(axis=0).max()
        # No rank can be quicker than the longest sequence.
        assert slowest < 1.02 * max(work.sum() / 8, work.max())


# Figures.


def packed_lists(batches):
    return Packed(np.concatenate(batches), np.array([len(batch) for batch in batches]))


def row_of_lists(packed, lengths, budget, dealing, proofs=None):
    tokens = np.minimum(lengths, budget.cut_at or CAP * CAP * CAP)
    return row_of(packed, lengths, tokens, budget, dealing, proofs)


def test_figures_are_those_of_the_micro_batches():
    lengths = [30, 10, 50, 20, 5, 5]
    budget = Budget(max_tokens=40, cut_at=40, time_law=LAW)
    packed = packed_lists([[0, 1], [2], [3, 4], [5]])
    row = row_of_lists(packed, lengths, budget, RankSplit(world_size=2))
    seconds = [
        30 + 40 + 100 + 4,
        30 + 40 + 160 + 2,
        30 + 25 + 42.5 + 4,
        30 + 5 + 2.5 + 2,
    ]
    assert row.lower_bound == 3  # of 110 tokens, after the cut
    assert (row.over_cap, row.unproven) == (0, None)
    epoch_seconds = seconds[1] + seconds[2]
    assert row.estimated_epoch_seconds == pytest.approx(epoch_seconds)
    assert row.slowest_rank == pytest.approx(epoch_seconds / (sum(seconds) / 2))


def test_figures_count_what_exceeds_the_cap():
    budget = Budget(max_tokens=40)
    packed = packed_lists([[0, 1], [2]])
    row = row_of_lists(packed, [30, 11, 40], budget, RankSplit())
    assert (row.over_cap, row.largest_tokens) == (1, 41)
    # By FLOPs no time is known.
    assert row.estimated_epoch_seconds is None


def test_micro_batches_that_no_proof_contains_are_unproven():
    budget = Budget(max_tokens=40)
    packed = packed_lists([[0], [1, 2, 3], [4, 5, 6, 7, 8]])
    lengths = [40, 20, 10, 10, 16, 6, 6, 6, 6]
    long = BatchShape.packed([40])
    short = BatchShape.packed([8] * 5)
    mixed = BatchShape.packed([24, 8, 4, 4])
    for shapes, unproven in (
        ([], 3),
        ([long], 2),
        ([long, short], 2),
        ([long, short, mixed], 1),
        ([long, BatchShape.packed([24, 4, 4, 4, 4])], 0),
    ):
        proofs = np.array(
            [
                (shape.tokens, shape.squared_tokens, shape.batch_size, shape.length)
                for shape in shapes
            ]
        ).reshape(-1, 4)
        row = row_of_lists(packed, lengths, budget, RankSplit(), proofs)
        assert row.unproven == unproven


def test_mates_meet_again_less_often_in_smaller_pools_than_one():
    lengths = np.random.default_rng(0).integers(1, 41, 2000)
    budget = Budget(max_tokens=CAP)
    again = {}
    for pool_size in (200, 2000):
        row = simulated_row(lengths, budget, pool_size, RankSplit(world_size=4), seed=0)
        assert row.over_cap == 0 and row.slowest_rank < 1.02
        again[pool_size] = row.mates_again
    assert again[200] < again[2000] < 0.2


# What is refused.


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 0], {}, "lengths must be positive and finite, but entry 1 is 0"),
        ([3, 2.5], {}, "whole numbers of tokens, at most 2.*40, but entry 1 is 2.5"),
        ([3], {"max_tokens": 0}, "max_tokens must be a whole number, at least 1"),
        ([3], {"packer": ["x"]}, "packer must be one of even, first-fit, best-fit"),
        ([3], {"time_law": 1}, "time_law must be a batchtune.TimeLaw, got 1"),
        ([3], {"cut_at": 41}, "cut_at must be at most max_tokens, 40, got 41"),
        ([3], {"cut_at": 0}, "cut_at must be a whole number, at least 1, got 0"),
        ([3], {"world_size": 0}, "world_size must be a whole number, at least 1"),
        ([3], {"accumulate": 0.5}, "accumulate must be a whole number, at least 1"),
        (
            [3, 41, 4, 99],
            {},
            "2 of 4 sequences are longer than max_tokens, 40, the longest with 99 tokens: those with index 1, 3. .*"
            "cut_at=40",
        ),
        (
            [3] * 10,
            {"world_size": 8, "accumulate": 2},
            "10 sequences can't be dealt evenly to 8 ranks with an accumulation of 2: the fewest micro-batches "
            "found are 1, the next multiple of 16 is 16, and each needs a sequence",
        ),
        (
            [25] * 10,
            {"world_size": 4},
            "found are 10, the next multiple of 4 is 12",
        ),
    ],
)
def test_bad_arguments_are_told(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        batchtune.pack(lengths, **{"max_tokens": CAP, **options})


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"seconds_per_token": -1}, "must be numbers, finite and at least 0"),
        ({"seconds_per_token": float("nan")}, "finite and at least 0"),
        ({"seconds_per_token": "24576"}, "must be numbers"),
        ({"seconds_per_token": 0, "seconds_per_batch": 1}, "needs a positive"),
    ],
)
def test_a_bad_time_law_is_told(coefficients, message):
    with pytest.raises(ValueError, match=message):
        TimeLaw(**coefficients)
