"""Memory that creeps, and memory that only settles."""

import numpy as np
import pytest

from batchtune.verify.plan import growth_of, leaks

MIB = 1 << 20
LIMIT = 1000 * MIB


RISES = range(0, 48 * 12_288, 12_288)
FALLS_BACK = range(-122_880, 270_336, 24_576)


def figures(grown, noise_bytes=0.0):
    """Return 500 MiB and so much more after each step, with noise."""
    values = np.asarray(grown, dtype=np.float64)
    noise = np.random.default_rng(0).normal(0, noise_bytes, values.size)
    return [int(value) for value in 500 * MIB + values + noise]


def test_growth_is_that_of_medians_and_takes_twelve_steps():
    assert growth_of(figures(1000 * np.arange(400))) == pytest.approx(200_000, rel=0.01)
    assert growth_of(figures(np.arange(11))) is None
    assert growth_of([*figures(np.arange(20)), None]) is None


@pytest.mark.parametrize(
    ("grown", "noise", "leak"),
    [
        (5000 * np.arange(400), 0, False),  # less than 5% of the limit in 10,000 steps
        (5500 * np.arange(400), 0, True),
        (2048 * np.arange(14), 0, False),  # a few pages
        (MIB * np.arange(12), 0, True),
        (0.1 * MIB * np.arange(400), MIB, True),
        (np.zeros(200), MIB, False),
        (
            MIB * np.minimum(np.arange(60), 45),
            0,
            False,
        ),  # a cache that is full at the end
        (MIB * np.minimum(np.arange(1001), 951), 0, False),
        (0.1 * MIB * np.minimum(np.arange(400), 360), MIB, False),
        (
            200 * MIB * (1 - np.exp(-np.arange(60) / 30)),
            0,
            False,
        ),  # one that fills ever more slowly
        (200 * MIB * (1 - np.exp(-np.arange(1001) / 1001)), 0, False),
        (100 * MIB * (np.arange(40) > 25), 0, False),  # one step up
        ([*RISES, *FALLS_BACK], 0, False),
    ],
)
def test_a_leak_grows_at_one_pace_to_the_end(grown, noise, leak):
    assert leaks(figures(grown, noise), LIMIT) is leak


def test_a_heap_that_wanders_is_no_leak():
    alarms = 0
    for seed in range(400):
        random = np.random.default_rng(seed)
        wandering = np.zeros(200)
        for step in range(1, wandering.size):
            drawn = random.normal(0, 100 << 10)
            wandering[step] = 0.8 * wandering[step - 1] + drawn
        alarms += leaks(figures(wandering), 360 * MIB)
    assert alarms == 0
