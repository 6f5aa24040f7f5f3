"""Which setting of a loader is recommended, and what is made of what it delivered."""

import pytest

from batchtune.loaders.dataloader import TorchKind
from batchtune.loaders.runner import Measurement, repeated_batches
from batchtune.loaders.tuner import idle_share, ranked, row_of
from batchtune.loaders.worker import BatchFacts, Taken
from batchtune.results import Demand, LoaderRow

STEP = Demand(source="step-ms", per="batch", step_seconds=0.01)


def row(workers, rate, idle=None, spread=0.0):
    return LoaderRow(
        arguments={"num_workers": workers},
        workers=workers,
        outcome="ok",
        examples_per_second=rate,
        examples_per_second_spread=spread,
        batches_per_second=rate,
        gpu_idle=idle,
    )


@pytest.mark.parametrize(
    ("rows", "demand", "order"),
    [
        (
            [row(0, 100, 0.6), row(2, 300, 0.008), row(4, 500, 0.0), row(8, 900, 0.0)],
            STEP,
            [2, 4, 8, 0],
        ),
        # Those that were not run with a step wait as little as their rates allow: 0.5 and 0.0 of the time.
        (
            [row(0, 100), row(2, 300, 0.14), row(4, 500), row(8, 900, 0.13)],
            STEP,
            [4, 8, 2, 0],
        ),
        (
            [row(0, 100), row(2, 491), row(4, 495), row(8, 500), row(1, 300)],
            None,
            [2, 4, 8, 1, 0],
        ),
        (
            [row(4, 500, spread=0.2), row(2, 460)],
            None,
            [2, 4],
        ),  # within the spread, of 10% at most
        ([], None, []),
    ],
)
def test_the_fewest_workers_of_the_best_come_first(rows, demand, order):
    assert [row.workers for row in ranked(rows, demand)] == order


def measurement(waits, workers, step=0.0):
    facts = BatchFacts(examples=4, total_length=40.0, size_bytes=1000)
    taken = Taken(
        complete=True,
        waits=waits,
        steps=[step] * len(waits),
        batches=[facts] * len(waits),
        cpu_seconds=0.5 * sum(waits),
    )
    return Measurement(arguments={"num_workers": workers}, epochs=[taken])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rates_leave_out_the_start_of_an_epoch(workers):
    # All workers begin at once: their first batches come together after a start of 2 s, then one every 0.1 s.
    waits = [2.0, *[0.0] * max(0, workers - 1), *[0.1] * 40]
    found = row_of(TorchKind(), [measurement(waits, workers)] * 2)
    assert found.batches_per_second == pytest.approx(10)
    assert found.examples_per_second == pytest.approx(40)
    assert found.length_per_second == pytest.approx(400)
    assert (found.first_batch_seconds, found.batches, found.trials) == (
        2.0,
        2 * len(waits),
        2,
    )
    assert idle_share(measurement(waits, workers, step=0.3), workers) == pytest.approx(
        0.25
    )


@pytest.mark.parametrize(
    ("batches", "workers", "repeated"),
    [
        ("aabbccdd", 2, True),
        ("aaabbbcccddde", 3, True),
        ("abcdefgh", 2, False),
        ("aabbccde", 2, False),
        ("aaaaaaaa", 2, False),  # constant
        ("aabbaabb", 2, False),  # few labels
        ("aabb", 2, False),  # too few
    ],
)
def test_workers_repeat_each_other_if_all_batches_say_so(batches, workers, repeated):
    assert repeated_batches([{"0": batch} for batch in batches], workers) is repeated
