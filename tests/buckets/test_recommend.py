import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifests.conftest import cases
from msgspec.structs import replace
from report_records import made_row, made_sweep

from batchtune.buckets.advice import recommend, too_few_examples, trade_off
from batchtune.lengths import Lengths


def row(
    batches,
    buckets=10,
    seconds=None,
    *,
    strategy="optimal",
    sizing="length",
    unproven=None,
    again=0.0,
    pool_size=None,
):
    boundaries = [float(n) for n in range(1, buckets + 1)]
    made = made_row(strategy, boundaries, batches, 1.0, buckets, 1.0, timed=False)
    return replace(
        made,
        sizing=sizing,
        estimated_epoch_seconds=seconds,
        unproven=unproven,
        mates_again=again,
        pool_size=pool_size,
    )


def pools(
    batches,
    size,
    again,
    seconds=None,
    *,
    unproven=None,
):
    return row(
        batches,
        60,
        seconds,
        strategy="pooled",
        unproven=unproven,
        again=again,
        pool_size=size,
    )


def fixed(batches, shuffled=None, by_length=None):
    random, by_lengths = (
        replace(baseline, batches=batches, padded_length=1.0)
        for baseline in made_sweep().baselines
    )
    return [
        replace(random, estimated_epoch_seconds=shuffled),
        replace(by_lengths, estimated_epoch_seconds=by_length),
    ]


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        (
            [row(1011, 5), row(1010, 7), row(1000, 20)],
            1,
        ),  # the fewest buckets within 1% of the fewest batches
        (
            [row(1000, 5, 120.0), row(1100, 9, 100.0)],
            1,
        ),  # the time decides where it is known
        ([row(1000, 5), row(1100, 9, 100.0)], 0),
        ([row(9, 5, 100.5), row(9, 5, 100.2), row(9, 9, 100.0)], 1),
        ([row(9, sizing="frontier"), row(9)], 1),
        ([row(2000)], None),  # no fewer batches than the baseline
        ([row(3000, 5, 1.0), row(10, 9, 2.0)], 1),
        ([row(628, 1, unproven=1), row(700, 12, unproven=0)], 1),
        ([row(628, 1, unproven=1), row(2300, 12, unproven=0)], 0),
    ],
)
def test_the_fewest_buckets_among_the_best_tables_win(rows, chosen):
    found = recommend(rows, fixed(2000))
    assert (found.row, found.portable) == (chosen, chosen)


def test_times_alone_decide_where_all_are_known():
    # More batches than with the fixed batch size, in a third of its time.
    assert recommend([row(2600, 12, 30.0)], fixed(2000, 92.0, 80.0)).row == 0
    found = recommend([row(900, 12, 95.0)], fixed(2000, 92.0, 80.0))
    assert found.row is None
    assert found.reason.startswith("no row takes less time than a fixed batch size")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [row(634, 12), row(628, 20)],
            "optimal with 12 buckets needs 634 batches an epoch, 1.0% more than the best (optimal with 20 buckets: 628 "
            "batches an epoch), and fewer buckets keep more randomness; a fixed batch size of 24 needs 1190 batches",
        ),
        (
            [row(628, 1)],
            "optimal with 1 bucket needs 628 batches an epoch, and no table that may be recommended needs fewer; a "
            "fixed batch size of 24 needs 1190 batches",
        ),
        (
            [row(634, 12, 725.0, sizing="frontier")],
            "optimal with 12 buckets sized by the frontier takes an estimated 12 min 05 s an epoch (634 batches), and "
            "no table that may be recommended takes less; a fixed batch size of 24 needs 1190 batches; fixed-sorted "
            "takes less time: an estimated 11 min 30 s",
        ),
        (
            [row(1300, 12), row(1250, 14, strategy="linear")],
            "no row needs fewer batches than a fixed batch size of 24, which needs 1190; linear with 14 buckets would "
            "make 1250",
        ),
        (
            [row(1000, 12, again=0.05), pools(980, 5000, 0.021)],
            "pools of 5000 examples need 980 batches an epoch, 2.0% less than the best table (optimal with 12 buckets: "
            "1000 batches an epoch); a fixed batch size of 24 needs 1190 batches; two examples of a batch share one "
            "again in the next epoch in 2.1% of cases (with the table 5.0%)",
        ),
    ],
)
def test_the_reason_is_a_sentence_for_people(rows, reason):
    assert recommend(rows, fixed(1190, 900.0, 690.0)).reason == reason


# Few different values, so that ties of all kinds happen.
ROWS = st.lists(
    st.tuples(st.integers(1, 9).map(float), st.integers(1, 9).map(float)), max_size=25
)


def columns(rows):
    return [cost for cost, _ in rows], [buckets for _, buckets in rows]


def beaten(row, rows):
    return any(
        other != row and other[0] <= row[0] and other[1] <= row[1] for other in rows
    )


@given(ROWS)
def test_the_curve_holds_each_unbeaten_point_once_by_brute_force(rows):
    unbeaten = sorted({row for row in rows if not beaten(row, rows)})
    assert [rows[index] for index in trade_off(*columns(rows))] == unbeaten


TABLE = row(1000, 12, 100.0, again=0.05)
AMONG_POOLS = [TABLE, pools(900, 5000, 0.2, 90.0), pools(800, 9000, 0.5, 80.0)]
MOST_RANDOM = [*AMONG_POOLS, pools(990, 1000, 0.001, 120.0)]
# By what the rows show: the rows, options, the row that is recommended, and the table for other frameworks.
CHOICES = {
    "pools 1% faster": ([TABLE, pools(980, 5000, 0.05, 98.9)], {}, 1, 0),
    "pools hardly faster": ([TABLE, pools(980, 5000, 0.05, 99.1)], {}, 0, 0),
    "pools less random": ([TABLE, pools(980, 5000, 0.06, 90.0)], {}, 0, 0),
    "unproven pools": ([TABLE, pools(980, 5000, 0.04, 90.0, unproven=1)], {}, 0, 0),
    "proven pools": ([TABLE, pools(980, 5000, 0.04, 90.0, unproven=0)], {}, 1, 0),
    "pools with as many batches as a fixed batch size": (
        [TABLE, pools(2000, 5000, 0.01, 90.0)],
        {},
        0,
        0,
    ),
    "pools as random as a table that is not recommended": (
        [row(2000, 10, again=0.05), pools(1500, 5000, 0.04)],
        {},
        1,
        None,
    ),
    "pools less random than a table that is not recommended": (
        [row(2000, 10, again=0.05), pools(1500, 5000, 0.78)],
        {},
        None,
        None,
    ),
    "of pools as fast as the fastest the most random": (
        [
            pools(900, 1000, 0.01, 95.0),
            pools(850, 5000, 0.03, 90.5),
            pools(840, 9000, 0.05, 90.0),
            TABLE,
        ],
        {},
        1,
        3,
    ),
    "few shapes": ([TABLE, pools(900, 5000, 0.01)], {"few_shapes": True}, 0, 0),
    "the table's randomness by default": (AMONG_POOLS, {}, 0, 0),
    "less randomness": (AMONG_POOLS, {"min_randomness": 0.8}, 1, 0),
    "more than any has": (AMONG_POOLS, {"min_randomness": 0.96}, None, None),
    "slower pools, as the table is not random enough": (
        MOST_RANDOM,
        {"min_randomness": 0.96},
        3,
        None,
    ),
}


@cases(CHOICES, "rows options chosen portable")
def test_pools_are_recommended_if_faster_and_as_random(rows, options, chosen, portable):
    found = recommend(rows, fixed(2000), **options)
    assert (found.row, found.portable) == (chosen, portable)


def test_times_that_do_not_compare_leave_the_choice_to_batches():
    rows = [row(900, seconds=200.0), row(1000, seconds=100.0)]
    assert recommend(rows, fixed(2000)).row == 1
    untimed = recommend(rows, fixed(2000), timed=False)
    assert untimed.row == 0 and "estimated" not in untimed.reason


def test_the_row_closest_to_the_kept_steps_is_recommended():
    """A fixed batch size of one pads nothing, and makes as many steps as there are examples."""
    ones = replace(row(7025, 10, strategy="linear"), padded_length=0.9)
    pools_of_ones = replace(pools(7025, 1000, 0.0), padded_length=0.9)
    single = [replace(baseline, padded_length=0.9) for baseline in fixed(7025)]
    for baselines in (fixed(3513), single):
        for other in (ones, pools_of_ones):
            rows = [other, row(2581, 12)]
            assert recommend(rows, baselines, steps_kept=True).row == 1


def test_examples_that_are_too_few_for_pools_are_said():
    few = Lengths.of(range(1, 301))
    assert not list(too_few_examples(few, pools(9, 50, 0.4)))
    (said,) = too_few_examples(few, pools(9, 50, 0.6))
    assert said.startswith("300 examples are too few for pools of 50 examples: ")


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        (
            [pools(980, 5000, 0.021)],
            {"few_shapes": True},
            "with as few shapes, as asked",
        ),
        (
            [pools(1190, 5000, 0.021)],
            {},
            "no row needs fewer batches than a fixed batch size of 24",
        ),
        (
            [pools(1190, 1000, 0.001), pools(980, 5000, 0.021), pools(970, 9000, 0.1)],
            {"min_randomness": 0.99},
            "the most random is pools of 5000 examples, 0.979",
        ),
    ],
)
def test_the_reason_says_why_nothing_is_recommended(rows, options, reason):
    found = recommend(rows, fixed(1190), **options)
    assert found.row is None
    assert reason in found.reason
