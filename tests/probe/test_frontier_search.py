import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_devices import MIB
from made_trials import altered, made_trial
from msgspec.structs import replace
from probe.made_device import SearchedDevice, quadratic_peak, search_to_the_end

from batchtune.lengths import Lengths
from batchtune.probe.knowledge import Refinement
from batchtune.probe.messages import IgnoresShape, NothingFits, TooLong
from batchtune.probe.search import FrontierSearch, are_alike
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape

SPEECH = Lengths.of(
    np.round(np.random.default_rng(0).gamma(6.0, 2.0, 5000).clip(1, 30), 2)
)


SETTINGS = ProbeSettings(workload="made", options={}, num_lengths=12, tolerance=0.01)


def run(lengths, device, trials=None, **settings):
    """Searches to the end."""
    search = search_of(lengths, device, **settings)
    trials = search_to_the_end(search, device, trials)
    return search.frontier(trials), trials


def search_of(lengths, device, **settings):
    return FrontierSearch(lengths, replace(SETTINGS, **settings), device.limit_bytes)


@pytest.fixture
def device():
    return SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)


@pytest.fixture
def undisturbed(device):
    """The frontier and the trials of a search in which nothing goes wrong."""
    return run(SPEECH, device)


def without_proofs(points):
    """Which trial proves a size depends on how many there were before."""
    return [replace(point, trial=None) for point in points]


def shape_of(point):
    return BatchShape(point.batch_size, point.length, point.target_length)


def shapes_of(trials):
    return [trial.shape for trial in trials]


def test_without_known_peaks_other_lengths_bound_the_search(device):
    device.tells_peak = False
    points, trials = run(SPEECH, device)
    assert len(trials) <= 5 * len(points)


def assert_within_bound(lengths, trials, most):
    """A shape that is tried again in a fresh worker counts once."""
    sizes = Counter(shape.length for shape in set(shapes_of(trials)))
    for length, tried in sizes.items():
        assert tried <= most + math.log2(lengths.histogram.count_up_to(length)), length


@given(
    values=st.lists(st.integers(1, 500), min_size=1, max_size=300),
    table=st.lists(st.floats(0, 2), min_size=1, max_size=40),
    tolerance=st.sampled_from([0.0, 0.01, 0.1]),
    tells_peak=st.booleans(),
    ranks=st.sampled_from([None, 2]),
)
def test_on_any_device_it_ends_within_bisections_bound(
    values, table, tolerance, tells_peak, ranks
):
    """Where ranks have to start anew after a failure, failures have a bound of their own."""
    lengths = Lengths.of(values)

    def peak(shape):
        return 1e9 * table[(shape.batch_size * 7 + int(shape.length)) % len(table)]

    device = SearchedDevice(peak, 1_000_000_000, tells_peak)
    try:
        points, trials = run(lengths, device, tolerance=tolerance, nproc_per_node=ranks)
    except (TooLong, NothingFits, IgnoresShape):
        return
    if ranks is None:
        assert_within_bound(lengths, trials, most=5)
    else:
        failed = [trial for trial in trials if trial.outcome != "ok"]
        assert_within_bound(lengths, failed, most=2)
    for point in points:
        proof = trials[point.trial]
        assert proof.outcome == "ok"
        assert proof.batch_size >= point.batch_size and proof.length >= point.length


def test_no_trial_has_more_examples_than_asked_for(device):
    points, trials = run(SPEECH, device, max_batch_size=64)
    assert max(trial.batch_size for trial in trials) == 64
    assert points[-1].closed_by == "data"


def test_the_trainings_own_size_is_tried_first(device):
    """A probe that ended early recommended smaller batches than the training had."""
    search = search_of(SPEECH, device)
    search.task.own_size = 20
    trials = search_to_the_end(search, device)
    assert trials[1].shape == BatchShape(20, SPEECH.longest)


def test_a_failure_in_turns_shrinks_the_batch_in_growing_steps(device, undisturbed):
    points, trials = undisturbed
    given_up = []
    for _ in range(6):
        given_up.append(points[-1].batch_size)
        failed = made_trial(
            shape_of(points[-1]), "oom", index=len(trials), confirmation=True
        )
        points, trials = run(SPEECH, device, [*trials, failed])
        assert points[-1].closed_by == "oom"
        assert [point.length for point in points] == sorted(
            {point.length for point in points}
        )
    steps = [before - after for before, after in itertools.pairwise(given_up)]
    assert steps[-1] >= 8
    assert sum(steps) < 40


def test_first_steps_that_run_out_of_memory_make_no_length_creep(device):
    """Each widens the margin, which reopens lengths that have had their trials."""
    search = search_of(SPEECH, device)
    trials = []
    for worker in range(4):
        search_to_the_end(search, device, trials)
        shape = shape_of(search.frontier(trials)[7])
        search.task.steps.append(made_trial(shape, "oom", worker=worker))
    assert max(Counter(trial.length for trial in trials).values()) <= 20
    assert len(trials) <= 100


def test_below_a_size_that_nearly_fitted_no_search_creeps():
    """It takes the middle: whether that passes or fails, the length is closed."""
    lengths = Lengths.of([10.0] * 2000)
    search = search_of(lengths, SearchedDevice(quadratic_peak(), limit_bytes=1_000_000))
    sizes = {1: 100_000, 8: 106_000, 1100: 950_000}
    trials = [
        made_trial(
            BatchShape(size, 10.0),
            peak_bytes=peak,
            reserved_bytes=peak + 10_000,
            rest_bytes=90_000,
        )
        for size, peak in sizes.items()
    ]
    trials.append(made_trial(BatchShape(1151, 10.0), "oom", flushed=True))
    assert search.propose(trials).shape.batch_size == 1125


class CachingDevice(SearchedDevice):
    """The limit is one of what an allocator reserves, which is more than the tensors, and at some lengths far more."""

    def __init__(self, fragmented=()):
        self.fragmented = fragmented
        super().__init__(self._reserved, limit_bytes=22_000 * MIB)

    def _overhead(self, length):
        return 1.05 if length in self.fragmented else 1.015

    def _reserved(self, shape):
        peak = max(491.0, 349.0 + 10.5 * shape.padded_length) * MIB
        return peak * self._overhead(shape.length)

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        reserved = reply.trial.peak_bytes
        if reserved is None:
            return reply
        peak = int(reserved / self._overhead(shape.length))
        return altered(reply, peak_bytes=peak, reserved_bytes=reserved)


def test_a_floor_under_small_batches_costs_no_trials():
    """The model missed a batch of one by 26%, and was not believed at any length."""
    device = CachingDevice()
    points, trials = run(SPEECH, device)
    assert len(trials) <= 20  # 27 when it was not
    for point in points[1:]:
        size = device.largest(point.length, SPEECH.count_within(point.length, None))
        assert 0.97 * size <= point.batch_size <= size


def test_what_is_reserved_at_a_length_ends_its_search():
    """Its tensors left room, its blocks did not: the next size ran out of memory."""
    points, _ = run(SPEECH, CachingDevice())
    device = CachingDevice([point.length for point in points[1:-1:2]])
    search = search_of(SPEECH, device)
    search.task.expandable = True
    trials = search_to_the_end(search, device)
    assert sum(trial.outcome == "oom" for trial in trials) <= 3


def test_a_failure_below_a_pass_is_retried_in_a_fresh_worker(device, undisturbed):
    shape = BatchShape(1, SPEECH.shortest)
    device.faults = {shape: ["oom"]}
    points, trials = run(SPEECH, device)
    assert without_proofs(points) == without_proofs(undisturbed[0])
    tried = [trial for trial in trials if trial.shape == shape]
    assert [trial.outcome for trial in tried] == ["oom", "ok"]
    # That is the only worker that was asked for.
    assert tried[1].worker == tried[0].worker + 1 == trials[-1].worker
    assert search_of(SPEECH, device).known(trials).falls() == []


def test_one_crash_does_not_count_against_the_shape(device, undisturbed):
    device.faults = {
        shape_of(undisturbed[0][4]): ["crash"],
        BatchShape(2, SPEECH.longest): ["timeout"],
    }
    points, trials = run(SPEECH, device)
    assert without_proofs(points) == without_proofs(undisturbed[0])
    assert [trial.outcome for trial in trials].count("crash") == 1


def test_a_shape_that_crashes_twice_bounds_the_frontier(device, undisturbed):
    size = undisturbed[0][-1].batch_size
    for crashing in (size, size + 1):
        device.faults[BatchShape(crashing, SPEECH.longest)] = ["crash", "crash"]
    points, _ = run(SPEECH, device)
    assert (points[-1].batch_size, points[-1].closed_by) == (size - 1, "crash")


OOM = "OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize(
    ("error", "peak_mib", "told"),
    [
        (f"{OOM} Tried to allocate 20.00 MiB.", 900, "free: the peak was 900 MiB"),
        (f"{OOM} Tried to allocate 180.00 MiB.", 900, "It needs more than 1.05 GiB"),
        ("you tried to allocate 188743680 bytes", 900, "It needs more than 1.05 GiB"),
        (OOM, 500, "although memory was free: the peak was 500 MiB, the limit is 1 G"),
        (OOM, 520, "It needs more than 1 GiB"),
        (OOM, None, "is too small"),
    ],
)
def test_an_error_while_memory_was_free_is_reported_as_such(error, peak_mib, told):
    peak = peak_mib and peak_mib * MIB
    shape = BatchShape(1, SPEECH.longest)
    trial = made_trial(shape, "oom", error=error, failed_peak_bytes=peak)
    nothing = NothingFits(SPEECH, "made", 1 << 30, trial)
    too_long = TooLong(SPEECH, "made", 1 << 30, trial, SPEECH.shortest)
    assert told in nothing.message
    assert ("although memory was free" in too_long.message) == ("free" in told)


def test_a_continued_search_ignores_the_workloads_own_errors(device, undisturbed):
    expected = shapes_of(undisturbed[1])
    _, trials = run(SPEECH, device, [made_trial(expected[0], "error")])
    assert shapes_of(trials[1:]) == expected


@example([1], 0.0, 1000.0, 998_001.0, 1_000_000, 0)  # no margin
@given(
    values=st.lists(st.integers(1, 500), min_size=1, max_size=200),
    constant=st.floats(0, 5e9),
    linear=st.floats(1e3, 1e8),
    quadratic=st.floats(0, 1e6),
    limit_bytes=st.integers(1_000_000, 20_000_000_000),
    cut=st.integers(0, 200),
)
def test_it_finds_the_truth_however_often_it_is_interrupted(
    values, constant, linear, quadratic, limit_bytes, cut
):
    lengths = Lengths.of(values)
    device = SearchedDevice(quadratic_peak(constant, linear, quadratic), limit_bytes)
    try:
        points, trials = run(lengths, device)
    except TooLong as long:
        assert device.largest(long.fitting_length, 1) == 1
        distinct = lengths.histogram.lengths
        longer = distinct[distinct > long.fitting_length][0]
        assert device.largest(longer, 1) == 0
        return
    except NothingFits:
        assert device.largest(lengths.shortest, 1) == 0
        return
    for point in points:
        cap = lengths.histogram.count_up_to(point.length)
        truth = device.largest(point.length, cap)
        nearly = truth - max(1, int(point.batch_size * 0.01))
        assert nearly <= point.batch_size <= truth, point
    if points:  # what fits may leave no margin
        ends = (points[0], points[-1])
        assert [end.length for end in ends] == [lengths.shortest, lengths.longest]
        assert {end.closed_by for end in ends} <= {"oom", "data"}
    for trial in trials:
        assert trial.batch_size <= lengths.histogram.count_up_to(trial.length)
    again, continued = run(lengths, device, trials[:cut])
    assert (again, continued) == (points, trials)


@pytest.mark.parametrize(
    ("ratio", "more_bytes", "more_time", "expected"),
    [
        (800, 0, 1.22, True),  # 1.80 and 1.48 ms
        (800, 3 * MIB, 0.82, True),
        (800, 5 * MIB, 1.0, False),
        (8, MIB, 1.9, True),
        (8, 3 * MIB, 1.0, False),
        (800, 0, 10.0, False),
        (7, 0, 1.0, False),
    ],
)
def test_batches_are_alike_within_what_a_heap_varies_by(
    ratio, more_bytes, more_time, expected
):
    shapes = (BatchShape(1, 10.0), BatchShape(ratio, 10.0))
    known = SimpleNamespace(
        passed={*shapes},
        median_seconds=dict(zip(shapes, (1.0, more_time), strict=True)).get,
        peaks=SimpleNamespace(
            highest=dict(zip(shapes, (0, more_bytes), strict=True)).get,
            margin=SimpleNamespace(bytes=MIB // 2),
        ),
    )
    assert are_alike(known, shapes, ratio) == expected


def test_the_length_before_a_gap_is_measured_where_it_limits_all():
    """One example of 246, none between 173 and it: unmeasured, as few of 173 count as fitting as of 246."""
    most = np.random.default_rng(0).gamma(40.0, 3.5, 3000).clip(20, 172).round()
    lengths = Lengths.of([*most, *[172.0] * 20, 172.5, 173.0, 246.0])
    device = SearchedDevice(quadratic_peak(linear=2e6), limit_bytes=16 << 30)
    settings = replace(SETTINGS, num_lengths=5, max_lengths=60)
    search = FrontierSearch(
        lengths, settings, device.limit_bytes, refine=Refinement(lengths, (10,))
    )
    points = search.frontier(search_to_the_end(search, device))
    assert 173 in [point.length for point in points]
