"""Rows of pools: means over simulated epochs."""

import numpy as np
import pytest
from buckets import speech
from buckets.speech import LONG_SPEECH, NONE_KNOWN, frontier, step_seconds

from batchtune.buckets import parse_sizes
from batchtune.buckets.sweep import drift
from batchtune.epochs import ON_ONE_RANK, ShuffleKey, drawn, pricing
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import mates_in_cuts
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.pricing import Pricing, simulate_epochs
from batchtune.epochs.table import BucketTable
from batchtune.errors import UsageError
from batchtune.lengths import Lengths

SPEECH = Lengths.of(LONG_SPEECH, unit="s")
TIMED = Costs(step_seconds=step_seconds)


def swept(lengths, *pool_sizes, costs=TIMED, **options):
    pools = {"strategies": ("pooled",), "pool_sizes": pool_sizes, "seed": 7}
    return speech.swept(lengths, costs=costs, **pools, **options)


def row_of(lengths, pool_size, *, costs=TIMED, **options):
    (row,) = swept(lengths, pool_size, costs=costs, **options).rows
    return row


@pytest.mark.parametrize("pool_size", [60, 400, 1500])
def test_figures_are_means_of_the_first_epochs(pool_size):
    row = row_of(SPEECH, pool_size, accumulate=2)
    batching = Batching(
        BucketTable.of(row.boundaries, row.batch_sizes), pool_size, row.batch_overhead
    )
    batcher = batching.batcher(SPEECH.values)
    figures = []
    for epoch in range(row.simulated_epochs or 0):
        drawing = ShuffleKey(seed=7, epoch=epoch)
        cut = batcher.cut(drawing, ON_ONE_RANK)
        held = [SPEECH.values[batch] for batch in cut.lists(drawn(cut, drawing))]
        sizes, longest, totals = np.array(
            [(each.size, each.max(), each.sum()) for each in held]
        ).T
        seconds = step_seconds(sizes, longest).sum()
        deviation = totals.std() / totals.mean()
        figures.append((len(held), sizes @ longest, seconds, deviation))
    batches, padded, seconds, deviations = np.array(figures).T
    assert {row.batches} == set(batches) and row.simulated_epochs == 8
    assert row.padded_length == pytest.approx(np.mean(padded))
    assert row.estimated_epoch_seconds == pytest.approx(np.mean(seconds))
    assert row.batches_deviation == 0
    # Of steps of two batches.
    deviation = np.mean(deviations) / np.sqrt(2)
    assert row.step_tokens_deviation == pytest.approx(deviation, rel=0.2)
    assert row.epoch_seconds_deviation == pytest.approx(np.std(seconds, ddof=1))


LONG_TAILED = (
    np.exp(np.random.default_rng(3).normal(0.55, 1.15, 66_816)).clip(0.1, 82.5).round(2)
)


@pytest.mark.parametrize(("count", "examples"), [(500, 1 << 17), (1500, 750)])
def test_mates_meet_again_as_often_as_in_real_epochs(count, examples, monkeypatch):
    lengths = Lengths.of(LONG_TAILED[:count])
    boundaries = np.unique(lengths.values)
    batching = Batching(
        BucketTable(boundaries, np.maximum(1, 300 / boundaries).astype(np.int64)),
        250,
        20.0,
    )
    batcher = batching.batcher(lengths.values)
    real = []
    for seed in range(4):
        cuts = [
            batcher.cut(ShuffleKey(seed=seed, epoch=epoch), ON_ONE_RANK)
            for epoch in range(12)
        ]
        real.append(mates_in_cuts(cuts, lengths.values).again)
    monkeypatch.setattr(pricing, "_EXAMPLES", examples)
    monkeypatch.setattr(pricing, "_OF_A_RANK", 0)
    estimates = [
        simulate_epochs(batching, lengths, ON_ONE_RANK, seed).mates.again
        for seed in range(5)
    ]
    assert np.mean(estimates) == pytest.approx(np.mean(real), rel=0.015)


def test_every_rank_has_as_many_batches_and_waits():
    independent = row_of(SPEECH, 400, world_size=4)
    same = row_of(SPEECH, 400, world_size=4, same_bucket=True)
    for row in (independent, same):
        assert row.batches % 4 == 0 and row.steps == row.batches / 4
        assert (
            row.ranks.without_waiting_epoch_seconds
            < row.ranks.independent_epoch_seconds
        )
    assert (
        independent.estimated_epoch_seconds
        == independent.ranks.independent_epoch_seconds
    )
    assert same.estimated_epoch_seconds == same.ranks.same_bucket_epoch_seconds


def test_small_pools_are_cut_for_the_least_time():
    small, large = swept(SPEECH, 60, 1500).rows
    # 0.02 s of 0.001 s for each second of speech.
    assert small.batch_overhead == pytest.approx(20, rel=0.01)
    assert large.batch_overhead is None
    filled = Pricing(
        lengths=SPEECH,
        total=SPEECH.total,
        max_batch_length=300,
        step_seconds=step_seconds,
        seed=7,
    )
    other = filled.priced(
        "pooled",
        "length",
        Batching(BucketTable.of(small.boundaries, small.batch_sizes), 60),
    ).row
    assert small.estimated_epoch_seconds < 0.997 * other.estimated_epoch_seconds
    assert row_of(SPEECH, 60, costs=NONE_KNOWN).batch_overhead is None


def test_sizes_are_the_largest_known_to_fit():
    row = row_of(SPEECH, 400, costs=Costs(frontier=frontier))
    assert row.sizing == "frontier"
    assert row.batch_sizes == frontier(np.array(row.boundaries)).tolist()
    assert row.num_buckets == len(set(row.batch_sizes)) == len(row.batch_sizes)


def test_pools_go_from_a_thousand_to_all_unless_asked_for():
    def sizes(*arguments, **costs):
        return [row.pool_size for row in swept(*arguments, **costs).rows]

    # 5,900 would be three pools, as 4,100 are.
    many = [1000, 1400, 2000, 2900, 4100, 8400, 12_000]
    assert sizes(np.linspace(1, 20, 12_000), costs=NONE_KNOWN) == many
    assert sizes([3.0, 4.0]) == [2]
    assert sizes(SPEECH, 10**9, 20, 10**15) == [20, 1500]


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "1e3", "1.5", "many", "10,", "5:9", "9" * 40]
)
def test_a_pool_size_that_is_no_number_of_examples_is_refused(text):
    with pytest.raises(UsageError, match="--pool-size must be a number of examples"):
        parse_sizes(text, "--pool-size")


def test_other_lengths_are_compared_in_pools_of_one_size():
    random = np.random.default_rng(8)
    wide = Lengths.of(random.integers(1, 3000, 3000), unit="tokens")
    tuned = speech.swept(wide, 1e6, strategies=("pooled",), pool_sizes=(800,))
    assert tuned.recommended_row.num_buckets > 1000
    assert drift(wide, tuned, NONE_KNOWN).stale == 0
    shorter = Lengths.of(np.minimum(wide.values, 1500), unit="tokens")
    found = drift(shorter, tuned, NONE_KNOWN)
    assert (
        found.changed
        and 0 <= found.stale < 0.1
        and found.batches <= tuned.recommended_row.batches
    )
