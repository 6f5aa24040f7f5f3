"""How often batch mates meet again, and how alike their lengths are."""

from itertools import pairwise

import numpy as np
import pytest

from batchtune.epochs import ON_ONE_RANK, RankSplit, ShuffleKey
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import (
    Mates,
    effective_buckets,
    expected_batches,
    mates_in_buckets,
    mates_in_cuts,
)
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths

SPEECH = Lengths.of(np.random.default_rng(5).gamma(5, 2, 600).round(1).clip(1, 30))
TABLE = BucketTable(np.array([5.0, 12.0, 30.0]), np.array([20, 8, 3]))


def of_table(lengths, table, dealing=ON_ONE_RANK):
    return mates_in_buckets(expected_batches(lengths.histogram, table, dealing))


def epochs_of(values, batching, epochs, dealing=ON_ONE_RANK):
    batcher = batching.batcher(values)
    return [batcher.cut(ShuffleKey(epoch=epoch), dealing) for epoch in range(epochs)]


def near_mean_of(values):
    """Within four standard errors of it."""
    error = np.std(values) / np.sqrt(len(values))
    return pytest.approx(np.mean(values), abs=4 * error)


@pytest.mark.parametrize(
    "dealing",
    [
        ON_ONE_RANK,
        RankSplit(world_size=4),
        RankSplit(world_size=4, same_bucket=True),
        RankSplit(drop_last=True),
    ],
)
def test_expectations_of_tables_are_what_epochs_show(dealing):
    expected = of_table(SPEECH, TABLE, dealing)
    cuts = epochs_of(SPEECH.values, Batching(TABLE), 120, dealing)
    seen = [mates_in_cuts(list(two), SPEECH.values) for two in pairwise(cuts)]
    again = [one.again for one in seen]
    assert expected.again == near_mean_of(again)
    assert expected.correlation == near_mean_of([one.correlation for one in seen])
    # With the last and the first epoch too.
    assert mates_in_cuts(cuts, SPEECH.values).again == pytest.approx(
        np.mean(again), rel=0.02
    )


def test_random_batches_of_one_size_meet_as_chance_has_it():
    one_bucket = BucketTable(np.array([30.0]), np.array([12]))
    found = of_table(SPEECH, one_bucket)
    assert found.again == pytest.approx(11 / 599)
    # All others are a little less like it, as it is not among them.
    assert found.correlation == pytest.approx(-1 / 599)
    (cut,) = epochs_of(SPEECH.values, Batching(one_bucket), 1)
    assert effective_buckets(0.5, cut.layout) == pytest.approx(0.5 * 599 / 11)


@pytest.mark.parametrize("pool_size", [None, 100])
def test_mates_of_equal_lengths_have_no_correlation(pool_size):
    lengths = Lengths.of([4.0] * 300)
    assert of_table(lengths, TABLE).correlation is None
    cuts = epochs_of(lengths.values, Batching(TABLE, pool_size), 2)
    found = mates_in_cuts(cuts, lengths.values)
    assert found.correlation is None and found.again == pytest.approx(19 / 299, rel=0.2)


ONES = BucketTable(TABLE.boundaries, np.ones(3, dtype=np.int64))


@pytest.mark.parametrize("pool_size", [None, 10])
@pytest.mark.parametrize(
    ("lengths", "table"),
    [(SPEECH, ONES), (Lengths.of([4.0]), TABLE)],
    ids=["ones", "one"],
)
def test_batches_of_one_have_no_mates(lengths, table, pool_size):
    cuts = epochs_of(lengths.values, Batching(table, pool_size), 2)
    assert (
        of_table(lengths, table)
        == mates_in_cuts(cuts, lengths.values)
        == Mates(0.0, None)
    )
    assert effective_buckets(0.0, cuts[0].layout) == 1
