import itertools

from hypothesis import given
from hypothesis import strategies as st

from batchtune.probe.ladder import Ladder, step_at

TOLERANCES = st.sampled_from([0.0, 1e-9, 0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.99])
TOPS = st.integers(1, 3000)


def plain_rungs(tolerance: float, top: int) -> list[int]:
    rungs = [1]
    while (rung := rungs[-1] + step_at(rungs[-1], tolerance)) <= top:
        rungs.append(rung)
    return rungs


def trials_between(ladder: Ladder, low: int, high: int) -> int:
    """How many trials bisection needs at most."""
    return len(ladder.between(low, high)).bit_length()


@given(TOLERANCES, TOPS)
def test_each_rung_is_one_step_above_the_one_before(tolerance: float, top: int) -> None:
    ladder = Ladder(tolerance, top)
    rungs = [ladder.rung(index) for index in range(ladder.up_to(top))]
    assert rungs == plain_rungs(tolerance, top)


@given(TOLERANCES, TOPS, st.integers(0, 4000))
def test_it_counts_the_rungs_up_to_a_size(tolerance: float, top: int, size: int) -> None:
    assert Ladder(tolerance, top).up_to(size) == sum(rung <= size for rung in plain_rungs(tolerance, top))


@given(TOLERANCES, st.integers(2, 3000), st.data())
def test_between_sizes_with_no_rung_between_nothing_is_left_to_try(
    tolerance: float, top: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(1, top))
    high = data.draw(st.integers(low + 1, top + 1))
    if not Ladder(tolerance, top).between(low, high):
        assert high - low <= step_at(low, tolerance)


@given(TOLERANCES, TOPS, st.data())
def test_guesses_held_within_it_keep_bisections_promise_wherever_they_lead(
    tolerance: float, top: int, data: st.DataObject
) -> None:
    ladder = Ladder(tolerance, top)
    low, high = 0, top + 1
    truth = data.draw(st.integers(0, top))
    promised = trials_between(ladder, low, high) + data.draw(st.integers(0, 3))
    for left in itertools.count(promised, -1):
        if not ladder.between(low, high):
            break
        assert left > 0
        guess = ladder.within(data.draw(st.integers(low + 1, high - 1)), low, high, left)
        assert low < guess < high
        low, high = (guess, high) if guess <= truth else (low, guess)
    assert low <= truth < high


def test_a_hundred_million_examples_need_few_trials() -> None:
    assert trials_between(Ladder(0.01, 100_000_000), 0, 100_000_001) == 11
    assert trials_between(Ladder(0.0, 100_000_000), 0, 100_000_001) == 27
