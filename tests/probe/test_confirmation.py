from dataclasses import dataclass, field

from made_trials import made_trial, ran
from msgspec.structs import replace
from verify.made_stepper import made_device

from batchtune.probe.confirmation import Turns, confirm, error_in_turns, rounds_of
from batchtune.probe.margin import Peaks
from batchtune.probe.requests import Ran
from batchtune.results import BatchShape, Device

LONG, SHORT, MIDDLE = BatchShape(4, 30.0), BatchShape(120, 1.0), BatchShape(12, 10.0)
SHAPES = [LONG, SHORT, MIDDLE]
OK = ran(SHORT, step_seconds=0.1, reserved_bytes=100, alloc_retries=0)


@dataclass
class MadeStepper:
    """Answers `ok`, but for what is planned for the n-th step of a shape; notes workers, shapes and releases."""

    planned: dict[BatchShape, list[Ran]] = field(default_factory=dict)
    reserved: list[int] = field(default_factory=list)
    steps: list[tuple[int, BatchShape, bool]] = field(default_factory=list)
    worker: int = 1

    def start(self) -> Device:
        self.worker += 1
        return made_device()

    def step(self, shape: BatchShape, *, release: bool = False) -> Ran:
        self.steps.append((self.worker, shape, release))
        if answers := self.planned.get(shape):
            answer = answers.pop(0)
            return replace(answer, trial=replace(answer.trial, worker=self.worker))
        reserved = self.reserved.pop(0) if self.reserved else 100
        return ran(
            shape,
            step_seconds=0.1,
            reserved_bytes=reserved,
            alloc_retries=0,
            worker=self.worker,
        )


def turns_of(stepper: MadeStepper) -> Turns:
    return confirm(stepper, SHAPES, rounds=2, on_step=lambda shape: True)


def test_shapes_run_in_turns_in_a_fresh_worker() -> None:
    stepper = MadeStepper()
    turns = turns_of(stepper)
    assert [(worker, shape) for worker, shape, _ in stepper.steps] == [
        (2, shape) for shape in SHAPES * 2
    ]
    assert (len(turns.passed), turns.failures, turns.confirmed) == (6, [], set(SHAPES))


def test_shapes_run_again_if_a_cache_is_kept_or_peaks_differ() -> None:
    trials = [
        made_trial(LONG, peak_bytes=1),
        made_trial(SHORT, peak_bytes=1, peak_spread_bytes=1),
    ]
    assert rounds_of(trials, 10_000) == 1
    assert rounds_of([*trials, made_trial(MIDDLE, reserved_bytes=100)], 10_000) == 2
    assert rounds_of([*trials, made_trial(MIDDLE, peak_spread_bytes=100)], 10_000) == 3


def test_what_did_not_run_in_time_is_not_confirmed() -> None:
    left = [True, True]
    turns = confirm(
        MadeStepper(), SHAPES, rounds=1, on_step=lambda shape: bool(left) and left.pop()
    )
    assert turns.confirmed == {LONG, SHORT}


def test_an_oom_in_the_first_step_does_not_end_the_turns() -> None:
    turns = confirm(
        MadeStepper({LONG: [ran(LONG, "oom")]}),
        SHAPES,
        rounds=1,
        on_step=lambda shape: True,
    )
    assert [step.outcome for step in turns.steps] == ["oom", "ok", "ok"]
    assert not turns.failures
    assert turns.confirmed == {SHORT, MIDDLE}


def test_a_shape_that_runs_out_of_memory_among_the_others_fails() -> None:
    stepper = MadeStepper({SHORT: [OK, ran(SHORT, "oom", error="CUDA out of memory")]})
    turns = turns_of(stepper)
    assert [failure.trial.shape for failure in turns.failures] == [SHORT]
    assert (
        error_in_turns(turns.failures[0].trial)
        == "in turns with the other shapes: CUDA out of memory"
    )


def test_the_others_go_on_in_the_same_worker_after_a_failure() -> None:
    stepper = MadeStepper(
        {SHORT: [ran(SHORT, "oom")], MIDDLE: [OK, ran(MIDDLE, "oom")]}
    )
    turns = turns_of(stepper)
    assert [failure.trial.shape for failure in turns.failures] == [SHORT, MIDDLE]
    assert [shape for _, shape, _ in stepper.steps] == [
        LONG,
        SHORT,
        MIDDLE,
        LONG,
        MIDDLE,
    ]
    assert stepper.worker == 2


def test_an_error_of_the_workloads_own_ends_the_turns() -> None:
    stepper = MadeStepper({LONG: [ran(LONG, "error", error="IndexError")]})
    assert [failure.trial.outcome for failure in turns_of(stepper).failures] == [
        "error"
    ]
    assert len(stepper.steps) == 1


def test_a_pass_after_emptying_the_cache_fits_and_is_counted() -> None:
    turns = turns_of(MadeStepper({MIDDLE: [ran(MIDDLE, "ok", alloc_retries=2)]}))
    assert (turns.failures, turns.alloc_retries) == ([], 2)


def test_after_one_dead_worker_the_turns_are_repeated() -> None:
    stepper = MadeStepper(
        {MIDDLE: [ran(MIDDLE, "crash", error="was killed by SIGKILL")]}
    )
    turns = turns_of(stepper)
    assert not turns.failures
    assert [shape for _, shape, _ in stepper.steps[3:]] == SHAPES * 2


def test_a_shape_that_kills_the_worker_twice_fails() -> None:
    crash = ran(MIDDLE, "crash", error="was killed by SIGSEGV")
    turns = turns_of(MadeStepper({MIDDLE: [crash, crash]}))
    assert [
        (failure.trial.shape, failure.trial.outcome) for failure in turns.failures
    ] == [(MIDDLE, "crash")]


def test_cache_growth_counts_after_each_shape_ran_once() -> None:
    assert (
        turns_of(MadeStepper(reserved=[50, 80, 90, 90, 97, 92]))
        .record([])
        .reserved_growth_bytes
        == 7
    )
    assert (
        turns_of(MadeStepper(reserved=[100, 80, 90, 90, 95, 92]))
        .record([])
        .reserved_growth_bytes
        == 0
    )


def test_a_worker_replaced_mid_turns_has_a_first_step_too() -> None:
    @dataclass
    class Renewing(MadeStepper):
        """Loses its worker with the first step of MIDDLE; the next needs more memory in its first step."""

        def step(self, shape: BatchShape, *, release: bool = False) -> Ran:
            before = len(self.steps)
            self.worker += before == 3
            self.steps.append((self.worker, shape, release))
            return ran(
                shape,
                step_seconds=0.1,
                peak_bytes=150 if before == 3 else 100,
                worker=self.worker,
            )

    peaks = Peaks(1000, [made_trial(LONG, peak_bytes=100)], turns_of(Renewing()).steps)
    assert peaks.margin.spread_bytes == 0
    assert peaks.margin.first_step_bytes == 50
