"""How often a step is timed, and how its scatter is told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.probe.attempt import MOST_TIMED_STEPS, enough, interquartile_range


def timed(*seconds):
    """After how many steps it is enough, when the times come round again and again."""
    taken = []
    while not enough(taken):
        taken.append(seconds[len(taken) % len(seconds)])
    return len(taken)


def test_shorter_and_unsteady_steps_are_timed_more_often():
    cases = {
        (10.0,): 1,  # very long: one
        (9.0,): 3,
        (0.05,): 3,  # steady
        (0.05, 0.1): 10,  # not steady: up to 0.75 s
        (0.02,): 5,  # shorter: as many as a tenth of a second holds
        (0.001,): MOST_TIMED_STEPS,
    }
    assert {seconds: timed(*seconds) for seconds in cases} == cases


@given(st.lists(st.floats(1e-6, 100.0), min_size=2, max_size=20))
def test_the_interquartile_range_is_numpys(seconds):
    first, third = np.percentile(seconds, [25, 75])
    assert interquartile_range(seconds) == pytest.approx(third - first, abs=1e-9)
