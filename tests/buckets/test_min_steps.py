"""`--min-steps`: an epoch keeps at least so many optimizer steps, whichever way batches are made."""

import numpy as np
import pytest
from buckets.speech import PROBED, SPEECH, swept
from hypothesis import given, settings
from hypothesis import strategies as st
from streams.test_stream_sweep import stream_of

from batchtune.buckets.micro_batches import Packing
from batchtune.buckets.sweep import run_sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings
from batchtune.streams.sweep import StreamSettings, sweep_stream

DATA = SPEECH[:600]
TABLES = {"num_buckets": (4, 8)}


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=30, max_size=80),
    min_steps=st.integers(1, 30),
    ranks=st.sampled_from([1, 2]),
    accumulate=st.sampled_from([1, 3]),
    sizes=st.fixed_dictionaries(
        {
            "max_batch_size": st.sampled_from([None, 5]),
            "multiple_of": st.sampled_from([None, 8.0]),
        }
    ),
)
def test_no_row_has_fewer_steps(lengths, min_steps, ranks, accumulate, sizes):
    steps = {"world_size": ranks, "accumulate": accumulate, "min_steps": min_steps}
    chosen = {"num_buckets": (2, 5), "pool_sizes": (20, "all"), **steps, **sizes}
    fewest = (min_steps - 1) * ranks * accumulate + 1
    if fewest > len(lengths):
        with pytest.raises(UsageError, match=f"--min-steps {min_steps}: an epoch of"):
            swept(lengths, costs=PROBED, **chosen)
        return
    found = swept(lengths, costs=PROBED, **chosen)
    assert min(row.steps for row in found.rows) >= min_steps


def keeping(min_steps, current=None):
    return swept(DATA, costs=PROBED, current=current, min_steps=min_steps, **TABLES)


def test_batches_stay_as_large_as_they_may():
    usual = keeping(None)
    fewest = min(row.steps for row in usual.rows)
    assert keeping(fewest // 2).rows == usual.rows
    kept = keeping(80).recommended_row
    # Each bucket ends in a batch that is not full: that many more may come.
    assert 80 <= kept.steps <= 80 + 2 * 8


def test_current_settings_still_fit_and_the_reason_says_why():
    usual = keeping(None, "batch_size=12")
    kept = keeping(50, "batch_size=12")
    assert kept.current_fits is True
    assert kept.current.steps == 50
    assert kept.reason.endswith("an epoch keeps at least 50 optimizer steps")
    assert usual.min_steps == usual.current.steps


def test_padding_decides_where_no_time_is_known():
    found = swept(DATA, 500, current="batch_size=10", min_steps=60, **TABLES)
    assert found.recommended_row.padded_length < 0.8 * found.current.padded_length
    # As large as 60 steps allow, not as the longest example among smaller batches.
    assert found.baselines[0].batch_size == 10
    assert found.baselines[0].batches == 60
    assert found.lower_bound.batches >= 60


def test_multiples_do_not_make_batches_smaller_than_needed():
    found = swept(DATA, num_buckets=(4,), multiple_of=8.0, min_steps=80)
    assert min(row.steps for row in found.rows) <= 90


def test_the_token_budget_is_lowered(tmp_path):
    tokens = np.random.default_rng(1).integers(10, 200, 500)
    data = Lengths.of(tokens.astype(float), unit="tokens")
    packing = Packing(max_tokens=8192)

    def packed(min_steps):
        chosen = SweepSettings(min_steps=min_steps, **TABLES)
        return run_sweep(data, chosen, tmp_path, packing=packing)

    found = packed(40)
    assert found.packing.max_tokens == tokens.sum() // 40
    assert min(row.steps for row in found.packing.rows) >= 40
    with pytest.raises(UsageError, match="the longest sequence has 199"):
        packed(490)


def test_a_stream_keeps_them_too():
    chosen = StreamSettings(buffer_sizes=(100,), num_buckets=(4,), min_steps=90)
    found = sweep_stream(stream_of(DATA), 300, chosen, PROBED)
    assert min(row.batches for row in found.rows) >= 90
    assert "at least 90 optimizer steps" in found.reason


def test_batches_are_no_larger_than_the_throughput_needs():
    """A step takes 10 ms and 1 ms for each 100 s: 95% of the throughput of 100,000 s takes 15,850 s."""

    def step_seconds(sizes, lengths, targets=None):
        return 0.01 + sizes * lengths * 1e-5

    costs = Costs(step_seconds=step_seconds)
    chosen = {"num_buckets": (8,), "throughput_fraction": 0.95}
    found = swept(DATA, 100_000, costs, **chosen)
    assert 15_850 < found.max_batch_length < 18_000
    assert "times the size that fits, and reach 95%" in found.reason
    with pytest.raises(UsageError, match="--keep steps already decides their size"):
        swept(DATA, 300, costs, "batch_size=4", **chosen)
    with pytest.raises(UsageError, match="needs step times"):
        swept(DATA, **chosen)
