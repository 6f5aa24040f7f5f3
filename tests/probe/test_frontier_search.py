import itertools
import math
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trials import made_trial
from probe.made_device import SearchedDevice, quadratic_peak

from batchtune.lengths import Lengths
from batchtune.probe.devices.law import failed
from batchtune.probe.messages import NothingFits, SingleFails, TooLong
from batchtune.probe.requests import Ran
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, FrontierPoint, Trial

SPEECH = Lengths.of(
    np.round(np.random.default_rng(0).gamma(6.0, 2.0, 5000).clip(1, 30), 2)
)
TOKENS = Lengths.of(np.random.default_rng(1).zipf(1.5, 3000).clip(1, 180))
MANY = Lengths.of(
    np.exp(np.random.default_rng(2).normal(4, 1.2, 100_000)).clip(2, 700).round()
)
MOST_TRIALS_EVER = 400
SMOOTH = {
    "quadratic": quadratic_peak(),
    "linear": quadratic_peak(quadratic=0),
    "steep": quadratic_peak(linear=1e4, quadratic=2e5),
    "floor": lambda shape: max(1.3e9, quadratic_peak()(shape)),
    "rounded": lambda shape: -(-quadratic_peak()(shape) // 2**21) * 2**21,
    "noisy": lambda shape: quadratic_peak()(shape) * (1 + 0.002 * _noise(shape)),
}


def _noise(shape: BatchShape) -> float:
    """Between -0.5 and 0.5, the same for the same shape."""
    return hash((shape.batch_size, shape.length)) % 1000 / 1000 - 0.5


def run(
    lengths: Lengths,
    device: SearchedDevice,
    trials: list[Trial] | None = None,
    *,
    num_lengths: int = 12,
    tolerance: float = 0.01,
    max_batch_size: int | None = None,
    fresh: list[tuple[int, float]] | None = None,
) -> tuple[list[FrontierPoint], list[Trial]]:
    """Searches to the end; `fresh` collects what was asked to be run in a new worker."""
    search = search_of(lengths, device, num_lengths, tolerance, max_batch_size)
    trials = [] if trials is None else trials
    while (proposal := search.propose(trials)) is not None:
        if fresh is not None and proposal.fresh:
            fresh.append((proposal.shape.batch_size, proposal.shape.length))
        trials.append(device.trial(proposal.shape, len(trials)))
        assert len(trials) < MOST_TRIALS_EVER, "the search does not end"
    return search.frontier(trials), trials


def search_of(
    lengths: Lengths,
    device: SearchedDevice,
    num_lengths: int = 12,
    tolerance: float = 0.01,
    max_batch_size: int | None = None,
) -> FrontierSearch:
    settings = ProbeSettings(
        workload="made",
        options={},
        num_lengths=num_lengths,
        tolerance=tolerance,
        max_batch_size=max_batch_size,
    )
    return FrontierSearch(lengths, settings, device.limit_bytes)


def without_proofs(points: list[FrontierPoint]) -> list[FrontierPoint]:
    """Which trial proves a size depends on how many there were before."""
    return [msgspec.structs.replace(point, trial=None) for point in points]


def assert_true(
    lengths: Lengths,
    device: SearchedDevice,
    points: list[FrontierPoint],
    tolerance: float = 0.01,
) -> None:
    """Never above the truth, and below it by no more than the tolerance, or one example."""
    for point in points:
        truth = device.largest(
            point.length,
            lengths.histogram.count_up_to(point.length),
            point.target_length,
        )
        assert (
            truth - max(1, int(point.batch_size * tolerance))
            <= point.batch_size
            <= truth
        ), point


@pytest.mark.parametrize(
    ("lengths", "limit_bytes"),
    [(SPEECH, 1_500_000_000), (TOKENS, 8_000_000_000), (MANY, 80_000_000_000)],
    ids=["speech", "tokens", "many"],
)
@pytest.mark.parametrize("peak", SMOOTH.values(), ids=SMOOTH)
def test_a_smooth_memory_needs_few_trials_and_few_ooms(
    lengths: Lengths, limit_bytes: int, peak: Callable[..., float]
) -> None:
    try:
        points, trials = run(lengths, SearchedDevice(peak, limit_bytes))
    except TooLong:
        return
    assert len(trials) <= 2.5 * len(points)
    assert sum(trial.outcome == "oom" for trial in trials) <= 4


def test_without_known_peaks_other_lengths_bound_the_search() -> None:
    device = SearchedDevice(
        quadratic_peak(), limit_bytes=8_000_000_000, tells_peak=False
    )
    points, trials = run(SPEECH, device)
    assert len(trials) <= 5 * len(points)


LEAPS: dict[str, Callable[[BatchShape], float]] = {
    "powers of two": lambda shape: (
        1e9 + 2e6 * shape.length * (1 << (shape.batch_size - 1).bit_length())
    ),
    "every seventh": lambda shape: (
        quadratic_peak()(shape) * (1.6 if shape.batch_size % 7 == 0 else 1)
    ),
    "longer is less": lambda shape: (
        quadratic_peak()(shape) * (0.5 if shape.length > 15 else 1)
    ),
    "at random": lambda shape: 8e9 * (1 + _noise(shape)),
    "one cliff": lambda shape: 9e9 if shape.batch_size > 1234 else 2e9,
    "flat, then steep": lambda shape: 2e9 + max(0.0, shape.padded_length - 900) * 1e8,
}


@pytest.mark.parametrize("tells_peak", [True, False], ids=["peaks", "no peaks"])
@pytest.mark.parametrize("peak", LEAPS.values(), ids=LEAPS)
def test_it_always_ends_within_bisections_bound(
    peak: Callable[[BatchShape], float], tells_peak: bool
) -> None:
    device = SearchedDevice(peak, limit_bytes=8_000_000_000, tells_peak=tells_peak)
    try:
        points, trials = run(SPEECH, device)
    except (TooLong, NothingFits):
        return
    assert_within_bound(SPEECH, trials)
    for point in points:
        assert (
            peak(BatchShape(point.batch_size, point.length, point.target_length))
            <= device.limit_bytes
        )


def assert_within_bound(lengths: Lengths, trials: list[Trial]) -> None:
    """A shape that is tried again in a fresh worker counts once."""
    sizes = Counter(
        length for _, length in {(trial.batch_size, trial.length) for trial in trials}
    )
    for length, tried in sizes.items():
        assert tried <= 4 + math.log2(lengths.histogram.count_up_to(length)), length


@given(
    values=st.lists(st.integers(1, 500), min_size=1, max_size=300),
    table=st.lists(st.floats(0, 2), min_size=1, max_size=40),
    tolerance=st.sampled_from([0.0, 0.01, 0.1]),
    tells_peak=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_on_any_device_it_ends_within_bisections_bound(
    values: list[int], table: list[float], tolerance: float, tells_peak: bool
) -> None:
    lengths = Lengths.of(values)

    def peak(shape: BatchShape) -> float:
        return 1e9 * table[(shape.batch_size * 7 + int(shape.length)) % len(table)]

    trials: list[Trial] = []
    try:
        run(
            lengths,
            SearchedDevice(peak, 1_000_000_000, tells_peak),
            trials,
            tolerance=tolerance,
        )
    except (TooLong, NothingFits):
        return
    assert_within_bound(lengths, trials)


def test_a_wasteful_allocator_needs_no_oom_at_every_length() -> None:
    class Fragmented(SearchedDevice):
        def run(self, shape: BatchShape, steps: int) -> Ran:
            if self.bytes_of(shape) > 0.95 * self.limit_bytes:
                return failed(shape, "oom", "fragmented")
            return super().run(shape, steps)

    # The shortest length, too, runs into the limit.
    points, trials = run(
        SPEECH, Fragmented(quadratic_peak(linear=1e8), limit_bytes=8_000_000_000)
    )
    assert len(points) == 12
    assert sum(trial.outcome == "oom" for trial in trials) <= 8
    assert len(trials) <= 3 * len(points)


def test_the_shortest_and_the_longest_length_are_always_probed() -> None:
    points, _ = run(SPEECH, SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000))
    assert (points[0].length, points[-1].length) == (SPEECH.shortest, SPEECH.longest)
    assert points[0].closed_by in ("oom", "data")
    assert points[-1].closed_by in ("oom", "data")


def test_no_trial_has_more_examples_than_the_data_can_fill() -> None:
    _, trials = run(
        TOKENS,
        SearchedDevice(
            quadratic_peak(linear=10, quadratic=0), limit_bytes=8_000_000_000
        ),
    )
    assert all(
        trial.batch_size <= TOKENS.histogram.count_up_to(trial.length)
        for trial in trials
    )


def test_no_trial_has_more_examples_than_asked_for() -> None:
    points, trials = run(
        SPEECH,
        SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000),
        max_batch_size=64,
    )
    assert max(trial.batch_size for trial in trials) == 64
    assert points[-1].closed_by == "data"


def test_a_failure_in_turns_shrinks_the_batch_in_growing_steps() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
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


def test_first_steps_that_run_out_of_memory_make_no_length_creep() -> None:
    """Each widens the margin, which reopens lengths that have had their trials."""
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    search = search_of(SPEECH, device)
    trials: list[Trial] = []
    for worker in range(4):
        while (proposal := search.propose(trials)) is not None:
            trials.append(device.trial(proposal.shape, len(trials)))
            assert len(trials) < MOST_TRIALS_EVER, "the search does not end"
        point = search.frontier(trials)[7]
        shape = BatchShape(point.batch_size, point.length, point.target_length)
        search.task.steps.append(made_trial(shape, "oom", worker=worker))
    assert max(Counter(trial.length for trial in trials).values()) <= 20
    assert len(trials) <= 100


def failed_in_alternation(point: FrontierPoint, index: int) -> Trial:
    return Trial(
        index=index,
        batch_size=point.batch_size,
        length=point.length,
        target_length=point.target_length,
        outcome="oom",
        steps=0,
        step_seconds=None,
        peak_bytes=None,
        reserved_bytes=None,
        alloc_retries=1,
        error="in alternation with the other shapes",
        elapsed_seconds=0.0,
        confirmation=True,
    )


def test_a_failure_below_a_pass_is_retried_in_a_fresh_worker() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    undisturbed, _ = run(SPEECH, device)
    shape = 1, SPEECH.shortest
    device.faults = {shape: ["oom"]}
    fresh: list[tuple[int, float]] = []
    points, trials = run(SPEECH, device, fresh=fresh)
    assert without_proofs(points) == without_proofs(undisturbed)
    assert [(t.batch_size, t.length) for t in trials].count(shape) == 2
    assert fresh == [shape]
    assert search_of(SPEECH, device).known(trials).falls() == []


def test_conclusions_are_kept_until_a_trial_or_step_follows() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    _, trials = run(SPEECH, device)
    search = search_of(SPEECH, device)
    known = search.known(trials)
    assert search.known(list(trials)) is known
    size = known.trials[-1].batch_size
    trials.append(device.trial(BatchShape(size + 1, trials[-1].length), len(trials)))
    later = search.known(trials)
    assert later is not known
    assert len(known.trials) < len(later.trials)
    search.task.steps.append(trials[0])
    assert search.known(trials) is not later


def test_two_failures_below_a_pass_are_believed_and_reported() -> None:
    device = SearchedDevice(LEAPS["longer is less"], limit_bytes=8_000_000_000)
    fresh: list[tuple[int, float]] = []
    points, trials = run(SPEECH, device, fresh=fresh)
    sizes = [point.batch_size for point in points]
    assert all(
        device.bytes_of(BatchShape(size, point.length)) <= 8e9
        for size, point in zip(sizes, points, strict=True)
    )
    # A longer length holds no more than the shorter ones were seen to, so that a bucket's size holds for all of them.
    failed = [trial for trial in trials if trial.outcome == "oom"]
    assert not any(
        point.batch_size >= trial.batch_size
        for point in points
        for trial in failed
        if trial.length <= point.length
    )
    told = [
        (shape.batch_size, shape.length)
        for shape, _ in search_of(SPEECH, device).known(trials).falls()
    ]
    assert told
    assert sorted(fresh) == sorted(told)
    assert all(length <= 15 for _, length in told)


def test_one_crash_does_not_count_against_the_shape() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    undisturbed, _ = run(SPEECH, device)
    point = undisturbed[4]
    device.faults = {
        (point.batch_size, point.length): ["crash"],
        (2, SPEECH.longest): ["timeout"],
    }
    points, trials = run(SPEECH, device)
    assert without_proofs(points) == without_proofs(undisturbed)
    assert Counter(trial.outcome for trial in trials)["crash"] == 1


def test_a_shape_that_crashes_twice_bounds_the_frontier() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    undisturbed, _ = run(SPEECH, device)
    longest = undisturbed[-1]
    for size in range(longest.batch_size, longest.batch_size + 2):
        device.faults[size, longest.length] = ["crash", "crash"]
    points, _ = run(SPEECH, device)
    assert (points[-1].batch_size, points[-1].closed_by) == (
        longest.batch_size - 1,
        "crash",
    )


def test_an_example_that_crashes_alone_ends_the_search_at_once() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    device.faults = {(1, SPEECH.longest): ["crash", "timeout"]}
    trials: list[Trial] = []
    with pytest.raises(SingleFails, match="made timeout"):
        run(SPEECH, device, trials)
    assert len(trials) == 2


def test_nothing_fits_is_told_after_the_shortest_was_tried() -> None:
    with pytest.raises(NothingFits) as caught:
        run(SPEECH, SearchedDevice(quadratic_peak(), limit_bytes=10))
    assert (caught.value.trial.batch_size, caught.value.trial.length) == (
        1,
        SPEECH.shortest,
    )


OOM = "OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize(
    ("error", "peak_mib", "told"),
    [
        (f"{OOM} Tried to allocate 20.00 MiB.", 900, "free: the peak was 900 MiB"),
        (f"{OOM} Tried to allocate 80.00 MiB.", 900, "is too small"),
        (OOM, 500, "although memory was free: the peak was 500 MiB, the limit is 1 G"),
        (OOM, 520, "is too small"),
        (OOM, None, "is too small"),
    ],
)
def test_an_error_while_memory_was_free_is_reported_as_such(
    error: str, peak_mib: int | None, told: str
) -> None:
    peak = None if peak_mib is None else peak_mib << 20
    shape = BatchShape(1, SPEECH.longest)
    trial = Trial.of(shape, "oom", error=error, failed_peak_bytes=peak)
    nothing = NothingFits(SPEECH, "made", 1 << 30, trial)
    too_long = TooLong(SPEECH, "made", 1 << 30, trial, SPEECH.shortest)
    assert told in nothing.message
    assert ("although memory was free" in too_long.message) == ("free" in told)


def test_examples_that_are_too_long_are_counted() -> None:
    fitting = float(SPEECH.histogram.lengths[-40])
    peak = quadratic_peak(linear=1e9, quadratic=0)
    with pytest.raises(TooLong) as caught:
        run(SPEECH, SearchedDevice(peak, limit_bytes=int(1e9 + fitting * 1e9)))
    assert caught.value.fitting_length == fitting
    assert caught.value.too_long == int((SPEECH.values > fitting).sum())


def test_each_length_is_probed_with_the_worst_target_up_to_it() -> None:
    lengths = Lengths.of([1.0, 2.0, 3.0, 4.0] * 50, [9.0, 2.0, 3.0, 20.0] * 50)
    points, _ = run(
        lengths, SearchedDevice(quadratic_peak(linear=5e7), limit_bytes=8_000_000_000)
    )
    assert {point.length: point.target_length for point in points} == {
        1.0: 9.0,
        2.0: 9.0,
        3.0: 9.0,
        4.0: 20.0,
    }


def test_a_continued_search_ignores_the_workloads_own_errors() -> None:
    device = SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    _, undisturbed = run(SPEECH, device)
    failed = [
        Trial(**{**to_dict(undisturbed[0]), "outcome": "error", "peak_bytes": None})
    ]
    _, trials = run(SPEECH, device, failed)
    assert [(t.batch_size, t.length) for t in trials[1:]] == [
        (t.batch_size, t.length) for t in undisturbed
    ]


def to_dict(trial: Trial) -> dict[str, object]:
    return {name: getattr(trial, name) for name in trial.__struct_fields__}


@pytest.mark.parametrize(
    "values", [[3.0], [3.0] * 7, [1.0, 2.0], [1.0, 2.0, 3.0]], ids=str
)
def test_few_distinct_lengths_are_all_probed(values: list[float]) -> None:
    lengths = Lengths.of(values)
    points, _ = run(
        lengths, SearchedDevice(quadratic_peak(), limit_bytes=8_000_000_000)
    )
    assert [point.length for point in points] == sorted(set(values))


@given(
    values=st.lists(st.integers(1, 500), min_size=1, max_size=200),
    constant=st.floats(0, 5e9),
    linear=st.floats(1e3, 1e8),
    quadratic=st.floats(0, 1e6),
    limit_bytes=st.integers(1_000_000, 20_000_000_000),
    cut=st.integers(0, 200),
)
@settings(deadline=None, max_examples=40)
def test_it_finds_the_truth_however_often_it_is_interrupted(
    values: list[int],
    constant: float,
    linear: float,
    quadratic: float,
    limit_bytes: int,
    cut: int,
) -> None:
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
    again, continued = run(lengths, device, trials[:cut])
    assert (again, continued) == (points, trials)
