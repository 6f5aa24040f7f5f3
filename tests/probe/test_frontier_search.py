from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe.made_device import MadeDevice, quadratic_peak

from batchtune.cost import fit_cost
from batchtune.lengths import Lengths
from batchtune.probe.search import FrontierSearch, NothingFits, SearchSettings, SingleFails, TooLong
from batchtune.results import FrontierPoint, Trial

SPEECH = Lengths.of(np.round(np.random.default_rng(0).gamma(6.0, 2.0, 5000).clip(1, 30), 2))
TOKENS = Lengths.of(np.random.default_rng(1).zipf(1.5, 3000).clip(1, 180))
MOST_TRIALS_EVER = 400


def run(
    lengths: Lengths,
    device: MadeDevice,
    trials: list[Trial] | None = None,
    *,
    num_lengths: int = 12,
    tolerance: float = 0.01,
    max_batch_size: int | None = None,
) -> tuple[list[FrontierPoint], list[Trial]]:
    search = FrontierSearch(
        lengths,
        SearchSettings(
            num_lengths=num_lengths,
            tolerance=tolerance,
            max_batch_size=max_batch_size,
            limit_bytes=device.limit_bytes,
        ),
        fit_cost,
    )
    trials = [] if trials is None else trials
    while (shape := search.propose(trials)) is not None:
        trials.append(device.measure(shape, len(trials)))
        assert len(trials) < MOST_TRIALS_EVER, "the search does not end"
    return search.frontier(trials), trials


def assert_true(lengths: Lengths, device: MadeDevice, points: list[FrontierPoint], tolerance: float = 0.01) -> None:
    """Never above the truth, and below it by no more than the tolerance, or one example."""
    for point in points:
        truth = device.largest(point.length, lengths.histogram.count_up_to(point.length), point.target_length)
        assert truth - max(1, int(point.batch_size * tolerance)) <= point.batch_size <= truth, point


@pytest.mark.parametrize("lengths", [SPEECH, TOKENS], ids=["speech", "tokens"])
@pytest.mark.parametrize(
    "peak",
    [
        quadratic_peak(),
        quadratic_peak(quadratic=0),
        quadratic_peak(linear=1e4, quadratic=2e5),
        lambda shape: max(3e9, quadratic_peak()(shape)),
        lambda shape: -(-quadratic_peak()(shape) // 2**21) * 2**21,
    ],
    ids=["quadratic", "linear", "steep", "floor", "rounded"],
)
def test_the_frontier_is_the_truth_to_within_the_tolerance(lengths: Lengths, peak: Callable[..., float]) -> None:
    device = MadeDevice(peak, limit_bytes=8_000_000_000)
    points, _ = run(lengths, device)
    assert len(points) == 12
    assert_true(lengths, device, points)


def test_a_smooth_memory_needs_few_trials_and_few_ooms() -> None:
    _, trials = run(SPEECH, MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000))
    outcomes = Counter(trial.outcome for trial in trials)
    assert len(trials) <= 3 * 12
    assert outcomes["oom"] <= 4


def test_without_known_peaks_bisection_finds_the_same() -> None:
    device = MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000, tells_peak=False)
    points, _ = run(SPEECH, device)
    assert_true(SPEECH, device, points)
    assert {point.closed_by for point in points} <= {"oom", "data"}


def test_memory_in_coarse_steps_is_bisected() -> None:
    device = MadeDevice(lambda shape: -(-quadratic_peak()(shape) // 2**28) * 2**28, limit_bytes=8_000_000_000)
    points, _ = run(SPEECH, device)
    assert_true(SPEECH, device, points)


def test_memory_that_does_not_grow_ends_where_the_data_end() -> None:
    points, _ = run(SPEECH, MadeDevice(lambda shape: 1e9, limit_bytes=2_000_000_000))
    assert {point.closed_by for point in points} == {"data"}
    assert points[-1].batch_size == SPEECH.count


def test_the_shortest_and_the_longest_length_are_always_probed() -> None:
    points, _ = run(SPEECH, MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000))
    assert (points[0].length, points[-1].length) == (SPEECH.shortest, SPEECH.longest)
    assert points[0].closed_by in ("oom", "data")
    assert points[-1].closed_by in ("oom", "data")


def test_no_trial_has_more_examples_than_the_data_can_fill() -> None:
    _, trials = run(TOKENS, MadeDevice(quadratic_peak(linear=10, quadratic=0), limit_bytes=8_000_000_000))
    assert all(trial.batch_size <= TOKENS.histogram.count_up_to(trial.length) for trial in trials)


def test_no_trial_has_more_examples_than_asked_for() -> None:
    points, trials = run(SPEECH, MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000), max_batch_size=64)
    assert max(trial.batch_size for trial in trials) == 64
    assert points[-1].closed_by == "data"


def test_every_batch_at_the_limit_is_confirmed_in_alternation() -> None:
    points, trials = run(SPEECH, MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000))
    near = [point for point in points if point.closed_by != "data"]
    confirmed = [(trial.batch_size, trial.length) for trial in trials[-len(near) :]]
    assert sorted(confirmed) == sorted((point.batch_size, point.length) for point in near)
    assert [length for _, length in confirmed[:2]] == [near[-1].length, near[0].length]


def test_a_batch_that_fails_its_confirmation_is_given_up() -> None:
    device = MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    first, _ = run(SPEECH, device)
    worst = first[-1]
    device.faults = {(worst.batch_size, worst.length): ["ok", "oom"]}
    points, _ = run(SPEECH, device)
    assert [point.length for point in points] == [point.length for point in first]
    assert points[-1].batch_size < worst.batch_size


def test_a_worker_that_crashes_once_does_not_count_against_the_shape() -> None:
    device = MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    undisturbed, _ = run(SPEECH, device)
    point = undisturbed[4]
    device.faults = {(point.batch_size, point.length): ["crash"], (2, SPEECH.longest): ["timeout"]}
    points, trials = run(SPEECH, device)
    assert points == undisturbed
    assert Counter(trial.outcome for trial in trials)["crash"] == 1


def test_a_shape_that_crashes_twice_bounds_the_frontier_and_says_so() -> None:
    device = MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    undisturbed, _ = run(SPEECH, device)
    longest = undisturbed[-1]
    for size in range(longest.batch_size, longest.batch_size + 2):
        device.faults[size, longest.length] = ["crash", "crash"]
    points, _ = run(SPEECH, device)
    assert (points[-1].batch_size, points[-1].closed_by) == (longest.batch_size - 1, "crash")


def test_an_example_that_crashes_alone_ends_the_search_at_once() -> None:
    device = MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    device.faults = {(1, SPEECH.longest): ["crash", "timeout"]}
    trials: list[Trial] = []
    with pytest.raises(SingleFails, match="made timeout"):
        run(SPEECH, device, trials)
    assert len(trials) == 2


def test_nothing_fits_is_told_after_the_shortest_was_tried() -> None:
    with pytest.raises(NothingFits) as caught:
        run(SPEECH, MadeDevice(quadratic_peak(), limit_bytes=10))
    assert (caught.value.trial.batch_size, caught.value.trial.length) == (1, SPEECH.shortest)


def test_examples_that_are_too_long_are_counted() -> None:
    fitting = float(SPEECH.histogram.lengths[-40])
    peak = quadratic_peak(linear=1e9, quadratic=0)
    with pytest.raises(TooLong) as caught:
        run(SPEECH, MadeDevice(peak, limit_bytes=int(1e9 + fitting * 1e9)))
    assert caught.value.fitting_length == fitting
    assert caught.value.too_long == int((SPEECH.values > fitting).sum())


def test_each_length_is_probed_with_the_worst_target_at_or_below_it() -> None:
    lengths = Lengths.of([1.0, 2.0, 3.0, 4.0] * 50, [9.0, 2.0, 3.0, 20.0] * 50)
    points, _ = run(lengths, MadeDevice(quadratic_peak(linear=5e7), limit_bytes=8_000_000_000))
    assert {point.length: point.target_length for point in points} == {1.0: 9.0, 2.0: 9.0, 3.0: 9.0, 4.0: 20.0}


def test_the_workloads_own_errors_are_left_out_when_the_search_goes_on() -> None:
    device = MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    _, undisturbed = run(SPEECH, device)
    failed = [Trial(**{**to_dict(undisturbed[0]), "outcome": "error", "peak_bytes": None})]
    _, trials = run(SPEECH, device, failed)
    assert [(t.batch_size, t.length) for t in trials[1:]] == [(t.batch_size, t.length) for t in undisturbed]


def to_dict(trial: Trial) -> dict[str, object]:
    return {name: getattr(trial, name) for name in trial.__struct_fields__}


@pytest.mark.parametrize("values", [[3.0], [3.0] * 7, [1.0, 2.0], [1.0, 2.0, 3.0]], ids=str)
def test_few_distinct_lengths_are_all_probed(values: list[float]) -> None:
    lengths = Lengths.of(values)
    points, _ = run(lengths, MadeDevice(quadratic_peak(), limit_bytes=8_000_000_000))
    assert [point.length for point in points] == sorted(set(values))


@given(
    values=st.lists(st.integers(1, 500), min_size=1, max_size=200),
    constant=st.floats(0, 5e9),
    linear=st.floats(1e3, 1e8),
    quadratic=st.floats(0, 1e6),
    limit_bytes=st.integers(1_000_000, 20_000_000_000),
    cut=st.integers(0, 200),
)
@settings(deadline=None, max_examples=150)
def test_on_any_smooth_device_it_ends_with_the_truth_however_often_it_is_interrupted(
    values: list[int], constant: float, linear: float, quadratic: float, limit_bytes: int, cut: int
) -> None:
    lengths = Lengths.of(values)
    device = MadeDevice(quadratic_peak(constant, linear, quadratic), limit_bytes)
    try:
        points, trials = run(lengths, device)
    except TooLong as long:
        assert device.largest(long.fitting_length, 1) == 1
        longer = lengths.histogram.lengths[lengths.histogram.lengths > long.fitting_length][0]
        assert device.largest(float(longer), 1) == 0
        return
    except NothingFits:
        assert device.largest(lengths.shortest, 1) == 0
        return
    assert_true(lengths, device, points)
    again, continued = run(lengths, device, trials[:cut])
    assert (again, continued) == (points, trials)
