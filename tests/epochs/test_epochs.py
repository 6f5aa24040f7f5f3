"""One epoch's batches: what is in them, how many there are, and how they are dealt to ranks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs import batch_order as epochs
from batchtune.epochs import layout as layouts
from batchtune.epochs.batch_order import Cut, Drawing, EpochBatches
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.layout import Dealing
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Lengths

BOUNDARIES = np.array([5.0, 12.0, 30.0])
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=70).map(lambda values: np.array(values, dtype=np.float64))
TABLES = st.lists(st.integers(1, 9), min_size=3, max_size=3).map(lambda sizes: BucketTable(BOUNDARIES, np.array(sizes)))
IN_BUCKETS = st.builds(Batching, TABLES)
BATCHINGS = IN_BUCKETS | st.builds(Batching, TABLES, st.integers(1, 80), st.none() | st.floats(0, 100))
DEALINGS = st.builds(Dealing, world_size=st.integers(1, 5), same_bucket=st.booleans(), drop_last=st.booleans())
KEEPING = DEALINGS.map(lambda dealing: replace(dealing, drop_last=False))
DRAWINGS = st.builds(
    Drawing,
    shuffle=st.booleans(),
    ordering=st.sampled_from(epochs.ORDERINGS),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 9),
)


def cut(lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing) -> Cut:
    return batching.batcher(lengths).cut(drawing, dealing)


def of_all_ranks(lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing) -> list[EpochBatches]:
    found = cut(lengths, batching, dealing, drawing)
    return [epochs.assemble(found, drawing, rank=rank, lengths=lengths) for rank in range(dealing.world_size)]


def examples_of(ranks: list[EpochBatches]) -> list[int]:
    return sorted(example for rank in ranks for batch in rank for example in batch)


@given(LENGTHS, BATCHINGS, KEEPING, DRAWINGS)
@settings(deadline=None, max_examples=60)
def test_every_example_is_in_one_batch_except_counted_repeats(
    lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing
) -> None:
    found = Counter(examples_of(of_all_ranks(lengths, batching, dealing, drawing)))
    assert set(found) == set(range(lengths.size))
    assert found.total() - lengths.size == cut(lengths, batching, dealing, drawing).layout.repeated_examples


@given(LENGTHS, IN_BUCKETS, st.integers(1, 5), DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_examples_repeat_only_if_batches_of_one_are_too_few(
    lengths: FloatArray, batching: Batching, world_size: int, drawing: Drawing
) -> None:
    layout = cut(lengths, batching, Dealing(world_size=world_size), drawing).layout
    assert layout.repeated_examples == max(0, layout.batches_per_rank * world_size - lengths.size)


@given(LENGTHS, IN_BUCKETS, st.integers(1, 5), DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_same_bucket_repeats_only_if_fewer_than_ranks_remain(
    lengths: FloatArray, batching: Batching, world_size: int, drawing: Drawing
) -> None:
    dealing = Dealing(world_size=world_size, same_bucket=True)
    left = batching.table.counts(Lengths.of(lengths).histogram) % (batching.table.batch_sizes * world_size)
    repeated = cut(lengths, batching, dealing, drawing).layout.repeated_examples
    assert repeated == sum(world_size - rest for rest in left if 0 < rest < world_size)


@given(LENGTHS, BATCHINGS, DEALINGS, DRAWINGS)
@settings(deadline=None, max_examples=60)
def test_all_ranks_have_as_many_batches_as_counted(
    lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing
) -> None:
    counted = cut(lengths, batching, dealing, drawing).layout.batches_per_rank
    for rank in of_all_ranks(lengths, batching, dealing, drawing):
        assert len(rank) == len(list(rank)) == counted


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=6).filter(
        lambda buckets: any(count for count, _ in buckets)
    ),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_the_tally_counts_the_batches_that_are_laid_out(
    buckets: list[tuple[int, int]], world_size: int, same_bucket: bool, drop_last: bool
) -> None:
    counts, sizes = np.array(buckets, dtype=np.int64).T
    dealing = Dealing(world_size=world_size, same_bucket=same_bucket, drop_last=drop_last)
    layout = layouts.lay_out(counts, sizes, dealing)
    tally = layouts.tally(counts, sizes, dealing)
    found: Counter[tuple[int, int]] = Counter()
    for kind, bucket in zip(*np.nonzero(tally.numbers), strict=True):
        found[int(bucket), int(tally.batch_sizes[kind, bucket])] += int(tally.numbers[kind, bucket])
    assert found == Counter(zip(layout.buckets.tolist(), layout.batch_sizes.tolist(), strict=True))
    made = layout.batch_sizes.astype(np.float64)
    assert (tally.batches, tally.examples) == (made.size, made.sum())
    if made.size:
        assert (tally.smallest_batch_size, tally.largest_batch_size) == (made.min(), made.max())
        assert tally.mean_batch_size == pytest.approx(made.mean())
        assert tally.batch_size_variation == pytest.approx(made.std() / made.mean(), abs=1e-12)
    assert tally.largest.tolist() == [
        layout.batch_sizes[layout.buckets == bucket].max(initial=0) for bucket in range(counts.size)
    ]


def test_the_tally_takes_batch_sizes_that_no_data_can_fill() -> None:
    for same_bucket in (False, True):
        dealing = Dealing(world_size=2, same_bucket=same_bucket)
        found = layouts.tally(np.array([3, 0]), np.array([2**53, 2**53]), dealing)
        assert (found.batches, found.examples, found.largest.tolist()) == (2, 3, [2, 0])


@given(LENGTHS, IN_BUCKETS, DEALINGS, DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_a_batch_respects_its_bucket_and_batch_size(
    lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing
) -> None:
    buckets = np.searchsorted(BOUNDARIES, lengths)
    for rank in of_all_ranks(lengths, batching, dealing, drawing):
        for batch, bucket in zip(rank, rank.buckets, strict=True):
            assert 1 <= len(batch) <= batching.table.batch_sizes[bucket]
            assert set(buckets[batch]) == {bucket}


@given(LENGTHS, BATCHINGS, DEALINGS, DRAWINGS)
@settings(deadline=None, max_examples=50)
def test_what_is_dropped_is_counted(
    lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing
) -> None:
    dealing = replace(dealing, drop_last=True)
    found = cut(lengths, batching, dealing, drawing)
    batches = epochs.drawn(found, drawing, lengths)
    kept = examples_of(of_all_ranks(lengths, batching, dealing, drawing))
    assert len(kept) == len(set(kept)) == lengths.size - epochs.dropped_examples(found.layout, batches)


@given(LENGTHS, IN_BUCKETS, st.integers(1, 5), DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_with_the_same_bucket_every_step_is_of_one_bucket(
    lengths: FloatArray, batching: Batching, world_size: int, drawing: Drawing
) -> None:
    ranks = of_all_ranks(lengths, batching, Dealing(world_size=world_size, same_bucket=True), drawing)
    for rank in ranks:
        assert np.array_equal(rank.buckets, ranks[0].buckets)


@given(LENGTHS, IN_BUCKETS, st.integers(2, 5), DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_same_bucket_batches_differ_by_at_most_one_example(
    lengths: FloatArray, batching: Batching, world_size: int, drawing: Drawing
) -> None:
    ranks = of_all_ranks(lengths, batching, Dealing(world_size=world_size, same_bucket=True), drawing)
    for step in zip(*ranks, strict=True):
        counts = [len(batch) for batch in step]
        assert max(counts) - min(counts) <= 1


@given(LENGTHS, IN_BUCKETS, DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_one_rank_has_as_many_batches_as_any_sampler(lengths: FloatArray, batching: Batching, drawing: Drawing) -> None:
    (only,) = of_all_ranks(lengths, batching, Dealing(), drawing)
    assert len(only) == expected_batches(Lengths.of(lengths).histogram, batching.table).tally.batches


@given(LENGTHS, IN_BUCKETS, KEEPING, DRAWINGS, st.sampled_from(["ascending", "descending"]))
@settings(deadline=None, max_examples=25)
def test_sorted_batches_are_sorted_by_their_longest(
    lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing, ordering: Any
) -> None:
    ranks = of_all_ranks(lengths, batching, dealing, replace(drawing, ordering=ordering))
    sign = 1 if ordering == "ascending" else -1
    steps = [[lengths[batch].max() for batch in step] for step in zip(*ranks, strict=True)]
    longest = [max(step) for step in steps] if dealing.same_bucket else [value for step in steps for value in step]
    assert (sign * np.diff(longest) >= 0).all()


@given(LENGTHS, IN_BUCKETS)
@settings(deadline=None, max_examples=25)
def test_without_shuffle_batches_follow_the_streaming_order(lengths: FloatArray, batching: Batching) -> None:
    (only,) = of_all_ranks(lengths, batching, Dealing(), Drawing(shuffle=False))
    assert list(only) == streamed(lengths, batching.table.batch_sizes.tolist())


def streamed(lengths: FloatArray, sizes: list[int]) -> list[list[int]]:
    """What reading the examples one by one gives."""
    held: list[list[int]] = [[] for _ in sizes]
    batches = []
    for example, bucket in enumerate(np.searchsorted(BOUNDARIES, lengths)):
        held[bucket].append(example)
        if len(held[bucket]) == sizes[bucket]:
            batches.append(held[bucket])
            held[bucket] = []
    return batches + [batch for batch in held if batch]


@given(LENGTHS, BATCHINGS, st.lists(st.integers(0, 50), min_size=70, max_size=70), DEALINGS, DRAWINGS)
@settings(deadline=None, max_examples=50)
def test_a_simulated_epoch_has_the_batch_shapes_of_all_ranks(
    lengths: FloatArray, batching: Batching, drawn_targets: list[int], dealing: Dealing, drawing: Drawing
) -> None:
    targets = np.array(drawn_targets[: lengths.size], dtype=np.float64)
    shapes = epochs.simulate(cut(lengths, batching, dealing, drawing), drawing, lengths, targets)
    steps = zip(*of_all_ranks(lengths, batching, dealing, drawing), strict=True)
    real = [batch for step in steps for batch in step]
    assert shapes.targets is not None
    assert len(shapes) == len(real)
    assert shapes.batch_sizes.tolist() == [len(batch) for batch in real]
    assert shapes.lengths.tolist() == [lengths[batch].max() for batch in real]
    assert shapes.targets.tolist() == [targets[batch].max() for batch in real]


@given(LENGTHS, IN_BUCKETS, st.integers(0, 80))
@settings(deadline=None, max_examples=25)
def test_batches_from_one_on_are_the_last_of_all(lengths: FloatArray, batching: Batching, first: int) -> None:
    (only,) = of_all_ranks(lengths, batching, Dealing(), Drawing())
    assert list(only.lists(first)) == list(only)[first:]


def test_many_batches_are_lists_like_few() -> None:
    starts = np.concatenate(([0], np.cumsum(np.random.default_rng(0).integers(1, 60_000, 40))))
    batches = EpochBatches(np.arange(starts[-1]), starts, np.zeros(40, dtype=np.int64))
    assert list(batches) == [
        list(range(start, end)) for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


def test_the_largest_batches_are_split_first_into_near_halves() -> None:
    layout = layouts.lay_out(np.array([9, 14]), np.array([9, 7]), Dealing(world_size=5))
    assert layout.batch_sizes.tolist() == [5, 4, 4, 3, 7]
    assert layout.starts.tolist() == [0, 5, 9, 13, 16]
    assert layout.buckets.tolist() == [0, 0, 1, 1, 1]


def test_a_batch_is_split_again_where_it_is_still_the_largest() -> None:
    assert layouts.lay_out(np.array([10]), np.array([10]), Dealing(world_size=4)).batch_sizes.tolist() == [3, 2, 3, 2]


def test_fewer_examples_than_ranks_are_repeated() -> None:
    layout = layouts.lay_out(np.array([2]), np.array([10]), Dealing(world_size=5))
    assert sorted(layout.starts.tolist()) == [0, 0, 0, 1, 1]
    assert layout.repeated_examples == 3


def test_the_rest_of_a_bucket_is_dealt_evenly() -> None:
    layout = layouts.lay_out(np.array([29]), np.array([4]), Dealing(world_size=3, same_bucket=True))
    assert layout.batch_sizes.tolist() == [4, 4, 4, 4, 4, 4, 2, 2, 1]


@pytest.mark.parametrize("same_bucket", [False, True])
def test_batch_sizes_beyond_any_count_are_no_matter(same_bucket: bool) -> None:
    dealing = Dealing(world_size=5000, same_bucket=same_bucket)
    counts = np.array([10_000])
    sizes = np.array([2**53])
    made = layouts.lay_out(counts, sizes, dealing).batch_sizes
    assert (made.size, made.sum()) == (5000, 10_000)
    assert layouts.tally(counts, sizes, dealing).batches == dealing.world_size


def test_float32_lengths_do_not_exceed_the_last_boundary() -> None:
    longest = next(value for value in np.arange(1, 99, 0.1) if np.float32(value) > value)
    assert BucketTable.of([longest], [1]).assign(np.array([longest], dtype=np.float32)).tolist() == [0]


@pytest.mark.parametrize("pool_size", [None, 20])
def test_each_epoch_and_each_seed_has_another_shuffle(pool_size: int | None) -> None:
    batching = Batching(BucketTable(BOUNDARIES, np.array([4, 3, 2])), pool_size)
    lengths = np.arange(40) % 17 + 1.0
    drawings = [Drawing(seed=seed, epoch=epoch) for seed in (0, 1, 2**32) for epoch in (0, 1, 2)]
    epochs_drawn = {str(list(of_all_ranks(lengths, batching, Dealing(), drawing)[0])) for drawing in drawings}
    assert len(epochs_drawn) == len(drawings)


def test_another_process_makes_the_same_batches() -> None:
    code = (
        "import numpy as np; from batchtune.epochs import batch_order as e, batchers as b, layout as l, table as t\n"
        "table = t.BucketTable(np.array([9.0, 60.0]), np.array([5, 3]))\n"
        "drawing = e.Drawing(seed=5, epoch=2)\n"
        "for batching in (b.Batching(table), b.Batching(table, 20, 12.5)):\n"
        "    batcher = batching.batcher(np.arange(50) % 17 + 1.0)\n"
        "    print(list(e.assemble(batcher.cut(drawing, l.Dealing(world_size=2)), drawing, rank=1)))"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1 and outputs != {"[]\n[]\n"}


def test_the_mean_padded_length_over_seeds_is_the_expected_one() -> None:
    random = np.random.default_rng(3)
    lengths = Lengths.of(np.round(random.lognormal(1.5, 0.6, 400).clip(1, 30), 1))
    table = BucketTable(BOUNDARIES, np.array([16, 7, 3]))
    batcher = Batching(table).batcher(lengths.values)
    padded = []
    for seed in range(100):
        drawing = Drawing(seed=seed)
        shapes = epochs.simulate(batcher.cut(drawing, Dealing()), drawing, lengths.values)
        padded.append(float(shapes.batch_sizes @ shapes.lengths))
    error = np.std(padded) / np.sqrt(len(padded))
    expected = expected_batches(lengths.histogram, table).padded_length
    assert abs(np.mean(padded) - expected) < 4 * error
