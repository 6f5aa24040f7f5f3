"""The Lhotse export, run by Lhotse's own sampler."""

import warnings

import numpy as np
import pytest
from exports.stream_runs import cuts_of, executed, row_of
from msgspec.structs import replace
from real_lengths import librispeech_seconds
from report_records import made_sweep

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import ResultError
from batchtune.exports import Tuned, export_of
from batchtune.exports.frameworks import least_buffer
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings

EXPORT = export_of("lhotse")


@pytest.fixture(scope="module")
def librispeech():
    return librispeech_seconds()[::4]


@pytest.fixture(scope="module")
def swept(librispeech):
    chosen = SweepSettings(strategies=("optimal",), num_buckets=(13,))
    return sweep(Lengths.of(librispeech, unit="s"), 600, chosen, Costs())


def render(result):
    return EXPORT.render(Tuned(sweep=result))


def batches(text, durations, **options):
    """The durations in each batch of an epoch."""
    sampler = executed(text)["make_sampler"](cuts_of(durations), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [[cut.duration for cut in batch] for batch in sampler]


def with_row(boundaries, sizes, unit="s"):
    row = replace(row_of(made_sweep()), boundaries=boundaries, batch_sizes=sizes)
    lengths = replace(made_sweep().lengths, unit=unit, max=boundaries[-1])
    return replace(made_sweep(), rows=[row], recommended=0, lengths=lengths)


def test_lhotse_makes_as_many_batches_as_the_row_of_real_lengths(librispeech, swept):
    row = row_of(swept)
    found = batches(render(swept), librispeech)
    assert len(found) == row.batches
    assert sorted(length for batch in found for length in batch) == sorted(librispeech)
    for batch in found:
        assert (
            len(batch)
            <= row.batch_sizes[int(np.searchsorted(row.boundaries, max(batch)))]
        )


def test_the_least_buffer_is_enough(librispeech, swept):
    row = row_of(swept)
    found = batches(
        render(swept),
        librispeech[:6000],
        buffer_size=least_buffer(row.batch_sizes),
    )
    counts = np.bincount(
        np.searchsorted(row.boundaries, librispeech[:6000]),
        minlength=len(row.boundaries),
    )
    assert len(found) == int(np.sum(-(-counts // np.array(row.batch_sizes))))


def test_milliseconds_become_seconds():
    pytest.importorskip("lhotse")
    assert executed(render(with_row([1500.0, 24525.0], [9, 2], "ms")))[
        "BOUNDARIES"
    ] == [1.5, 24.525]


def test_a_table_that_ends_before_the_longest_example_is_refused():
    result = with_row([1.0, 2.0], [3, 2])
    lengths = replace(result.lengths, max=2.5)
    with pytest.raises(
        ResultError, match=r"ends at 2, before the longest example of 2\.5"
    ):
        render(replace(result, lengths=lengths))
