"""The Lhotse export, run by Lhotse's own sampler."""

import numpy as np
import pytest
from buckets import speech
from exports.stream_runs import cuts_of, executed, rendered
from msgspec.structs import replace
from real_lengths import librispeech_seconds
from report_records import made_sweep

from batchtune.errors import ResultError
from batchtune.exports.frameworks import least_buffer

# Lhotse warns of matters of its own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def librispeech():
    return librispeech_seconds()[::4]


@pytest.fixture(scope="module")
def swept(librispeech):
    return speech.swept(librispeech, 600, strategies=("optimal",), num_buckets=(13,))


def snippet(result):
    return executed(rendered("lhotse", result))


def batches(result, durations, **options):
    """The durations in each batch of an epoch."""
    sampler = snippet(result)["make_sampler"](cuts_of(durations), **options)
    return [[cut.duration for cut in batch] for batch in sampler]


def test_lhotse_makes_as_many_batches_as_the_row_of_real_lengths(librispeech, swept):
    row = swept.recommended_row
    found = batches(swept, librispeech)
    assert len(found) == row.batches
    assert sorted(length for batch in found for length in batch) == sorted(librispeech)
    for batch in found:
        bucket = int(np.searchsorted(row.boundaries, max(batch)))
        assert len(batch) <= row.batch_sizes[bucket]


def test_the_least_buffer_is_enough(librispeech, swept):
    row = swept.recommended_row
    few = librispeech[:6000]
    found = batches(swept, few, buffer_size=least_buffer(row.batch_sizes))
    buckets = np.searchsorted(row.boundaries, few)
    counts = np.bincount(buckets, minlength=len(row.boundaries))
    assert len(found) == np.sum(-(-counts // np.array(row.batch_sizes)))


def test_a_table_that_ends_before_the_longest_example_is_refused():
    lengths = replace(made_sweep().lengths, max=24.6)
    said = r"ends at 24\.52, before the longest example of 24\.6"
    with pytest.raises(ResultError, match=said):
        rendered("lhotse", replace(made_sweep(), lengths=lengths))
