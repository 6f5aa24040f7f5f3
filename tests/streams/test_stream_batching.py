"""Batches of a stream, from lengths alone: what must hold however the buffer is used."""

import bisect
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.streams import StreamBatching, stream_batches, stream_random


class Held(NamedTuple):
    length: float
    place: int


LENGTHS = st.lists(st.integers(1, 12), max_size=120).map(
    lambda values: np.array(values, dtype=np.float64)
)


@st.composite
def tables(draw):
    edges = sorted(draw(st.sets(st.integers(1, 11), max_size=4)) | {12})
    return BucketTable.of(
        edges,
        draw(st.lists(st.integers(1, 9), min_size=len(edges), max_size=len(edges))),
    )


def batching(algorithm, table, buffer_size, **options):
    return StreamBatching(
        algorithm=algorithm, table=table, buffer_size=buffer_size, **options
    )


def lists(made):
    return [
        batch.tolist() for batch in np.split(made.examples, made.ends)[: made.ends.size]
    ]


def first_epoch(lengths, way):
    return stream_batches(lengths, way, stream_random(0, 0))


def fits(table, lengths, batch):
    return table.batch_sizes[table.assign(lengths[batch].max(keepdims=True))[0]]


@pytest.mark.parametrize("algorithm", ["bucket", "pivot"])
@given(
    lengths=LENGTHS,
    table=tables(),
    ratio=st.none() | st.floats(0, 1),
    buffer_size=st.integers(1, 60),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_sizes_padding_and_buffer_hold_for_each_example(
    algorithm, lengths, table, ratio, buffer_size, shuffle, drop_last
):
    way = batching(
        algorithm,
        table,
        buffer_size,
        max_padding_ratio=ratio,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    made = first_epoch(lengths, way)
    batches = lists(made)
    for batch, read in zip(batches, made.read, strict=True):
        assert 1 <= len(batch) <= fits(table, lengths, batch)
        assert max(batch) < read
        if algorithm == "pivot" and ratio is not None:
            assert 1 - lengths[batch].mean() / lengths[batch].max() <= ratio + 1e-9
    assert (made.read - np.concatenate([[0], made.ends])[:-1] <= buffer_size).all()
    left_out = set(range(lengths.size)) - set(made.examples.tolist())
    assert len(set(made.examples.tolist())) == made.examples.size
    if ratio is None or not drop_last:
        assert len(left_out) < (table.batch_sizes.max() if drop_last else 1)


def test_seeds_of_epochs_ranks_and_workers_are_their_own():
    places = list(product((0, 1), repeat=4))
    assert len({stream_random(*place).random() for place in places}) == len(places)
    assert stream_random(3, 1, 2, 0).random() == 0.7170299027382978


def test_a_buffer_that_holds_all_batches_gives_full_ones():
    speech = np.random.default_rng(0).gamma(4, 3, 4000) + 1
    edges = np.quantile(speech, np.linspace(0, 1, 9)[1:])
    table = BucketTable(edges, batch_sizes_for(edges, 300))
    way = batching("bucket", table, int(table.batch_sizes.sum()))
    batches = lists(first_epoch(speech, way))
    unfilled = sum(len(batch) < fits(table, speech, batch) for batch in batches)
    mixed = sum(np.ptp(table.assign(speech[batch])) > 0 for batch in batches)
    assert unfilled <= 1 and mixed <= table.num_buckets


@given(LENGTHS, st.integers(12, 60), st.floats(0, 1), st.integers(1, 40))
def test_a_pivots_batch_is_speechbrains(
    real_dynamic_bucketed_batch, lengths, most, ratio, buffer_size
):
    around = real_dynamic_bucketed_batch.__globals__["indices_around_random_pivot"]
    edges = np.arange(1.0, 13)
    way = batching(
        "pivot",
        BucketTable(edges, batch_sizes_for(edges, most)),
        buffer_size,
        max_padding_ratio=ratio,
        shuffle=False,  # the pivot is then the example that was read first
    )
    batches = lists(first_epoch(lengths, way))
    held = []
    for place, length in enumerate(lengths.tolist()):
        bisect.insort(held, Held(length, place))
        if len(held) == buffer_size:
            oldest = min(range(len(held)), key=lambda index: held[index].place)
            limits = {
                "target_batch_numel": most,
                "max_batch_numel": most,
                "max_padding_ratio": ratio,
            }
            chosen = around(
                held, randint_generator=lambda *_, oldest=oldest: oldest, **limits
            )
            assert batches.pop(0) == [held[index].place for index in chosen]
            del held[chosen[0] : chosen[-1] + 1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_rare_bucket_has_its_turn(shuffle):
    lengths = np.full(4000, 10.0)
    lengths[100] = 1.0
    table = BucketTable.of([1, 10], [50, 5])
    made = first_epoch(lengths, batching("bucket", table, 60, shuffle=shuffle))
    (at,) = (number for number, batch in enumerate(lists(made)) if 100 in batch)
    assert 16 * 60 < made.read[at] <= 100 + 18 * 60
