"""The warnings about examples that are too long, wrong units, and the settings that are in use now."""

import numpy as np
import pytest
from buckets.speech import swept
from exports.stream_runs import cuts_of

from batchtune.buckets.advice import workload_unit_hint
from batchtune.lengths import Lengths

SECONDS = np.array([3.0, 9.0, 12.0, 15.0, 24.0])


def warnings_of(current):
    speech = np.linspace(1, 20, 500)
    only = {"strategies": ("optimal",), "num_buckets": (2,)}
    return swept(speech, 600, current=current, **only).warnings


def test_overlong_examples_are_reported_with_each_frameworks_way():
    told, *_ = swept([1, 2, 30, 40], 20, num_buckets=(2,)).warnings
    assert told.startswith(
        "2 examples longer than max_batch_length 20 s (the longest is 40 s): where it sets the batch size"
    )
    assert (
        "each becomes a batch of one; Lhotse and ESPnet make batches that exceed it"
        in told
    )


def test_lhotse_lets_an_overlong_example_exceed_its_limit():
    sampling = pytest.importorskip("lhotse.dataset.sampling")
    limit = {"max_duration": 20, "world_size": 1, "rank": 0}
    sampler = sampling.DynamicCutSampler(cuts_of([5, 5, 50, 5]), **limit)
    assert [cut.duration for cut in next(iter(sampler))] == [5, 5, 50]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            "max_batch_length=600,num_buckets=10",
            "your current config with num_buckets=10 can't make a batch of more than 14 examples whatever",
        ),
        (
            "max_batch_length=600,num_buckets=1",
            "your current config makes batches of one example, because its",
        ),
        (
            "max_batch_length=600,bucket_boundaries=600",
            "your current config makes batches of one example, because its",
        ),
        (
            "max_batch_length=19,bucket_boundaries=5:9",
            "27 examples longer than max_batch_length of your current",
        ),
        (
            "batch_size=400",
            "Your current config makes batches that are larger than what was",
        ),
    ],
)
def test_the_traps_of_current_settings_are_reported(settings, told):
    (warning,) = warnings_of(settings)
    assert warning.startswith(told)


@pytest.mark.parametrize(
    "settings",
    [
        "batch_size=16",
        "max_batch_length=600,num_buckets=200",
        "max_batch_length=600,bucket_boundaries=400,max_batch_ex=1",
        "bucket_boundaries=30,bucket_batch_sizes=8",
    ],
)
def test_sound_settings_are_not_warned_of(settings):
    assert warnings_of(settings) == []


@pytest.mark.parametrize(
    ("times", "unit", "told"),
    [
        (1, "s", None),
        (1000, "ms", "with --length-scale 1/1000 --unit s"),
        (16000, "samples", "with --length-scale 1/16000 --unit s"),
        (1000, None, None),
        (1000, "tokens", None),
    ],
)
def test_lengths_expected_in_seconds_get_a_conversion_hint(times, unit, told):
    lengths = Lengths.of(times * SECONDS, unit=unit)
    hint = workload_unit_hint(lengths, "train.py:MyStep")
    assert (hint is None) == (told is None)
    assert told is None or told in hint
    # A built-in workload knows the unit.
    assert workload_unit_hint(lengths, "builtin:conformer-ctc") is None


@pytest.mark.parametrize(
    ("unit", "told"),
    [
        (
            "ms",
            "max_batch_length 600 ms is shorter than the median example (12,000 ms). Is it in another unit? The",
        ),
        (None, "It may be in another unit"),
    ],
)
def test_a_sweep_says_first_that_the_unit_may_be_wrong(unit, told):
    found = swept(Lengths.of(1000 * SECONDS, unit=unit), 600, num_buckets=(2,))
    assert found.recommended is None
    assert told in found.warnings[0]
