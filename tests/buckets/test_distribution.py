from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.buckets.epoch_cost import Pricing
from batchtune.buckets.sweep import bucket_uses, histogram_of, quantiles_of
from batchtune.epochs.layout import Dealing
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths

VALUES = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=80)


@given(VALUES)
@settings(deadline=None, max_examples=40)
def test_each_length_is_in_one_bin_and_each_quantile_is_a_length(
    values: list[float],
) -> None:
    lengths = Lengths.of(values)
    bins = histogram_of(lengths)
    quantiles = quantiles_of(lengths)
    assert sum(one.count for one in bins) == len(values)
    assert all(before.to == after.from_ for before, after in itertools.pairwise(bins))
    assert len(quantiles) == 1001 and quantiles == sorted(quantiles)
    assert (quantiles[0], quantiles[-1]) == (lengths.shortest, lengths.longest)
    assert set(quantiles) <= set(lengths.values.tolist())


@pytest.mark.parametrize(
    "dealing",
    [Dealing(), Dealing(world_size=16), Dealing(world_size=16, same_bucket=True)],
)
def test_the_buckets_together_are_the_row(dealing: Dealing) -> None:
    lengths = Lengths.of(np.random.default_rng(0).gamma(4, 3, 500).round(1) + 0.1)
    table = BucketTable(np.array([5.0, 12.0, 30.0, 80.0]), np.array([20, 9, 4, 1]))
    pricing = Pricing(
        lengths=lengths, total=lengths.total, max_batch_length=100, dealing=dealing
    )
    row = pricing.of_table("made", "length", 4, table).row
    uses = bucket_uses(lengths, pricing, row)
    assert [use.examples for use in uses] == table.counts(lengths.histogram).tolist()
    assert sum(use.length for use in uses) == pytest.approx(lengths.total)
    assert sum(use.batches for use in uses) == row.batches
    assert sum(use.padded_length for use in uses) == pytest.approx(row.padded_length)
