"""Which setting of a loader is recommended, and what is made of what it delivered."""

from __future__ import annotations

import pytest

from batchtune.loaders.dataloader import TorchKind
from batchtune.loaders.memory import MemoryUse
from batchtune.loaders.protocol import Taken
from batchtune.loaders.recommend import ranked
from batchtune.loaders.repeats import repeated_batches
from batchtune.loaders.rows import growth, row_of
from batchtune.loaders.runner import Measurement
from batchtune.results import LoaderRow

MEBIBYTE = 1 << 20


def row(workers: int, rate: float, idle: float | None = None) -> LoaderRow:
    arguments = {"num_workers": workers}
    return LoaderRow(arguments=arguments, workers=workers, outcome="ok", examples_per_second=rate, gpu_idle=idle)


def test_with_steps_the_fewest_workers_that_keep_up_come_first() -> None:
    rows = [row(0, 100, 0.6), row(2, 300, 0.008), row(4, 500, 0.0), row(8, 900, 0.0)]
    assert [one.workers for one in ranked(rows, {})] == [2, 4, 8, 0]


def test_settings_that_were_not_run_rank_by_their_rates() -> None:
    rows = [row(0, 100), row(2, 300, 0.14), row(4, 500), row(8, 900, 0.13)]
    least_idle = {"num_workers=0": 0.6, "num_workers=4": 0.0}
    assert [one.workers for one in ranked(rows, least_idle)] == [4, 8, 2, 0]


def test_without_steps_the_fewest_workers_as_fast_as_the_fastest() -> None:
    rows = [row(0, 100), row(2, 490), row(4, 495), row(8, 500), row(1, 300)]
    assert [one.workers for one in ranked(rows)] == [2, 4, 8, 1, 0]


def taken(waits: list[float], examples: int = 4) -> Taken:
    count = len(waits)
    return Taken(
        complete=True,
        seconds=sum(waits),
        waits=waits,
        steps=[0.0] * count,
        examples=[examples] * count,
        lengths=[10.0] * count,
        total_lengths=[10.0 * examples] * count,
        bytes=1000,
        cpu_seconds=0.5 * sum(waits),
        words="4 × 10",
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rates_leave_out_the_start_of_an_epoch(workers: int) -> None:
    # All workers begin at once: their first batches come together after a start of 2 s, then one every 0.1 s.
    waits = [2.0, *[0.0] * max(0, workers - 1), *[0.1] * 40]
    measured = Measurement(
        arguments={"num_workers": workers}, outcome="ok", trials=[[taken(waits)], [taken(waits)]], memory=MemoryUse()
    )
    found = row_of(measured, TorchKind(), 1)
    assert found.batches_per_second == pytest.approx(10)
    assert found.examples_per_second == pytest.approx(40)
    assert found.length_per_second == pytest.approx(400)
    assert (found.first_batch_seconds, found.batches, found.trials) == (2.0, 2 * len(waits), 2)


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
def test_workers_repeat_each_other_if_all_batches_say_so(batches: str, workers: int, repeated: bool) -> None:
    assert repeated_batches([{"0": batch} for batch in batches], workers) is repeated


def test_memory_that_grows_within_epochs_is_growth() -> None:
    # Each epoch's workers begin with little again.
    spans = [(10.0 * epoch, 10.0 * epoch + 8.0) for epoch in range(3)]
    grows = [(begin + second, (100 + 20 * second) * MEBIBYTE) for begin, _ in spans for second in range(9)]
    assert growth(MemoryUse(history=grows), spans, 80) == pytest.approx(2 * MEBIBYTE)
    steady = [(second, (100 + (index % 3)) * MEBIBYTE) for index, (second, _) in enumerate(grows)]
    assert growth(MemoryUse(history=steady), spans, 80) == 0.0
    assert growth(MemoryUse(history=grows[:4]), spans[:1], 80) is None
