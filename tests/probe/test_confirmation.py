import pytest
from made_trials import altered, made_trial, ran
from noted_device import NotedDevice, planned

from batchtune.probe.confirmation import confirm, rounds_of
from batchtune.probe.outcomes import Peaks
from batchtune.results import BatchShape

LONG, SHORT, MIDDLE = BatchShape(4, 30.0), BatchShape(120, 1.0), BatchShape(12, 10.0)
SHAPES = [LONG, SHORT, MIDDLE]


def stepper_of(replies=None):
    """A device on which all passes but what is planned."""
    return NotedDevice(
        bytes_of=lambda shape: 10.0,
        seconds_of=lambda shape: 0.1,
        limit_bytes=100,
        base_bytes=1,
        fault=planned(replies or {}),
    )


def turns_of(stepper, rounds=2, **settings):
    return confirm(stepper, SHAPES * rounds, on_step=lambda shape: True, **settings)


def test_shapes_run_again_if_a_cache_is_kept_or_peaks_differ():
    trials = [
        made_trial(LONG, peak_bytes=1),
        made_trial(SHORT, peak_bytes=1, peak_spread_bytes=1),
    ]
    assert rounds_of(trials, 10_000) == 1
    assert rounds_of([*trials, made_trial(MIDDLE, reserved_bytes=100)], 10_000) == 2
    assert rounds_of([*trials, made_trial(MIDDLE, peak_spread_bytes=100)], 10_000) == 3


def test_what_did_not_run_in_time_is_not_confirmed():
    in_time = iter([True, True, False])
    turns = confirm(stepper_of(), SHAPES, on_step=lambda shape: next(in_time))
    assert turns.confirmed == {LONG, SHORT}


def test_an_oom_in_the_first_step_does_not_end_the_turns():
    turns = turns_of(stepper_of({LONG: [ran(LONG, "oom")]}), rounds=1)
    assert [step.outcome for step in turns.steps] == ["oom", "ok", "ok"]
    assert not turns.failures
    assert turns.confirmed == {SHORT, MIDDLE}


def test_the_others_go_on_in_the_same_worker_after_a_failure():
    stepper = stepper_of(
        {SHORT: [ran(SHORT, "oom")], MIDDLE: [None, ran(MIDDLE, "oom")]}
    )
    turns = turns_of(stepper)
    assert [failure.trial.shape for failure in turns.failures] == [SHORT, MIDDLE]
    assert stepper.shapes == [
        LONG,
        SHORT,
        MIDDLE,
        LONG,
        MIDDLE,
    ]
    assert stepper.worker == 1


def test_optimizer_steps_of_several_batches_have_different_ones():
    stepper = stepper_of({MIDDLE: [ran(MIDDLE, "oom")]})
    turns = turns_of(stepper, batches_per_step=3)
    assert [(step.shape, *step.others) for step in stepper.steps] == [
        (LONG,),
        (SHORT, MIDDLE, LONG),
        (SHORT, LONG, SHORT),
    ]
    assert [failure.trial.shape for failure in turns.failures] == [MIDDLE]
    assert turns.confirmed == {LONG, SHORT}
    # Only the peak of a step's own batch is one of its shape.
    assert [step.peak_bytes is None for step in turns.steps] == [
        False,
        True,
        True,
        True,
    ]


def test_what_kills_the_worker_twice_fails_others_run_alone():
    crash = ran(MIDDLE, "crash", error="was killed by SIGKILL")
    stepper = stepper_of({MIDDLE: [crash, crash]})
    assert turns_of(stepper, batches_per_step=3).failed == {MIDDLE}
    assert all(not step.others for step in stepper.steps[2:])


def test_an_error_of_the_workloads_own_ends_the_turns():
    stepper = stepper_of({LONG: [ran(LONG, "error", error="IndexError")]})
    assert [failure.trial.outcome for failure in turns_of(stepper).failures] == [
        "error"
    ]
    assert len(stepper.steps) == 1


def test_a_pass_after_emptying_the_cache_fits_and_is_counted():
    turns = turns_of(stepper_of({MIDDLE: [ran(MIDDLE, "ok", alloc_retries=2)]}))
    assert (turns.failures, turns.alloc_retries) == ([], 2)


def test_after_one_dead_worker_the_turns_are_repeated():
    stepper = stepper_of(
        {MIDDLE: [ran(MIDDLE, "crash", error="was killed by SIGKILL")]}
    )
    turns = turns_of(stepper)
    assert not turns.failures and turns.record([]).workers == 2
    assert stepper.shapes[3:] == SHAPES * 2


@pytest.mark.parametrize(
    ("reserved", "growth"),
    [((50, 80, 90, 90, 97, 92), 7), ((100, 80, 90, 90, 95, 92), 0)],
)
def test_cache_growth_counts_after_each_shape_ran_once(reserved, growth):
    stepper = stepper_of()
    stepper.alter = lambda reply, number: altered(
        reply, reserved_bytes=reserved[number]
    )
    assert turns_of(stepper).record([]).reserved_growth_bytes == growth


def test_a_worker_replaced_mid_turns_has_a_first_step_too():
    stepper = stepper_of()

    def replaced_at_the_fourth(reply, number):
        """Lose the worker with the fourth step; the next needs more memory in its first step."""
        if number == 2:
            stepper.lose_worker()
        return altered(reply, peak_bytes=150 if number == 3 else 100)

    stepper.alter = replaced_at_the_fourth
    peaks = Peaks(1000, [made_trial(LONG, peak_bytes=100)], turns_of(stepper).steps)
    assert peaks.margin.spread_bytes == 0
    assert peaks.margin.first_step_bytes == 50


def test_what_turns_of_an_earlier_run_left_is_no_beginning():
    first, again = (
        made_trial(SHORT, peak_bytes=600, held_bytes=held, worker=worker)
        for held, worker in ((100, 1), (500, 2))
    )
    failed = made_trial(LONG, "oom", held_bytes=500, worker=2, confirmation=True)
    assert Peaks(1000, [first, failed, again], []).margin.spread_bytes == 0


def test_peaks_of_small_batches_do_not_widen_the_margin():
    small = made_trial(SHORT, peak_bytes=300, peak_spread_bytes=90, worker=1)
    large = made_trial(LONG, peak_bytes=900, peak_spread_bytes=5, worker=1)
    assert Peaks(1000, [small, large], []).margin.spread_bytes == 5


def test_what_a_first_step_lacked_is_what_the_allocator_had_left():
    large, small = BatchShape(9, 16.0), BatchShape(8, 16.0)
    trials = [
        made_trial(shape, peak_bytes=peak, reserved_bytes=reserved, worker=1)
        for shape, peak, reserved in (
            (SHORT, 100, 110),
            (small, 880, 950),
            (large, 900, 990),
        )
    ]
    failed = made_trial(large, "oom", worker=2)
    peaks = Peaks(1000, trials, [failed])
    assert peaks.margin.first_step_bytes == 4 * (1000 - 990)
    assert not peaks.leaves_margin(large)
    assert peaks.leaves_margin(small)


@pytest.mark.parametrize(
    ("size", "reserved", "is_left"), [(8, 992, False), (1, 992, True), (8, None, True)]
)
def test_a_cache_holds_memory_that_no_batch_can_use(size, reserved, is_left):
    """Unless the batch is a single example: no smaller one can take its place."""
    shape = BatchShape(size, 16.0)
    trials = [
        made_trial(shape, peak_bytes=990, reserved_bytes=reserved, worker=1)
        for shape in (SHORT, shape)
    ]
    assert Peaks(1000, trials, []).leaves_margin(shape) is is_left
