from hypothesis import given
from hypothesis import strategies as st

from batchtune.probe.bounds import between, ladder, step_at

TOLERANCES = st.sampled_from([0.0, 1e-9, 0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.99])
TOPS = st.integers(1, 3000)


def trials_between(tolerance: float, top: int) -> int:
    """How many trials bisection needs at most."""
    return len(between(ladder(tolerance, top), 0, top + 1)).bit_length()


@given(TOLERANCES, st.integers(2, 3000), st.data())
def test_between_adjacent_rungs_nothing_is_left_to_try(
    tolerance: float, top: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(1, top))
    high = data.draw(st.integers(low + 1, top + 1))
    if not between(ladder(tolerance, top), low, high):
        assert high - low <= step_at(low, tolerance)


def test_a_hundred_million_examples_need_few_trials() -> None:
    assert trials_between(0.01, 100_000_000) == 11
    assert trials_between(0.0, 100_000_000) == 27
