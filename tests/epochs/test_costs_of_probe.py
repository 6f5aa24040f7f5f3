"""What a sweep takes from a probe."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from packed_records import packed_probe
from report_records import forced_probe, made_probe

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.lengths import Lengths
from batchtune.results import RankDevice, SweepSettings


def test_batches_unlike_a_scripts_own_prove_no_size():
    costs = costs_of(forced_probe())
    assert not costs.proven(np.array([1.0, 20.0])).any()
    assert costs.proven_by(1.0, 1) is None
    packed = replace(packed_probe([100, 200, 300], 900), device=forced_probe().device)
    of_packed = costs_of(packed).packed
    assert not len(of_packed.proofs)
    assert of_packed.why_unproven is not None


@pytest.mark.parametrize("error", [None, 1.5])
def test_a_model_that_is_absent_or_far_off_gives_no_times(error):
    probe = made_probe()
    model = None
    if error is not None:
        model = replace(probe.models.step_seconds, relative_error=error)
    models = replace(probe.models, step_seconds=model)
    assert costs_of(replace(probe, models=models)).step_seconds is None


def probe_with(sizes):
    """Point i is proven by trial 100 + i."""
    made = made_probe()
    points = [
        replace(
            made.frontier[0],
            length=length,
            batch_size=size,
            oom_batch_size=None,
            trial=100 + i,
        )
        for i, (length, size) in enumerate(sizes.items())
    ]
    return replace(made, frontier=points)


@pytest.mark.parametrize(
    ("longest", "size", "trial"),
    [(1.0, 60, 100), (1.5, 60, 101), (2.0, 61, None), (4.1, 1, None)],
)
def test_a_batch_is_proven_by_the_first_trial_that_is_no_smaller(longest, size, trial):
    probe = probe_with({1.0: 90, 2.0: 60, 4.0: 30})
    assert costs_of(probe).proven_by(longest, size) == trial


def test_an_interrupted_probe_proves_nothing():
    probe = probe_with({1.0: 90})
    unproven = replace(probe, frontier=[replace(probe.frontier[0], trial=None)])
    assert costs_of(unproven).proven_by(1.0, 1) is None


def test_a_sweep_without_a_proven_row_warns():
    probe = probe_with({1.0: 90, 2.0: 60})
    lengths = Lengths.of([1.0] * 300 + [2.0] * 300 + [9.0])

    def warnings(data):
        found = sweep(
            data, 120.0, SweepSettings(strategies=("optimal",)), costs_of(probe)
        )
        assert found.recommended is not None
        return " ".join(found.warnings)

    assert "every row has batch sizes that are not proven to fit" in warnings(lengths)
    assert "not proven" not in warnings(Lengths.of(lengths.values[lengths.values < 9]))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=8),
    st.lists(st.integers(1, 45), min_size=1, max_size=60),
    st.integers(1, 6),
)
def test_a_row_counts_buckets_without_a_trial_as_unproven(
    measured, values, num_buckets
):
    probe = probe_with(dict(sorted(measured)))
    found = sweep(
        Lengths.of(values),
        60.0,
        SweepSettings(num_buckets=(num_buckets,), strategies=("optimal",)),
        costs_of(probe),
    )
    row = found.recommended_row
    if row is None:
        return
    without = [use for use in found.buckets if use.examples and use.proven_by is None]
    assert len(without) == row.unproven
    for use in found.buckets:
        if use.proven_by is not None:
            point = probe.frontier[use.proven_by - 100]
            assert point.length >= max(
                value for value in values if value <= use.boundary
            )
            assert point.batch_size >= min(use.batch_size, use.examples)


@pytest.mark.parametrize(("given_ranks", "ranks"), [(None, 4), (1, 1), (2, 2)])
def test_a_sweep_is_for_the_ranks_that_were_probed(given_ranks, ranks):
    made = made_probe()
    rank = RankDevice(
        rank=0,
        host="node",
        name="NVIDIA H200",
        limit_bytes=1 << 37,
        outside_bytes=None,
        base_bytes=0,
    )
    device = replace(made.device, world_size=4, ranks=[rank] * 4)
    costs = costs_of(replace(made, device=device))
    sweeping = SweepSettings(num_buckets=(3,), world_size=given_ranks)
    swept = sweep(Lengths.of([2.0, 9.0, 24.0] * 40, unit="s"), 600, sweeping, costs)
    assert swept.world_size == ranks
    assert swept.device_name == "NVIDIA H200, 4 ranks"
