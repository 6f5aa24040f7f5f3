import itertools
import math
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_trials import made_trial
from probe.made_device import SearchedDevice, quadratic_peak, search_to_the_end

from batchtune.lengths import Lengths
from batchtune.probe.messages import IgnoresShape, NothingFits, TooLong
from batchtune.probe.search import FrontierSearch, are_alike
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, Trial

SPEECH = Lengths.of(
    np.round(np.random.default_rng(0).gamma(6.0, 2.0, 5000).clip(1, 30), 2)
)


def run(
    lengths,
    device,
    trials=None,
    *,
    fresh=None,
    **settings,
):
    """Searches to the end; `fresh` collects what was asked to be run in a new worker."""
    search = search_of(lengths, device, **settings)
    trials = search_to_the_end(search, device, trials, fresh)
    return search.frontier(trials), trials


def search_of(lengths, device, **settings):
    given = {"num_lengths": 12, "tolerance": 0.01, **settings}
    probed_with = ProbeSettings(workload="made", options={}, **given)
    return FrontierSearch(lengths, probed_with, device.limit_bytes)


def of_8_gb(peak=None):
    return SearchedDevice(peak or quadratic_peak(), limit_bytes=8_000_000_000)


def without_proofs(points):
    """Which trial proves a size depends on how many there were before."""
    return [msgspec.structs.replace(point, trial=None) for point in points]


def assert_true(lengths, device, points):
    """Never above the truth, and below it by no more than a per cent, or one example."""
    for point in points:
        cap = lengths.histogram.count_up_to(point.length)
        truth = device.largest(point.length, cap, point.target_length)
        nearly = truth - max(1, int(point.batch_size * 0.01))
        assert nearly <= point.batch_size <= truth, point


def test_without_known_peaks_other_lengths_bound_the_search():
    device = SearchedDevice(
        quadratic_peak(), limit_bytes=8_000_000_000, tells_peak=False
    )
    points, trials = run(SPEECH, device)
    assert len(trials) <= 5 * len(points)


def assert_within_bound(lengths, trials, most):
    """A shape that is tried again in a fresh worker counts once."""
    sizes = Counter(
        length for _, length in {(trial.batch_size, trial.length) for trial in trials}
    )
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


def test_no_trial_has_more_examples_than_asked_for():
    points, trials = run(
        SPEECH,
        of_8_gb(),
        max_batch_size=64,
    )
    assert max(trial.batch_size for trial in trials) == 64
    assert points[-1].closed_by == "data"


def test_a_failure_in_turns_shrinks_the_batch_in_growing_steps():
    device = of_8_gb()
    points, trials = run(SPEECH, device)
    given_up = []
    for _ in range(6):
        worst = points[-1]
        given_up.append(worst.batch_size)
        trials.append(failed_in_alternation(worst, len(trials)))
        points, trials = run(SPEECH, device, trials)
        assert points[-1].closed_by == "oom"
        assert [point.length for point in points] == sorted(
            {point.length for point in points}
        )
    steps = [before - after for before, after in itertools.pairwise(given_up)]
    assert steps[-1] >= 8
    assert sum(steps) < 40


def test_first_steps_that_run_out_of_memory_make_no_length_creep():
    """Each widens the margin, which reopens lengths that have had their trials."""
    device = of_8_gb()
    search = search_of(SPEECH, device)
    trials = []
    for worker in range(4):
        search_to_the_end(search, device, trials)
        point = search.frontier(trials)[7]
        shape = BatchShape(point.batch_size, point.length, point.target_length)
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


def failed_in_alternation(point, index):
    shape = BatchShape(point.batch_size, point.length, point.target_length)
    error = "in alternation with the other shapes"
    return made_trial(shape, "oom", index=index, error=error, confirmation=True)


def test_a_failure_below_a_pass_is_retried_in_a_fresh_worker():
    device = of_8_gb()
    undisturbed, _ = run(SPEECH, device)
    shape = 1, SPEECH.shortest
    device.faults = {shape: ["oom"]}
    fresh = []
    points, trials = run(SPEECH, device, fresh=fresh)
    assert without_proofs(points) == without_proofs(undisturbed)
    assert [(t.batch_size, t.length) for t in trials].count(shape) == 2
    assert fresh == [shape]
    assert search_of(SPEECH, device).known(trials).falls() == []


def test_one_crash_does_not_count_against_the_shape():
    device = of_8_gb()
    undisturbed, _ = run(SPEECH, device)
    point = undisturbed[4]
    device.faults = {
        (point.batch_size, point.length): ["crash"],
        (2, SPEECH.longest): ["timeout"],
    }
    points, trials = run(SPEECH, device)
    assert without_proofs(points) == without_proofs(undisturbed)
    assert Counter(trial.outcome for trial in trials)["crash"] == 1


def test_a_shape_that_crashes_twice_bounds_the_frontier():
    device = of_8_gb()
    undisturbed, _ = run(SPEECH, device)
    longest = undisturbed[-1]
    for size in range(longest.batch_size, longest.batch_size + 2):
        device.faults[size, longest.length] = ["crash", "crash"]
    points, _ = run(SPEECH, device)
    assert (points[-1].batch_size, points[-1].closed_by) == (
        longest.batch_size - 1,
        "crash",
    )


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
    peak = None if peak_mib is None else peak_mib << 20
    shape = BatchShape(1, SPEECH.longest)
    trial = Trial.of(shape, "oom", error=error, failed_peak_bytes=peak)
    nothing = NothingFits(SPEECH, "made", 1 << 30, trial)
    too_long = TooLong(SPEECH, "made", 1 << 30, trial, SPEECH.shortest)
    assert told in nothing.message
    assert ("although memory was free" in too_long.message) == ("free" in told)


def test_a_continued_search_ignores_the_workloads_own_errors():
    device = of_8_gb()
    _, undisturbed = run(SPEECH, device)
    first = undisturbed[0]
    failed = [msgspec.structs.replace(first, outcome="error", peak_bytes=None)]
    _, trials = run(SPEECH, device, failed)
    assert [(t.batch_size, t.length) for t in trials[1:]] == [
        (t.batch_size, t.length) for t in undisturbed
    ]


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
        longer = lengths.histogram.lengths[
            lengths.histogram.lengths > long.fitting_length
        ][0]
        assert device.largest(float(longer), 1) == 0
        return
    except NothingFits:
        assert device.largest(lengths.shortest, 1) == 0
        return
    assert_true(lengths, device, points)
    if points:  # what fits may leave no margin
        ends = (points[0], points[-1])
        assert [end.length for end in ends] == [lengths.shortest, lengths.longest]
        assert {end.closed_by for end in ends} <= {"oom", "data"}
    for trial in trials:
        assert trial.batch_size <= lengths.histogram.count_up_to(trial.length)
    again, continued = run(lengths, device, trials[:cut])
    assert (again, continued) == (points, trials)


MIB = 1 << 20


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
    small = BatchShape(1, 10.0)
    large = BatchShape(ratio, 10.0)
    known = SimpleNamespace(
        passed={small, large},
        median_seconds={small: 0.001, large: 0.001 * more_time}.get,
        peaks=SimpleNamespace(
            highest={small: 99 * MIB, large: 99 * MIB + more_bytes}.get,
            margin=SimpleNamespace(bytes=MIB // 2),
        ),
    )
    assert are_alike(known, (small, large), ratio) == expected
