"""`--min-steps`: an epoch keeps at least so many optimizer steps, whichever way batches are made."""

import numpy as np
import pytest
from buckets.speech import PROBED, SPEECH
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.buckets.current import read_current
from batchtune.buckets.micro_batches import Packing
from batchtune.buckets.sweep import run_sweep, sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.manifests import StreamLengths
from batchtune.results import SweepSettings
from batchtune.streams.sweep import StreamSettings, sweep_stream

DATA = Lengths.of(SPEECH[:600], unit="s")


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=30, max_size=80),
    min_steps=st.integers(1, 30),
    ranks=st.sampled_from([1, 2]),
    accumulate=st.sampled_from([1, 3]),
    max_batch_size=st.sampled_from([None, 5]),
    multiple_of=st.sampled_from([None, 8.0]),
)
def test_no_row_has_fewer_steps(
    lengths, min_steps, ranks, accumulate, max_batch_size, multiple_of
):
    chosen = SweepSettings(
        num_buckets=(2, 5),
        pool_sizes=(20, "all"),
        world_size=ranks,
        accumulate=accumulate,
        max_batch_size=max_batch_size,
        multiple_of=multiple_of,
        min_steps=min_steps,
    )
    data = Lengths.of([float(length) for length in lengths], unit="s")
    fewest = (min_steps - 1) * ranks * accumulate + 1
    if fewest > data.count:
        with pytest.raises(UsageError, match=f"--min-steps {min_steps}: an epoch of"):
            sweep(data, 300, chosen, PROBED)
        return
    found = sweep(data, 300, chosen, PROBED)
    assert min(row.steps for row in found.rows) >= min_steps


def swept(min_steps):
    return SweepSettings(num_buckets=(4, 8), min_steps=min_steps)


def test_batches_stay_as_large_as_they_may():
    usual = sweep(DATA, 300, swept(None), PROBED)
    fewest = min(row.steps for row in usual.rows)
    assert sweep(DATA, 300, swept(fewest // 2), PROBED).rows == usual.rows
    kept = sweep(DATA, 300, swept(80), PROBED).recommended_row
    # Each bucket ends in a batch that is not full: that many more may come.
    assert 80 <= kept.steps <= 80 + 2 * 8


def test_current_settings_still_fit_and_the_reason_says_why():
    current = read_current("batch_size=12")
    usual = sweep(DATA, 300, swept(None), PROBED, current)
    kept = sweep(DATA, 300, swept(50), PROBED, current)
    assert kept.current_fits is True
    assert kept.current.steps == 50
    assert kept.reason.endswith("an epoch keeps at least 50 optimizer steps")
    assert usual.min_steps == usual.current.steps


def test_padding_decides_where_no_time_is_known():
    current = read_current("batch_size=10")
    found = sweep(DATA, 500, swept(60), Costs(), current)
    assert found.recommended_row.padded_length < 0.8 * found.current.padded_length
    # As large as 60 steps allow, not as the longest example among smaller batches.
    assert found.baselines[0].batch_size == 10
    assert found.baselines[0].batches == 60
    assert found.lower_bound.batches >= 60


def test_multiples_do_not_make_batches_smaller_than_needed():
    chosen = SweepSettings(num_buckets=(4,), multiple_of=8.0, min_steps=80)
    found = sweep(DATA, 300, chosen, Costs())
    assert min(row.steps for row in found.rows) <= 90


def test_the_token_budget_is_lowered(tmp_path):
    tokens = np.random.default_rng(1).integers(10, 200, 500)
    data = Lengths.of(tokens.astype(float), unit="tokens")
    packing = Packing(max_tokens=8192)
    found = run_sweep(data, swept(40), tmp_path, packing=packing)
    assert found.packing.max_tokens == tokens.sum() // 40
    assert min(row.steps for row in found.packing.rows) >= 40
    with pytest.raises(UsageError, match="the longest sequence has 199"):
        run_sweep(data, swept(490), tmp_path, packing=packing)


def test_a_stream_keeps_them_too():
    stream = StreamLengths(
        lengths=DATA,
        values=SPEECH[:600],
        targets=None,
        shards=[],
        repeated_ids=0,
    )
    chosen = StreamSettings(buffer_sizes=(100,), num_buckets=(4,), min_steps=90)
    found = sweep_stream(stream, 300, chosen, PROBED)
    assert min(row.batches for row in found.rows) >= 90
    assert "at least 90 optimizer steps" in found.reason


def test_batches_are_no_larger_than_the_throughput_needs():
    """A step takes 10 ms and 1 ms for each 100 s: 95% of the throughput of 100,000 s takes 15,850 s."""

    def step_seconds(sizes, lengths, targets=None):
        return 0.01 + sizes * lengths * 1e-5

    costs = Costs(step_seconds=step_seconds)
    chosen = SweepSettings(num_buckets=(8,), throughput_fraction=0.95)
    found = sweep(DATA, 100_000, chosen, costs)
    assert 15_850 < found.max_batch_length < 18_000
    assert "times the size that fits, and reach 95%" in found.reason
    with pytest.raises(UsageError, match="--keep steps already decides their size"):
        sweep(DATA, 300, chosen, costs, read_current("batch_size=4"))
    with pytest.raises(UsageError, match="needs step times"):
        sweep(DATA, 300, chosen, Costs())
