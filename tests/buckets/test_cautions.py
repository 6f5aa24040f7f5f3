"""The warnings about examples that are too long, and about the settings that are in use now."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune.buckets.cautions import cautions
from batchtune.buckets.current import CurrentTable, read_current
from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import Row

SPEECH = Lengths.of(np.linspace(1, 20, 500), unit="s")


def row_of(found: CurrentTable, lengths: Lengths) -> Row:
    """The row of a table, with what the warnings look at; the rest is made up."""
    histogram = lengths.histogram
    table = found.batching.table
    counts = table.counts(histogram)
    used = counts > 0
    longest = histogram.lengths[table.edges(histogram)[1:][used] - 1]
    batches = expected_batches(histogram, table).tally.batches
    return Row(
        strategy="current",
        sizing=found.sizing,
        num_buckets=table.num_buckets,
        used_buckets=int(np.count_nonzero(used)),
        boundaries=table.boundaries.tolist(),
        batch_sizes=table.batch_sizes.tolist(),
        batches=batches,
        padded_length=lengths.total,
        padding_ratio=0.0,
        fill=1.0,
        mean_batch_size=lengths.count / batches,
        largest_padded_length=float((np.minimum(table.batch_sizes, counts)[used] * longest).max()),
        effective_buckets=1.0,
        mates_again=0.1,
        smallest_batch_size=1,
        largest_batch_size=1,
        batch_size_variation=0.0,
        steps=batches,
        estimated_epoch_seconds=None,
    )


def told(settings: str, lengths: Lengths = SPEECH) -> list[str]:
    current = read_current(settings)
    found = current.table(lengths)
    return list(current.cautions(found, lengths, row_of(found, lengths)))


@pytest.mark.parametrize(
    ("values", "subject", "each"),
    [
        ([1, 2, 30, 40], "2 examples are longer than max_batch_length 20 s (the longest is 40 s)", "each of them"),
        ([1, 2, 30], "1 example is longer than max_batch_length 20 s (the longest is 30 s)", "it"),
    ],
)
def test_overlong_examples_are_reported_with_each_frameworks_way(values: list[float], subject: str, each: str) -> None:
    lengths = Lengths.of(values, unit="s")
    assert list(cautions(lengths, Limits(max_batch_length=20), [2], [])) == [
        f"{subject}: where it sets the batch size (SpeechBrain, batchtune's sampler), {each} becomes a batch of one; "
        "Lhotse and ESPnet make batches that exceed it, fairseq stops with an error; NeMo with bucket_batch_size drops "
        "only what is longer than its last bin"
    ]


def test_an_example_of_exactly_max_batch_length_is_not_too_long() -> None:
    assert not list(cautions(Lengths.of([1, 2, 20], unit="s"), Limits(max_batch_length=20), [2], []))


def test_lhotse_lets_an_overlong_example_exceed_its_limit() -> None:
    sampling = pytest.importorskip("lhotse.dataset.sampling")
    cut = pytest.importorskip("lhotse.testing.dummies").dummy_cut
    cuts = [cut(index, duration=duration) for index, duration in enumerate([5.0, 5.0, 50.0, 5.0])]
    first = next(iter(sampling.DynamicCutSampler(cuts, max_duration=20, world_size=1, rank=0)))
    assert [one.duration for one in first] == [5, 5, 50]


def test_tables_beyond_a_limit_on_batch_size_are_reported() -> None:
    current = read_current("max_batch_length=600,num_buckets=20,max_batch_ex=8")
    lengths = Lengths.of(np.linspace(1.0, 30.0, 2000), unit="s")
    larger = sweep(lengths, 600.0, SweepSettings(num_buckets=(2,), current=current), Costs())
    (told,) = (text for text in larger.warnings if "to keep your limit" in text)
    assert told.startswith("max_batch_ex of your current config allows 8 examples") and "--max-batch-size 8" in told
    kept = sweep(lengths, 600.0, SweepSettings(num_buckets=(2,), max_batch_size=8, current=current), Costs())
    assert not any("to keep your limit" in text for text in kept.warnings)


def test_current_settings_that_num_buckets_caps_are_told() -> None:
    assert told("max_batch_length=600,num_buckets=10") == [
        "your current config with num_buckets=10 can't make a batch of more than 14 examples whatever max_batch_length "
        "is: its fullest batch here is 280 of 600 s; raising max_batch_length changes nothing"
    ]


def test_current_settings_with_one_bucket_are_told() -> None:
    assert told("max_batch_length=600,num_buckets=1") == [
        "your current config with num_buckets=1 makes batches of one example, because its only boundary is "
        "max_batch_length"
    ]


def test_current_boundaries_giving_batches_of_one_are_reported() -> None:
    assert told("max_batch_length=600,bucket_boundaries=600") == [
        "your current config makes batches of one example, because its smallest boundary, 600 s, is more than half of "
        "max_batch_length 600 s"
    ]


def test_batches_of_one_that_max_batch_ex_asks_for_are_meant() -> None:
    assert told("max_batch_length=600,bucket_boundaries=400,max_batch_ex=1") == []


def test_current_settings_too_small_for_examples_are_reported() -> None:
    assert told("max_batch_length=19,bucket_boundaries=5:9") == [
        "27 examples are longer than max_batch_length of your current config, 19 s (the longest is 20 s): SpeechBrain "
        "makes each of them a batch of one"
    ]


@pytest.mark.parametrize(
    "settings", ["batch_size=16", "max_batch_length=600,num_buckets=200", "bucket_boundaries=30,bucket_batch_sizes=8"]
)
def test_there_is_nothing_to_tell_of_settings_that_are_well(settings: str) -> None:
    assert told(settings) == []
