"""The batches of a script's own sampler: counted without reading an example, priced as a row of a sweep."""

import itertools
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from report_records import SCRIPT
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from batchtune.buckets.current import own_current
from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.recorded import counted
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings
from batchtune.scripts import running
from batchtune.scripts.running import write_own_batches

VALUES = np.array([1.0 + index * 7 % 97 for index in range(400)])
TARGETS = np.array([float(index % 13) for index in range(400)])


class Unread:
    """A data set whose examples are not to be read."""

    def __len__(self):
        return VALUES.size


class Buckets:
    """Sorts examples, cuts them into batches of 16, shuffles the batches: the same ones in each epoch."""

    def __init__(self):
        # A tensor is an index, too.
        order = torch.from_numpy(np.argsort(VALUES, kind="stable"))
        self.batches = [order[first : first + 16] for first in range(0, 400, 16)]

    def __iter__(self):
        random.shuffle(self.batches)
        return iter(self.batches)


def own_batches(path, batch_sampler, ranks=1, targets=None):
    loader = DataLoader(Unread(), batch_sampler=batch_sampler)
    write_own_batches(loader, path / "own.npz")
    lengths = Lengths.of(VALUES, targets).with_rows(VALUES, targets)
    return counted(path / "own.npz", lengths, ranks)


def test_the_batches_of_a_sampler_are_counted(tmp_path):
    sampler = Buckets()
    own = own_batches(tmp_path, sampler, targets=TARGETS)
    longest = [VALUES[batch].max() for batch in sampler.batches]
    worst = [TARGETS[batch].max() for batch in sampler.batches]
    assert (own.sampler, own.batches) == ("Buckets", 25)
    assert own.padded_length == 16 * sum(longest)
    shapes = sorted((shape.length, shape.target_length) for shape in own.shapes)
    assert shapes == sorted(zip(longest, worst, strict=True))
    assert own.mates_again == 1.0


def test_the_batches_of_one_rank_stand_for_all(tmp_path):
    shard = DistributedSampler(Unread(), 2, 0)  # told the epoch
    own = own_batches(tmp_path, BatchSampler(shard, 10, False), ranks=2)
    assert (own.batches, own.ranks) == (40, 2)
    # Of 399 others, 9 are an example's mates.
    assert own.mates_again == pytest.approx(9 / 399, rel=0.5)


@pytest.mark.parametrize("split", [False, True])
def test_the_batches_of_a_rank_by_accelerate_are_counted(tmp_path, split):
    shards = pytest.importorskip("accelerate.data_loader")
    whole = BatchSampler(RandomSampler(Unread()), 8, drop_last=False)
    shard = shards.BatchSamplerShard(whole, 2, 0, split_batches=split)
    own = own_batches(tmp_path, shard, ranks=2)
    assert own.batches == (100 if split else 50)
    assert {shape.batch_size for shape in own.shapes} == {4 if split else 8}


class Wrong:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    "batches",
    [
        [[(index, 3)] for index in range(400)],
        [[index] for index in range(300)],
        itertools.repeat([0, 1]),
        [],
        None,
    ],
    ids=["no indices", "a part", "endless", "none", "an error"],
)
def test_other_batches_are_not_counted(tmp_path, monkeypatch, batches):
    monkeypatch.setattr(running, "_COUNTING_SECONDS", 0.2)
    assert own_batches(tmp_path, Wrong(batches)) is None


def test_they_are_the_current_row_of_a_sweep(tmp_path):
    sampler = Buckets()
    own = own_batches(tmp_path, sampler)
    script = replace(SCRIPT, accumulation=2, own_batches=own)

    def step_seconds(sizes, lengths, *_):
        return 0.01 + sizes * lengths * 1e-4

    chosen = SweepSettings(strategies=("linear",), num_buckets=(8,))
    current = own_current(script)
    for longest, unfinished, fits in (
        (16, False, True),
        (15, False, False),
        (15, True, None),
    ):
        costs = Costs(step_seconds=step_seconds, accumulate=2, unfinished=unfinished)
        found = sweep(Lengths.of(VALUES), longest * 97, chosen, costs, current)
        row = found.current
        assert found.current_fits is fits
        assert (row.batches, row.steps, row.largest_batch_size) == (25, 13, 16)
        padded = sum(16 * VALUES[batch].max() for batch in sampler.batches)
        assert row.padded_length == padded
        assert row.estimated_epoch_seconds == pytest.approx(0.25 + padded * 1e-4)
        assert row.padding_ratio == pytest.approx(1 - VALUES.sum() / padded)
    (same,) = [row for row in found.rows if row.keeps_examples]
    assert (same.accumulate, same.pool_size, same.steps) == (2, 32, 13)
    assert sum("how Buckets orders examples" in note for note in found.warnings) == 1
    settings = found.current_settings
    assert settings["describe"] == "batches by Buckets, counted over an epoch"
