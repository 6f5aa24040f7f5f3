"""How far other lengths are from those of a run, and what its table costs on them."""

import dataclasses

import numpy as np
import pytest
from buckets.speech import NONE_KNOWN, PROBED, frontier, swept
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchtune.buckets.sweep import drift
from batchtune.errors import ResultError
from batchtune.lengths import Lengths

RANDOM = np.random.default_rng(7)
SPEECH = np.round(np.clip(RANDOM.gamma(8.0, 1.6, 500), 1.0, 30.0), 1)
SETTINGS = {"strategies": ("quantile", "optimal"), "num_buckets": (5, 8)}

some_lengths = st.lists(st.integers(1, 400).map(float), min_size=1, max_size=60)


def made(values, costs=NONE_KNOWN, **settings):
    found = swept(values, costs=costs, **{**SETTINGS, **settings})
    return with_recommended(found)


def with_recommended(found, index=-1):
    """The sweep with a row recommended, even where none beats the baseline."""
    return replace(found, recommended=index % len(found.rows))


def of(values, tuned, costs=NONE_KNOWN):
    return drift(Lengths.of(values, unit="s"), tuned, costs)


TUNED = made(SPEECH)


@pytest.mark.parametrize("index", [0, 3, 5])
def test_the_same_lengths_cost_what_the_sweep_says(index):
    tuned = with_recommended(made(SPEECH, PROBED), index)
    row = tuned.rows[index]
    found = of(SPEECH, tuned, PROBED)
    assert found.batches == found.retuned_batches == row.batches
    assert found.epoch_seconds == row.estimated_epoch_seconds
    assert found.retuned_epoch_seconds == row.estimated_epoch_seconds
    assert (found.changed, found.stale) == (False, 0.0)


def test_what_is_beyond_the_table_makes_batches_of_one():
    with_outliers = np.concatenate([SPEECH, [31.0] * 40])
    found = of(with_outliers, TUNED)
    assert found.beyond == 40
    assert found.batches == TUNED.rows[-1].batches + 40


@given(some_lengths, some_lengths)
def test_a_table_tuned_anew_by_the_remainders_is_never_worse(ours, theirs):
    found = of(ours, made(theirs))
    assert found.retuned_batches <= found.batches
    assert found.stale == pytest.approx(found.batches / found.retuned_batches - 1)


def test_where_times_are_known_staleness_is_in_time():
    found = of(SPEECH * 1.4, made(SPEECH, PROBED), PROBED)
    assert found.stale == max(
        0.0, found.epoch_seconds / found.retuned_epoch_seconds - 1
    )


def test_the_settings_of_the_sweep_hold_for_the_table_tuned_anew():
    settings = {
        "strategies": ("linear",),
        "num_buckets": (6,),
        "max_batch_size": 16,
        "multiple_of": 2.0,
        "world_size": 4,
    }
    tuned = made(SPEECH, PROBED, **settings)
    other = SPEECH[::2] * 0.8
    anew = made(other, PROBED, **settings)
    found = of(other, tuned, PROBED)
    assert (found.retuned_batches, found.retuned_epoch_seconds) == (
        anew.rows[0].batches,
        anew.rows[0].estimated_epoch_seconds,
    )


def test_a_limit_below_the_probes_holds_for_the_table_tuned_anew():
    def capped(lengths):
        return np.minimum(
            frontier(lengths), np.maximum(1, (300 / lengths).astype(np.int64))
        )

    costs = dataclasses.replace(PROBED, frontier=capped)
    tuned = made(SPEECH, costs)
    assert tuned.rows[-1].sizing == "frontier"
    other = SPEECH[::2]
    anew = made(other, costs)
    assert of(other, tuned, PROBED).retuned_batches == anew.rows[-1].batches


def test_beyond_the_probe_a_new_table_takes_only_proven_sizes():
    def further(lengths):
        """What must fit where memory grows with the square of the length."""
        stretched = np.maximum(lengths / SPEECH.max(), 1.0)
        return np.maximum(
            1, frontier(np.minimum(lengths, SPEECH.max())) / stretched**2
        ).astype(np.int64)

    def probed(lengths):
        return np.where(lengths <= SPEECH.max(), frontier(lengths), 10**6)

    costs = dataclasses.replace(PROBED, frontier=probed, continued_frontier=further)
    found = of(SPEECH * 1.2, made(SPEECH, costs), costs)
    assert found.retuned_batches > found.lengths.total / 600


def test_a_sweep_that_recommends_nothing_has_nothing_to_hold_to():
    with pytest.raises(ResultError, match="recommends no table"):
        of(SPEECH, replace(TUNED, recommended=None))


def test_lengths_of_another_unit_are_refused():
    with pytest.raises(ResultError, match="the manifest is in frames, the run in s"):
        drift(Lengths.of(SPEECH, unit="frames"), TUNED, NONE_KNOWN)


def test_a_probe_that_is_gone_is_told():
    with pytest.raises(ResultError, match=r"no probe\.json"):
        of(SPEECH, made(SPEECH, PROBED))


def test_a_strategy_that_is_none_is_told():
    rows = [replace(row, strategy="magic") for row in TUNED.rows]
    with pytest.raises(ResultError, match="unknown strategy 'magic'"):
        of(SPEECH * 1.1, replace(TUNED, rows=rows))
