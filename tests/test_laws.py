"""On memory laws of many kinds every size that is written down fits, and little is lost for it.

The benchmark `tests/benchmarks/laws.py` prints the figures of all laws on all data sets.
"""

import math
from itertools import cycle

import numpy as np
import pytest
from benchmarks.laws import (
    DATA,
    MOST_LOSS,
    law_settings,
    measure,
    probe_law,
)
from made_trials import altered
from memory_laws import (
    BASE_BYTES,
    LAWS,
    LIMIT_BYTES,
    MADE,
    TARGET_LAWS,
    Law,
    LawDevice,
    made_lengths,
    ooms,
    probe_on,
    warns,
)
from msgspec.structs import replace
from probe.made_device import search_to_the_end

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.errors import ProbeError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.knowledge import Refinement
from batchtune.probe.requests import Ran
from batchtune.probe.search import FrontierSearch
from batchtune.results import SweepSettings, Trial

# With targets the laws of two lengths, and those of one that come in steps or have an end: the benchmark runs all.
STEPPED = (
    "blocks of length",
    "powers of two in batch",
    "a floor",
    "truncation",
    "noise of 3%",
    "batches in eights",
)
OF_TWO = [
    name
    for name in TARGET_LAWS
    if name in [f"{one}, plus target" for one in STEPPED] or "plus" not in name
]
ALL = [
    *((name, LAWS[name], False) for name in LAWS),
    *((name, TARGET_LAWS[name], True) for name in OF_TWO),
]
FEW = 300


class SameForAll(LawDevice):
    """Every step takes the same time, but for what a busy machine adds by turns."""

    def __init__(self, *arguments, busy=1.0):
        super().__init__(*arguments)
        self._factors = cycle([1.0, busy])

    def seconds(self, shape):
        return 0.02 * next(self._factors)


def missed(figures):
    """The figures if some size may not fit, or too much is lost."""
    if any(figures.all_above) or figures.loss > MOST_LOSS:
        return figures
    return None


@pytest.mark.parametrize(
    ("law", "lengths"),
    [
        (LAWS["batches in eights"], made_lengths("speech", count=FEW)),
        (
            TARGET_LAWS["length times target"],
            made_lengths("tokens", targets=True, count=120),
        ),
    ],
    ids=["one length", "two lengths"],
)
def test_every_size_fits_and_little_is_lost(law, lengths):
    assert not missed(measure(law, lengths, ("optimal",)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_size_fits_on_every_law():
    failed = {}
    for (name, law, targets), data in zip(ALL, cycle(DATA)):
        if law.monotone:
            count = 100 if targets else FEW
            lengths = made_lengths(data, targets=targets, count=count)
            failed[name, data] = missed(measure(law, lengths, ("optimal",)))
    assert {law: figures for law, figures in failed.items() if figures} == {}


def test_memory_that_falls_with_the_length_is_reported():
    device = LawDevice(LAWS["falls with the length"], made_lengths("tokens", count=FEW))
    probe = probe_law(device)
    assert warns(probe, "Memory does not grow with the batch everywhere")
    # A bucket's size holds for its shorter lengths, too, which need more.
    largest = device.largest(np.array([point.length for point in probe.frontier]))
    for point, most in zip(probe.frontier, largest, strict=True):
        assert point.batch_size <= most


def test_a_noisy_workload_keeps_its_spread_free_and_says_so():
    probe = probe_law(LawDevice(LAWS["noise of 3%"], made_lengths("speech", count=FEW)))
    assert 0.02 < probe.margin.spread_bytes / probe.device.limit_bytes < 0.035
    assert warns(probe, "Peaks of equal batches differ")


def test_equal_peaks_cost_a_margin_of_a_thousandth():
    probe = probe_law(LawDevice(LAWS["quadratic"], made_lengths("speech", count=FEW)))
    assert probe.margin.bytes == int(0.001 * probe.device.limit_bytes)
    assert all(point.trial is not None for point in probe.frontier)


def test_the_longest_that_ran_as_a_first_step_stays():
    # The margin for a first step with many examples would leave no room for the longest one.
    values = np.concatenate((np.full(300, 0.3), np.linspace(1, 5, 20), [82.5]))

    def first_step(shape):
        return 0.004 * (LIMIT_BYTES - BASE_BYTES) * shape.batch_size

    lengths = Lengths.of(values)
    device = LawDevice(LAWS["linear"], lengths, fitting=1.1, first_step=first_step)
    probe = probe_law(device)
    assert probe.margin.first_step_bytes > 0.09 * LIMIT_BYTES
    assert (probe.frontier[-1].length, probe.frontier[-1].batch_size) == (82.5, 1)


def test_turns_are_not_repeated_for_smaller_batches():
    # The margin grows by what the first step of a process needs: sizes next to the limit give way to smaller ones.
    device = LawDevice(
        LAWS["linear"],
        made_lengths("speech"),
        first_step=lambda shape: 0.0009 * LIMIT_BYTES,
    )
    probe = probe_law(device)
    assert device.steps == probe.confirmation.steps
    assert all(point.trial is not None for point in probe.frontier)


@pytest.mark.parametrize("busy", [1.0, 2.5])
def test_a_workload_that_ignores_the_shape_is_refused(busy):
    """Also on a busy machine, where equal steps take up to 2.5 times as long by turns."""
    law = Law(lambda b, u, t: 2.0)
    device = SameForAll(law, made_lengths("speech", count=FEW), busy=busy)
    with pytest.raises(
        WorkloadError, match=r"do not depend on the batch: 1 × .* and 300 × "
    ) as raised:
        probe_law(device)
    assert "make_batch() ignore its `shape`?" in raised.value.hint


@pytest.mark.parametrize(
    ("kind", "need"),
    [
        (LawDevice, lambda b, u, t: 2.0),
        (LawDevice, lambda b, u, t: max(2.0, b * u / 100)),
        (SameForAll, lambda b, u, t: b * u / 20),
    ],
    ids=["no memory", "a floor of memory", "no time"],
)
def test_what_depends_on_the_shape_in_one_way_is_not_refused(kind, need):
    probe = probe_law(kind(Law(need), made_lengths("speech", count=FEW)))
    assert probe.frontier[-1].closed_by == "data"


def test_a_longest_example_without_a_margin_is_an_error():
    law = Law(LAWS["linear"].need, noise=0.03)
    with pytest.raises(
        ProbeError, match=r"17\.04.*leaves less than 205 MiB of 7\.45 GiB"
    ) as raised:
        probe_law(LawDevice(law, made_lengths("speech", count=FEW), fitting=1.01))
    assert "--max-length 15.72" in raised.value.hint


def test_a_search_ended_by_max_lengths_warns_and_can_continue(tmp_path):
    device = LawDevice(LAWS["blocks of length"], made_lengths("speech", count=FEW))
    few = replace(MADE, num_lengths=4, max_lengths=5)
    first = probe_on(device, tmp_path, few)
    second = probe_on(device, tmp_path, replace(few, max_lengths=40))
    assert len(first.frontier) == 5 < len(second.frontier)
    assert warns(first, "--max-lengths")
    assert not warns(second, "--max-lengths")


@pytest.mark.slow
def test_leaps_at_two_sizes_are_no_multiples_if_peaks_grow(tmp_path):
    # Memory leaps above 16 and above 32, but grows between them: 48 needs more than 33.
    device = LawDevice(
        LAWS["workspace by the octave"], made_lengths("tokens", count=3000)
    )
    settings = replace(MADE, memory_fraction=1.0, max_lengths=45)
    probe = probe_on(device, tmp_path, settings)
    assert ooms(probe.trials) <= 0.5 * len(probe.frontier)


def searched(device, **changed):
    """The trials of a search where failures are dear."""
    search = FrontierSearch(
        device.lengths,
        replace(law_settings(dear=True), **changed),
        LIMIT_BYTES,
        refine=Refinement(device.lengths, range(10, 21)),
    )
    return search_to_the_end(search, device)


def test_a_search_does_not_creep_up_to_its_limit():
    """Where failures are dear: peaks lead up to the limit, and each shows that an example takes less."""
    law = Law(lambda b, u, t: (b * u) ** 0.2)
    lengths = made_lengths("speech", count=3000)
    trials = searched(LawDevice(law, lengths, fitting=225**0.2))
    longest = [trial for trial in trials if trial.length == lengths.longest]
    assert len(longest) <= 13  # and 18 in single steps


class CachingDevice(LawDevice):
    """Its allocator reserves whole segments, and a twelfth more than the tensors take.

    It needs an emptied cache beyond a `usable` share of the limit, as where gradients lie between what steps free.
    """

    SEGMENT = 20 << 20
    usable = 1.0

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        peak = reply.trial.peak_bytes
        if peak is None:
            return reply
        reserved = math.ceil(peak * 13 / 12 / self.SEGMENT) * self.SEGMENT
        if reserved <= self.usable * self.limit_bytes:
            return altered(reply, reserved_bytes=reserved)
        trial = Trial.of(shape, "oom", worker=self.worker, flushed=True)
        return Ran(trial=trial, stage="step")


@pytest.mark.parametrize("usable", [1.0, 0.9])
def test_what_an_allocator_reserves_costs_few_trials(usable):
    device = CachingDevice(LAWS["affine"], made_lengths("sentences", count=3000))
    device.usable = usable
    probe = probe_law(device)
    lengths = len({trial.length for trial in probe.trials})
    assert len(probe.trials) <= 2.5 * lengths
    assert ooms(probe.trials) <= (0.5 if usable == 1 else 0.6) * lengths
    # A twelfth of the peaks is reserved beyond them: that part of the limit holds no batch.
    truth = LawDevice(device.law, device.lengths)
    limit = int(usable * device.limit_bytes * 12 / 13)
    truth.fits = lambda shape: truth.bytes(shape) <= limit
    for point in probe.frontier:
        if point.closed_by != "data":
            largest = int(truth.largest(np.array([point.length]))[0])
            assert 0.97 * largest - 1 <= point.batch_size <= largest


# Those that grow without leaps in the batch size.
SMOOTH = [
    ("a steep end", "sentences"),
    ("quadratic", "speech"),
    ("a floor", "tokens"),
    ("noise of 3%", "sentences"),
]


@pytest.mark.parametrize(("law", "data"), SMOOTH)
def test_few_trials_fail_where_failures_are_dear(law, data):
    trials = searched(LawDevice(LAWS[law], made_lengths(data, count=FEW)))
    lengths = len({trial.length for trial in trials})
    assert 3 * ooms(trials) <= lengths and len(trials) <= 2.5 * lengths
    assert ooms(trials) <= 2 + (law != "a steep end")


def test_estimated_times_are_those_of_steps_in_turns():
    def estimated(slower):
        device = LawDevice(
            LAWS["quadratic"], made_lengths("speech", count=FEW), slower_in_turns=slower
        )
        probe = probe_law(device)
        settings = SweepSettings(strategies=("linear",), num_buckets=(10,))
        (row,) = sweep(
            device.lengths, probe.max_batch_length, settings, costs_of(probe)
        ).rows
        return row.estimated_epoch_seconds

    assert estimated(1.2) == pytest.approx(1.2 * estimated(1.0))
