"""What a sweep keeps of the user's own training: the examples of each step, the number of steps, or nothing."""

from dataclasses import replace as changed

import numpy as np
import pytest
from buckets import speech
from buckets.speech import PROBED
from msgspec.structs import replace
from report_records import SCRIPT, proven_probe

from batchtune.buckets.current import own_current
from batchtune.buckets.sweep import drift, sweep
from batchtune.errors import UsageError
from batchtune.exports.run_configs import sampler_config
from batchtune.lengths import Lengths
from batchtune.results import (
    StepGradient,
    SweepSettings,
)
from batchtune.verify.plan import VerifyPlan, VerifySettings

DATA = Lengths.of(np.random.default_rng(0).lognormal(2, 0.8, 1000).clip(1, 60))


def swept(current="batch_size=4", costs=PROBED, **settings):
    only = {"strategies": ("exponential",), "num_buckets": (12,)}
    return speech.swept(DATA, 240, costs, current, **only, **settings)


def test_steps_of_several_micro_batches_keep_their_examples():
    found = swept(accumulate=16)
    row = found.recommended_row
    assert (row.accumulate, row.pool_size, row.steps) == (16, 64, found.current.steps)
    assert row.batches == found.current.batches
    assert row.padded_length < 0.8 * found.current.padded_length
    assert not row.unproven
    # A learning rate stays as it is, and other frameworks' tables are no part of it.
    assert found.learning_rate is None and found.recommended_table is None


@pytest.mark.parametrize(("equal_counts", "difference"), [(False, 0.1), (True, 0.0)])
def test_the_scripts_gradient_is_that_of_the_recommended_cut(equal_counts, difference):
    script = replace(
        SCRIPT,
        gradient=StepGradient(again=0.0, any_counts=0.1, equal_counts=0.0),
    )
    costs = changed(PROBED, accumulate=16, script=script)
    found = swept(costs=costs, equal_counts=equal_counts)
    assert found.recommended_row.keeps_examples
    assert found.gradient_difference == difference


def test_fewer_micro_batches_only_where_they_are_asked_for():
    rows = [row for row in swept(accumulate=16).rows if row.keeps_examples]
    numbers = [row.accumulate for row in rows]
    seconds = {row.accumulate: row.estimated_epoch_seconds for row in rows}
    # As now, in the least time, and the fewest.
    fewest = numbers[-1]
    assert fewest < numbers[1] < numbers[0] == 16
    for number in (fewest, fewest + 1, 8, 12):
        row = swept(accumulate=16, micro_batches=number).recommended_row
        assert row.accumulate == number
        assert row.estimated_epoch_seconds >= 0.98 * seconds[numbers[1]]


def test_steps_are_cut_by_their_measured_times():
    def step_seconds(sizes, lengths, targets=None):
        return 0.01 + sizes * lengths * (1e-4 + 1e-4 * lengths)

    rows = [
        swept("batch_size=8", costs, accumulate=8).recommended_row
        for costs in (PROBED, changed(PROBED, step_seconds=step_seconds))
    ]
    assert rows[0].pair_cost is None
    assert rows[1].pair_cost == pytest.approx(1)
    assert rows[1].padded_length > rows[0].padded_length


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_share_the_examples_of_a_step(ranks):
    found = swept(world_size=ranks, accumulate=8 // ranks)
    row = found.recommended_row
    assert (row.pool_size, row.accumulate) == (32, 8 // ranks)
    assert row.estimated_epoch_seconds < found.current.estimated_epoch_seconds


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_verification_runs_a_ranks_share_of_each_step(ranks):
    probe = proven_probe()
    probe = replace(probe, device=replace(probe.device, world_size=ranks))
    config = sampler_config(swept(world_size=ranks, accumulate=4))
    plan = VerifyPlan(
        lengths=DATA, config=config, settings=VerifySettings(), probe=probe
    )
    # Of 16 examples, as one rank has them, whatever the number of ranks.
    assert len(plan.first_epoch) == DATA.count // 4
    assert plan.first_epoch.batch_sizes[:4].sum() == 16


def test_equal_counts_pad_more_and_move_no_examples():
    any_counts = swept(accumulate=16).recommended_row
    found = swept(accumulate=16, equal_counts=True)
    equal = found.recommended_row
    assert equal.smallest_batch_size == equal.largest_batch_size == 4
    assert equal.padded_length > any_counts.padded_length
    for row in found.rows:
        if row.keeps_examples:
            assert row.repeated_examples == 0
            assert row.largest_batch_size <= -(-64 // row.accumulate)


@pytest.mark.parametrize(("accumulate", "vary"), [(1, False), (16, True)])
def test_the_number_of_steps_is_kept_if_examples_are_not(accumulate, vary):
    """Each has one batch, or different numbers of them."""
    script = replace(SCRIPT, batch_size=4, steps_vary=vary)
    chosen = SweepSettings(num_buckets=(12,), accumulate=accumulate)
    found = sweep(DATA, 240, chosen, PROBED, own_current(script))
    assert found.settings.keep == "steps"
    assert found.min_steps == found.current.steps <= found.recommended_row.steps
    assert any("different numbers" in note for note in found.warnings) == vary


def test_nothing_is_kept_where_nothing_is_known_or_asked_for():
    assert swept(None).settings.keep == "nothing"
    assert swept(keep="nothing").recommended_row.steps < 400


def test_other_lengths_make_a_cut_stale_by_what_it_pads():
    found = swept(accumulate=16)
    assert drift(DATA, found, PROBED).stale == 0
    assert 0 <= drift(Lengths.of(DATA.values[::2] * 0.9), found, PROBED).stale < 0.2


@pytest.mark.parametrize("accumulate", [1, 4])
def test_where_nothing_is_to_be_gained_nothing_is_recommended(accumulate):
    chosen = {"num_buckets": (2,), "accumulate": accumulate}
    found = speech.swept([50.0] * 400, 400, current="batch_size=4", **chosen)
    assert found.recommended is None and found.recommended_table is None
    if accumulate > 1:
        assert found.reason.startswith("keep your current config: it takes 100")


def test_a_current_config_that_is_better_is_kept():
    """Its sizes are measured ones, and the table swept is too coarse."""
    sizes = {str(edge): str(240 // edge) for edge in range(2, 61)}
    current = f"bucket_boundaries={':'.join(sizes)}"
    current += f",bucket_batch_sizes={':'.join(sizes.values())}"
    found = swept(current, keep="nothing")
    assert found.recommended is None
    assert found.reason.startswith("keep your current config")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"micro_batches": 1}, "share of a step makes 3 to 64, limited by"),
        ({"equal_counts": True, "keep": "nothing"}, "which are not kept"),
        ({"keep": "same", "min_steps": 9}, "--keep same does not keep a number"),
        ({"keep": "same", "current": "batch_size=400"}, "6,400 examples, and the data"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, why):
    with pytest.raises(UsageError, match=why):
        swept(accumulate=16, **options)


@pytest.mark.parametrize(
    ("current", "keep", "why"),
    [
        (None, "same", "--keep same: the examples and steps"),
        (None, "steps", "--keep steps: the examples and steps"),
        (
            "max_batch_length=60,num_buckets=4",
            "same",
            "these settings do not say which",
        ),
    ],
)
def test_what_is_not_known_can_t_be_kept(current, keep, why):
    with pytest.raises(UsageError, match=why):
        swept(current, keep=keep)
