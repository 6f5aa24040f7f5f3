import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.buckets import STRATEGIES, Problem
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import Lengths

LENGTHS = st.lists(
    st.one_of(st.integers(1, 40).map(float), st.floats(1e-3, 1e6)),
    min_size=1,
    max_size=60,
)
NUM_BUCKETS = st.lists(st.integers(1, 25), min_size=1, max_size=4)


def problem_of(values, max_batch_length):
    histogram = Lengths.of(values).histogram
    return Problem(
        histogram=histogram,
        max_batch_length=max_batch_length,
        batch_sizes=batch_sizes_for(histogram.lengths, max_batch_length),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(values=LENGTHS, max_batch_length=st.floats(1e-3, 1e7), num_buckets=NUM_BUCKETS)
def test_tables_put_every_example_in_exactly_one_bucket(
    strategy, values, max_batch_length, num_buckets
):
    problem = problem_of(values, max_batch_length)
    tables = STRATEGIES[strategy].boundaries(problem, num_buckets)
    assert len(tables) == len(num_buckets)
    for boundaries in tables:  # BucketTable itself refuses what does not ascend
        table = BucketTable(boundaries, batch_sizes_for(boundaries, max_batch_length))
        _, counts = table.divide(problem.histogram)
        assert counts.sum() == len(values)


def boundaries(strategy, values, num_buckets, limit=100):
    return (
        STRATEGIES[strategy]
        .boundaries(problem_of(values, limit), [num_buckets])[0]
        .tolist()
    )


@pytest.mark.parametrize(
    ("strategy", "values", "num_buckets", "ends"),
    [
        ("linear", [2, 3, 10], 4, [4, 6, 8, 10]),
        ("exponential", [1, 3, 16], 4, [2, 4, 8, 16]),
        ("quantile", [1, 1, 1, 1, 4, 4, 12], 2, [4, 12]),
        ("optimal", [1] * 100 + [9, 10, 50], 2, [1, 50]),
    ],
)
def test_boundaries_are_those_of_the_strategys_definition(
    strategy, values, num_buckets, ends
):
    assert boundaries(strategy, values, num_buckets) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("num_buckets", "cap"), [(10, 14), (15, 21), (20, 28), (60, 71), (200, 173)]
)
def test_speechbrains_bucket_count_alone_caps_its_batch_size(num_buckets, cap):
    for limit in (100, 600, 48_000):
        ends = boundaries("speechbrain", [1, 2, 9], num_buckets, limit)
        assert batch_sizes_for(ends, limit)[0] == cap
