"""The packed batch sampler: its epochs, ranks and resumption."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune import (
    BucketBatchSampler,
    PackedBatchSampler,
    TimeLaw,
    sampler_from_config,
    sweep,
)
from batchtune.buckets.micro_batches import simulated_row
from batchtune.epochs import RankSplit
from batchtune.errors import ResultError

CAP = 40
LENGTHS = np.random.default_rng(0).integers(1, CAP + 1, 301)


def packed(lengths=LENGTHS, **options):
    return PackedBatchSampler(
        lengths, **{"max_tokens": CAP, "pool_size": 100, **options}
    )


def ranks_of(world_size, **options):
    return [
        packed(rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


OPTIONS = st.fixed_dictionaries(
    {
        "accumulate": st.integers(1, 3),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "packer": st.sampled_from(["even", "first-fit", "best-fit"]),
        "pool_size": st.integers(1, 60),
    }
)


@given(
    st.lists(st.integers(1, CAP), min_size=1, max_size=60), st.integers(1, 4), OPTIONS
)
@pytest.mark.filterwarnings("ignore:drop_last leaves out all")
def test_ranks_have_equal_counts_and_share_the_sequences(lengths, world_size, options):
    ranks = ranks_of(world_size, lengths=lengths, **options)
    wanted = {len(rank) for rank in ranks}
    for _ in range(2):
        dropped = ranks[0].dropped_examples
        repeated = ranks[0].repeated_examples
        epoch = [list(rank) for rank in ranks]
        assert {len(batches) for batches in epoch} == wanted
        assert len(wanted) == 1 and min(wanted) % options["accumulate"] == 0
        batches = [batch for of_rank in epoch for batch in of_rank]
        assert all(sum(lengths[index] for index in batch) <= CAP for batch in batches)
        found = [index for batch in batches for index in batch]
        assert len(found) == len(lengths) + repeated - dropped
        assert len(set(found)) == len(lengths) - dropped
        assert not repeated or len(lengths) < len(batches)
        assert not dropped or options["drop_last"]


@pytest.mark.parametrize("packer", ["even", "first-fit", "best-fit"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_epoch_has_as_many_micro_batches_as_stated(packer, world_size):
    lengths = np.random.default_rng(1).integers(1, 2048, 5000)
    dealing = {"world_size": world_size, "accumulate": world_size}
    ranks = ranks_of(lengths=lengths, max_tokens=3740, packer=packer, **dealing)
    row = simulated_row(lengths, ranks[0].budget, 100, RankSplit(**dealing), seed=0)
    assert row.batches > 1370
    for _ in range(4):
        assert sum(len(list(rank)) for rank in ranks) == row.batches


def test_each_epoch_has_other_micro_batches():
    sampler = packed(seed=3)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert {len(batches) for batches in epochs} == {len(sampler)}
    assert list(pickle.loads(pickle.dumps(packed(seed=3)))) == epochs[0]


def test_a_loaded_state_goes_on_batch_for_batch():
    options = {"rank": 1, "world_size": 2, "accumulate": 2}
    sampler = packed(epoch=2, **options)
    batches = list(packed(epoch=2, **options))
    running = iter(sampler)
    assert [next(running) for _ in range(7)] == batches[:7]
    resumed = packed(**options)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == batches[7:]
    assert list(resumed) == list(packed(epoch=3, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 41},
        {"packer": "best-fit"},
        {"time_law": TimeLaw(seconds_per_token=1)},
        {"pool_size": 99},
        {"cut_at": 40},
        {"accumulate": 2},
    ],
)
def test_the_state_of_another_sampler_is_refused(options):
    with pytest.raises(ValueError, match=r"its digest is .* of lengths and options"):
        packed(**options).load_state_dict(packed().state_dict())


def test_longer_sequences_are_named_or_count_as_cut():
    lengths = [*LENGTHS, 100]
    with pytest.raises(ValueError, match=r"1 of 302 sequences .* with index 301"):
        packed(lengths)
    assert [301] in list(packed(lengths, cut_at=CAP))


def test_an_epoch_without_a_micro_batch_warns():
    sampler = packed([3], drop_last=True, rank=0, world_size=2)
    with pytest.warns(UserWarning, match=r"leaves out all 1 .* or lower max_tokens"):
        assert list(sampler) == []


@pytest.fixture
def config(tmp_path):
    """The `sampler.yaml` of a sweep that cuts sequences."""
    tables = {"num_buckets": [5], "strategies": ["quantile"]}
    sweep(LENGTHS, run=tmp_path, max_tokens=100, cut_at=30, accumulate=2, **tables)
    return tmp_path / "sampler.yaml"


def test_arguments_go_before_the_config(config):
    sampler = PackedBatchSampler.from_config(config, LENGTHS, packer="even", seed=4)
    assert (sampler.budget.packer, sampler.budget.cut_at) == ("even", 30)
    assert sampler.seed == 4 and len(sampler) % 2 == 0
    with pytest.raises(ValueError, match="accumulate must be at most 100,000"):
        sampler_from_config(config, LENGTHS, accumulate=10**15)
    with pytest.raises(ValueError, match="of the kind 'packed'"):
        BucketBatchSampler.from_config(config, LENGTHS)
    with pytest.warns(UserWarning, match="tuned on other lengths"):
        sampler_from_config(config, LENGTHS[:50])


def test_a_damaged_config_is_named(config):
    config.write_text(config.read_text().replace("max_tokens: 100", "max_tokens: 20"))
    with pytest.raises(ResultError, match="is damaged"):
        sampler_from_config(config, LENGTHS)
    config.write_text("")
    with pytest.raises(ResultError, match=r"is empty\n.* again with `batchtune tune`"):
        sampler_from_config(config, LENGTHS)
