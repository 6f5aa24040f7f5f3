"""What a leak is, from how much each step leaves in use."""

from hypothesis import given
from hypothesis import strategies as st

from batchtune.probe.leaks import grows, leak_message, leaks

MIB = 1 << 20
LIMIT = 1000 * MIB  # 5% of it in 10,000 steps: 5.24 KB a step


def test_it_grows_where_every_step_leaves_more_and_it_matters() -> None:
    cases: dict[tuple[int, ...], bool] = {
        (): False,
        (100 * MIB,): False,
        (100 * MIB, 101 * MIB): True,
        (100 * MIB, 101 * MIB, 102 * MIB): True,
        (100 * MIB, 101 * MIB, 101 * MIB): False,  # once is not always
        (100 * MIB, 103 * MIB, 102 * MIB): False,
        (103 * MIB, 102 * MIB, 101 * MIB): False,
        (100 * MIB, 100 * MIB + 5000): False,  # too little to matter
        (100 * MIB, 100 * MIB + 5500): True,
    }
    assert {in_use: grows(in_use, LIMIT) for in_use in cases} == cases


def test_it_takes_ten_steps_to_be_certain_or_five_long_ones() -> None:
    cases = {(9, 1.0): False, (10, 1.0): True, (4, 60.0): False, (5, 60.0): True}
    found = {
        (steps, seconds): leaks([number * MIB for number in range(steps + 1)], LIMIT, seconds)
        for steps, seconds in cases
    }
    assert found == cases


@given(st.lists(st.integers(0, 1 << 40), min_size=12, max_size=12), st.integers(1, 11))
def test_one_step_that_leaves_no_more_is_enough_to_clear_it(in_use: list[int], step: int) -> None:
    in_use[step] = in_use[step - 1]
    assert not grows(in_use, 1)


def test_the_words_for_it() -> None:
    in_use = [100 * MIB + number * 4404019 for number in range(11)]
    assert leak_message(in_use) == (
        "the workload leaks: each step leaves about 4.2 MiB more in use (10 steps in a row)"
    )
    assert leak_message(in_use[:2], ran_out=True).endswith("(1 step, then memory ran out)")
