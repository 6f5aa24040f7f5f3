"""Optimizer steps cut into micro-batches: the examples stay, the padding is least, and what fits is kept to."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchtune.epochs.batchers import StepCutter, least_costly, most_held
from batchtune.epochs.table import BucketTable
from batchtune.packing import Budget, StepPacker

TABLE = BucketTable.of([10, 20, 40], [8, 4, 2])


@st.composite
def steps(draw):
    """Descending lengths, how many examples may begin there, and a number of micro-batches."""
    lengths = sorted(draw(st.lists(st.integers(1, 20), min_size=1, max_size=9)))
    fits = draw(
        st.lists(st.integers(1, 5), min_size=len(lengths), max_size=len(lengths))
    )
    if draw(st.booleans()):
        fits.sort()
    parts = draw(st.integers(1, len(lengths) + 1))
    return np.array(lengths[::-1], dtype=np.float64), np.array(fits), parts


@given(steps())
def test_the_padding_is_the_least_of_all_cuts(step):
    lengths, fits, parts = step
    costs = []
    for places in combinations(range(1, lengths.size), parts - 1):
        starts = np.array([0, *places])
        sizes = np.diff(starts, append=lengths.size)
        if (sizes <= fits[starts]).all():
            costs.append(sizes @ lengths[starts])
    found = least_costly(lengths, fits, parts)
    if not costs:
        assert found is None
        return
    assert found.size == parts
    starts = np.cumsum(found) - found
    assert (found <= fits[starts]).all()
    assert found @ lengths[starts] == min(costs)
    assert (np.diff(fits) < 0).any() or most_held(fits).size <= parts


@example([40] * 30, 30, 1, 1, True, None, False)  # most move to steps that follow
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    size=st.integers(1, 30),
    each=st.integers(1, 6),
    ranks=st.sampled_from([1, 2, 3]),
    equal_counts=st.booleans(),
    pair_cost=st.sampled_from([None, 0.1]),
    packs=st.booleans(),
)
def test_every_example_is_in_one_micro_batch_that_fits(
    lengths, size, each, ranks, equal_counts, pair_cost, packs
):
    values = np.array(lengths)
    cutter = StepCutter(values, TABLE, equal_counts, pair_cost, world_size=ranks)
    if packs:
        cutter = StepPacker(values, Budget(max_tokens=60), world_size=ranks)
    steps = np.split(np.arange(values.size), range(size, values.size, size))
    cut = [batches for batches, _ in cutter.epoch((step, each) for step in steps)]
    held = []
    for batches in cut:
        assert len(batches) % ranks == 0
        for batch in batches:
            held += batch.tolist()
            if packs:
                assert values[batch].sum() <= 60
            else:
                bucket = TABLE.assign(values[batch].max(keepdims=True))
                assert batch.size <= TABLE.batch_sizes[bucket]
    # Of fewer examples than ranks some are dealt twice.
    assert set(held) == set(range(values.size))
    assert len(held) < values.size + ranks * len(cut)


@pytest.mark.parametrize(
    ("cutter", "needed", "held"),
    [
        (StepCutter(np.array([40.0, 40, 40, 30, 5, 5]), TABLE), 3, [[0, 1]]),
        (StepPacker(np.array([6, 6, 5, 5, 5, 3]), Budget(max_tokens=10)), 4, None),
    ],
    ids=["padded", "packed"],
)
def test_examples_that_do_not_fit_move_to_the_next_step(cutter, needed, held):
    (first, found), (second, _) = cutter.epoch([(np.arange(6), 1), (np.arange(0), 5)])
    assert found == needed
    assert held in (None, [batch.tolist() for batch in first])
    assert sorted(np.concatenate([*first, *second]).tolist()) == list(range(6))


def test_ranks_run_side_by_side_what_costs_alike():
    values = np.random.default_rng(0).uniform(1, 40, 512)
    cutter = StepCutter(values, TABLE, world_size=4)
    batches, left = cutter.cut(np.arange(512), 50)
    assert not left.size
    costs = np.array([batch.size * values[batch].max() for batch in batches])
    by_place = costs.reshape(-1, 4)
    assert (by_place.max(axis=1) / by_place.min(axis=1)).mean() < 1.1
