"""One epoch's batches: what is in them, how many there are, and how they are dealt to ranks."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from drawn_batches import (
    BATCHINGS,
    BOUNDARIES,
    DEALINGS,
    DRAWINGS,
    IN_BUCKETS,
    KEEPING,
    LENGTHS,
    RANKS,
    batches_of_all_ranks,
)
from hypothesis import given
from hypothesis import strategies as st

from batchtune.epochs import RankSplit, ShuffleKey, drawn, dropped_examples, lay_out
from batchtune.epochs.batchers import Batching
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths


@given(LENGTHS, BATCHINGS, DEALINGS, DRAWINGS)
def test_every_example_is_in_one_batch_or_counted(lengths, batching, dealing, drawing):
    cut, ranks = batches_of_all_ranks(lengths, batching, dealing, drawing)
    found = Counter(example for rank in ranks for batch in rank for example in batch)
    dropped = dropped_examples(cut.layout, drawn(cut, drawing, lengths))
    assert len(found) == lengths.size - dropped
    assert found.total() == len(found) + cut.layout.repeated_examples
    if dealing.drop_last:
        assert cut.layout.repeated_examples == 0
    else:
        assert dropped == 0


@given(LENGTHS, IN_BUCKETS, RANKS, DRAWINGS)
def test_same_bucket_steps_are_of_one_bucket_dealt_evenly(
    lengths, batching, world_size, drawing
):
    dealing = RankSplit(world_size=world_size, same_bucket=True)
    cut, ranks = batches_of_all_ranks(lengths, batching, dealing, drawing)
    for step in zip(*ranks, strict=True):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        assert (
            len({np.searchsorted(BOUNDARIES, lengths[batch].max()) for batch in step})
            == 1
        )
    _, counts = batching.table.divide(Lengths.of(lengths).histogram)
    left = counts % (batching.table.batch_sizes * world_size)
    assert cut.layout.repeated_examples == sum(
        world_size - rest for rest in left if 0 < rest < world_size
    )


@given(LENGTHS, BATCHINGS, DEALINGS, DRAWINGS)
def test_a_batch_holds_no_more_than_fit_with_its_longest(
    lengths, batching, dealing, drawing
):
    sizes, longest = batching.largest_batches(Lengths.of(lengths).histogram)
    most = dict(
        zip(batching.table.assign(longest).tolist(), sizes.tolist(), strict=True)
    )
    buckets = np.searchsorted(BOUNDARIES, lengths)
    for rank in batches_of_all_ranks(lengths, batching, dealing, drawing)[1]:
        for batch in rank:
            bucket = buckets[batch].max()
            assert 1 <= len(batch) <= most[bucket] <= batching.table.batch_sizes[bucket]
            assert batching.uses_pools or set(buckets[batch]) == {bucket}


@given(
    LENGTHS, IN_BUCKETS, KEEPING, DRAWINGS, st.sampled_from(["ascending", "descending"])
)
def test_sorted_batches_are_sorted_by_their_longest(
    lengths, batching, dealing, drawing, ordering
):
    ranks = batches_of_all_ranks(
        lengths, batching, dealing, replace(drawing, ordering=ordering)
    )[1]
    longest = np.array([[lengths[batch].max() for batch in rank] for rank in ranks]).T
    if dealing.same_bucket:
        longest = longest.max(axis=1)
    rises = np.diff(longest.ravel())
    if ordering == "descending":
        rises = -rises
    assert (rises >= 0).all()


@given(LENGTHS, IN_BUCKETS)
def test_without_shuffle_batches_follow_the_streaming_order(lengths, batching):
    held = [[], [], []]
    streamed = []
    for example, bucket in enumerate(np.searchsorted(BOUNDARIES, lengths)):
        held[bucket].append(example)
        if len(held[bucket]) == batching.table.batch_sizes[bucket]:
            streamed.append(held[bucket])
            held[bucket] = []
    (only,) = batches_of_all_ranks(
        lengths, batching, RankSplit(), ShuffleKey(shuffle=False)
    )[1]
    assert only == streamed + [batch for batch in held if batch]


@given(
    LENGTHS,
    BATCHINGS,
    st.lists(st.integers(0, 50), min_size=70, max_size=70),
    DEALINGS,
    DRAWINGS,
)
def test_a_simulated_epoch_has_the_batch_shapes_of_all_ranks(
    lengths, batching, drawn_targets, dealing, drawing
):
    targets = np.array(drawn_targets[: lengths.size], dtype=np.float64)
    cut, ranks = batches_of_all_ranks(lengths, batching, dealing, drawing)
    shapes = cut.shapes(lengths, targets, drawn(cut, drawing, lengths))
    in_turn = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert list(
        zip(shapes.batch_sizes, shapes.lengths, shapes.targets, strict=True)
    ) == [(len(batch), lengths[batch].max(), targets[batch].max()) for batch in in_turn]


@pytest.mark.parametrize(
    ("counts", "batch_sizes", "dealing", "made"),
    [
        ([9, 14], [9, 7], RankSplit(world_size=5), [5, 4, 4, 3, 7]),
        (
            [29],
            [4],
            RankSplit(world_size=3, same_bucket=True),
            [4, 4, 4, 4, 4, 4, 2, 2, 1],
        ),
        ([3, 0], [2**53, 2**53], RankSplit(world_size=2), [2, 1]),
    ],
)
def test_batches_are_split_until_all_ranks_have_as_many(
    counts, batch_sizes, dealing, made
):
    layout = lay_out(np.array(counts), np.array(batch_sizes), dealing)
    assert layout.batch_sizes.tolist() == made
    assert layout.repeated_examples == sum(made) - sum(counts)


@pytest.mark.parametrize("pool_size", [None, 20])
def test_each_epoch_and_each_seed_has_another_shuffle(pool_size):
    batching = Batching(BucketTable(BOUNDARIES, np.array([4, 3, 2])), pool_size)
    lengths = np.arange(40) % 17 + 1.0
    drawings = [
        ShuffleKey(seed=seed, epoch=epoch)
        for seed in (0, 1, 2**32)
        for epoch in (0, 1, 2)
    ]
    epochs = {
        str(batches_of_all_ranks(lengths, batching, RankSplit(), drawing)[1])
        for drawing in drawings
    }
    assert len(epochs) == len(drawings)


@pytest.mark.process
def test_another_process_makes_the_same_batches(capsys):
    code = (
        "import numpy as np; from batchtune import epochs as l\n"
        "from batchtune.epochs import batchers as b, table as t\n"
        "table = t.BucketTable(np.array([9.0, 60.0]), np.array([5, 3]))\n"
        "drawing = l.ShuffleKey(seed=5, epoch=2)\n"
        "for batching in (b.Batching(table), b.Batching(table, 20, 12.5)):\n"
        "    cut = batching.batcher(np.arange(50) % 17 + 1.0).cut(drawing, l.RankSplit(world_size=2))\n"
        "    print(list(cut.lists(l.drawn(cut, drawing)[1::2])))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    exec(code, {})
    assert ran.stdout == capsys.readouterr().out != "[]\n[]\n"
