"""Whether an epoch's estimated time is what it takes on average, and its standard error how far it is off.

Runs are simulated: the trials of a probe are drawn from a law of step times, timed for as long as the worker would,
and the estimate made of them is held against the law itself.
"""

import statistics
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from timed_trials import timed_trial

from batchtune.buckets import optimal_boundaries
from batchtune.epochs import RankSplit, ShuffleKey
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.measured_costs import StepTimes
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import Lengths
from batchtune.probe.attempt import enough, interquartile_range

RUNS = 40
MOST = 300.0
"""max_batch_length of the table; a probe's largest batches are larger where the examples are short."""
VALUES = (np.random.default_rng(8).gamma(4, 3, 30_000) + 0.5).round(1).clip(max=40.0)
LENGTHS = Lengths.of(VALUES)
BOUNDARIES = np.quantile(VALUES, np.arange(1, 9) / 8)
TABLE = BucketTable(BOUNDARIES, batch_sizes_for(BOUNDARIES, MOST))

# A law of step times: (batch sizes, lengths) → seconds of a step without noise.


def probed_shapes():
    """As a search leaves them: up to the limit at the longest and the shortest length, close to it between."""
    largest = {
        length: int(2 * MOST / length / (1 + length / 40))
        for length in np.geomspace(1.0, 40.0, 12).round(1)
    }
    ends = [
        (max(1, size // part), length)
        for length, size in largest.items()
        for part in (2, 4, 8)
        if length in (1, 40)
    ]
    return list(
        dict.fromkeys(
            [(1, 40.0), *((size, length) for length, size in largest.items()), *ends]
        )
    )


SHAPES = probed_shapes()


def smooth(random, scale):
    """A constant, and what grows with the length and with its square."""
    constant, linear, quadratic = (
        scale * random.uniform((0.03, 0.4, 0.0), (0.3, 1.0, 0.5)) / (1, MOST, 20 * MOST)
    )
    return lambda sizes, lengths: (
        constant + sizes * lengths * (linear + quadratic * lengths)
    )


def tiled(random, scale):
    """Lengths count in whole tiles, and what a batch holds in whole waves of them."""
    even = smooth(random, scale)
    tile = random.choice([0.25, 0.5, 1.0])
    wave = random.uniform(0.02, 0.15) * MOST

    def seconds(sizes, lengths):
        whole = np.ceil(lengths / tile) * tile
        return even(np.ceil(sizes * whole / wave) * wave / whole, whole)

    return seconds


def switching(random, scale):
    """Beyond some padded length another kernel is taken."""
    even = smooth(random, scale)
    limit = random.uniform(0.1, 0.9) * MOST
    factor = random.choice([0.75, 1.4])
    return lambda sizes, lengths: (
        even(sizes, lengths) * np.where(sizes * lengths > limit, factor, 1.0)
    )


@dataclass(frozen=True)
class Noise:
    """By how much steps of one shape differ: normally in the logarithm, and some take 3 times as long."""

    sigma: float
    slow_share: float

    @property
    def mean(self):
        return np.exp(self.sigma**2 / 2) * (1 + 2 * self.slow_share)

    def draw(self, random, count):
        return random.lognormal(0.0, self.sigma, count) * np.where(
            random.random(count) < self.slow_share, 3.0, 1.0
        )


NOISES = {
    "steady": Noise(0.02, 0.0),
    "15% noise": Noise(0.15, 0.0),
    "20% noise": Noise(0.2, 0.0),
    "5% slow": Noise(0.0, 0.05),
    "both": Noise(0.2, 0.05),
}


def drawn_trial(size, length, law, noise, random):
    """As many steps as the worker would time."""
    steps = (law(size, length) * noise.draw(random, 100)).tolist()
    taken = next(steps[:count] for count in range(1, 101) if enough(steps[:count]))
    return timed_trial(
        size,
        length,
        statistics.median(taken),
        spread=interquartile_range(taken) if len(taken) > 1 else None,
        mean=statistics.fmean(taken),
        timed_steps=len(taken),
    )


@cache
def one_epoch():
    """Sizes and longest lengths of the batches of one epoch."""
    cut = Batching(TABLE).batcher(VALUES).cut(ShuffleKey(seed=1), RankSplit())
    shapes = cut.shapes(VALUES, None)
    return shapes.batch_sizes, shapes.lengths


def run(make, noise, seed):
    """Estimate / expectation - 1, drawn / expectation - 1, standard error / expectation, of one epoch."""
    random = np.random.default_rng(seed)
    law = make(random, random.choice([0.02, 0.1, 0.5]))
    trials = [drawn_trial(size, length, law, noise, random) for size, length in SHAPES]
    times = StepTimes.fit(trials)
    pricing = Pricing(
        lengths=LENGTHS, total=LENGTHS.total, max_batch_length=MOST, step_seconds=times
    )
    row = pricing.of_table("quantile", "length", TABLE.num_buckets, TABLE).row
    expected = noise.mean * expected_batches(LENGTHS.histogram, TABLE).sum_of(law)
    sizes, longest = one_epoch()
    drawn = np.sum(law(sizes, longest) * noise.draw(random, sizes.size))
    return (
        row.estimated_epoch_seconds / expected - 1,
        drawn / expected - 1,
        row.estimated_epoch_error_seconds / expected,
    )


def check_covered(share, off, errors):
    """In so few runs, two standard errors less than the share are enough."""
    deviation = np.sqrt(share * (1 - share) / RUNS)
    assert np.mean(np.abs(off) <= errors) >= share - 2 * deviation


LAWS = [smooth, tiled, switching]
in_minutes = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("named", "make"),
    [
        *(("both", make) for make in LAWS),
        *(
            pytest.param(named, make, marks=in_minutes)
            for named, make in zip(sorted(NOISES.keys() - {"both"}), cycle(LAWS))
        ),
    ],
)
def test_the_estimate_is_the_expectation_to_within_its_error(named, make):
    runs = [run(make, NOISES[named], seed) for seed in range(RUNS)]
    off, drawn, error = np.array(runs).T
    assert abs(off.mean()) < 0.02 + 2 * off.std() / np.sqrt(RUNS)
    check_covered(0.95, off, 2 * error)
    check_covered(0.68, off, error)
    check_covered(0.95, off - drawn, 2 * error)
    # An error that covers because it is huge would say nothing.
    assert np.median(error) < 0.1


@pytest.mark.parametrize("named", ["15% noise", "5% slow"])
def test_the_fastest_of_many_tables_is_not_fast_by_chance(named):
    off = np.array([least_of_all(named, seed) for seed in range(30)])
    assert abs(off.mean()) <= max(0.01, off.std() / np.sqrt(30))


def least_of_all(named, seed):
    """Estimate / expectation - 1 of the table with the least estimate, with ends where sizes were measured to fit."""
    random = np.random.default_rng(seed)
    noise = NOISES[named]
    law = smooth(random, 1.0)
    measured = np.geomspace(1.0, 40.0, 30).round(1)
    trials = [
        drawn_trial(size, length, law, noise, random)
        for size, length in zip(batch_sizes_for(measured, MOST), measured, strict=True)
    ]
    times = StepTimes.fit(trials)
    lengths = LENGTHS.histogram.lengths
    sizes = batch_sizes_for(measured[np.searchsorted(measured, lengths)], MOST)
    (ends,) = optimal_boundaries(LENGTHS.histogram, times(sizes, lengths) / sizes, [10])
    table = BucketTable(ends, sizes[np.searchsorted(lengths, ends)])
    expected = expected_batches(LENGTHS.histogram, table)
    return expected.sum_of(times) / (noise.mean * expected.sum_of(law)) - 1
