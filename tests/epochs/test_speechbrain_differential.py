from itertools import product

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.table import speechbrain_boundaries, speechbrain_table
from batchtune.lengths import Lengths

BOUNDARIES = st.sets(st.integers(1, 100), min_size=1, max_size=12).map(sorted)


def test_the_boundaries_are_those_of_speechbrain(real_dynamic_batch_sampler):
    for num_buckets, limit in product(
        [1, 2, 3, 10, 15, 20, 60, 200], [0.5, 10, 600, 1234.56, 16_000_000]
    ):
        real = real_dynamic_batch_sampler([0], limit, num_buckets, lengths_list=[1.0])
        boundaries = speechbrain_boundaries(num_buckets, limit)
        np.testing.assert_allclose(boundaries, real._bucket_boundaries, rtol=1e-14)


ENDS = np.array([0.5, 7.3, 29.97, 600.0])
ON_ENDS = np.concatenate((ENDS, np.nextafter(ENDS, 0), np.nextafter(ENDS, np.inf)))


@example(ON_ENDS.repeat(5).tolist(), {"bucket_boundaries": ENDS.tolist()}, 600, None)
@given(
    values=st.lists(st.floats(0.01, 100), min_size=1, max_size=80),
    buckets=st.fixed_dictionaries({"num_buckets": st.integers(1, 40)})
    | st.fixed_dictionaries({"bucket_boundaries": BOUNDARIES}),
    max_batch_length=st.floats(0.02, 2000),
    max_batch_ex=st.none() | st.integers(1, 30),
)
def test_batch_sizes_and_batch_count_match_speechbrain(
    real_dynamic_batch_sampler, values, buckets, max_batch_length, max_batch_ex
):
    real = real_dynamic_batch_sampler(
        range(len(values)),
        max_batch_length,
        lengths_list=values,
        max_batch_ex=max_batch_ex,
        **buckets,
    )
    histogram = Lengths.of(values).histogram
    table = speechbrain_table(
        histogram, max_batch_length, max_batch_ex=max_batch_ex, **buckets
    )
    assert table.batch_sizes.tolist() == real._bucket_lens[: table.num_buckets]
    assert expected_batches(histogram, table).tally.batches == len(real)
