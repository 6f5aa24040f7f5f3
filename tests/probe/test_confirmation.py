from dataclasses import dataclass, field

from batchtune.probe.confirmation import Turns, confirm
from batchtune.probe.protocol import Stepped
from batchtune.shapes import BatchShape

LONG, SHORT, MIDDLE = BatchShape(4, 30.0), BatchShape(120, 1.0), BatchShape(12, 10.0)
SHAPES = [LONG, SHORT, MIDDLE]
OK = Stepped(outcome="ok", step_seconds=0.1, reserved_bytes=100, alloc_retries=0)


@dataclass
class MadeStepper:
    """Answers `ok`, but for what is planned for the n-th step of a shape; notes workers, shapes and releases."""

    planned: dict[BatchShape, list[Stepped]] = field(default_factory=dict)
    reserved: list[int] = field(default_factory=list)
    steps: list[tuple[int, BatchShape, bool]] = field(default_factory=list)
    worker: int = 1

    def start(self) -> None:
        self.worker += 1

    def step(self, shape: BatchShape, *, release: bool = False) -> Stepped:
        self.steps.append((self.worker, shape, release))
        if answers := self.planned.get(shape):
            return answers.pop(0)
        reserved = self.reserved.pop(0) if self.reserved else 100
        return Stepped(outcome="ok", step_seconds=0.1, reserved_bytes=reserved, alloc_retries=0)


def turns_of(stepper: MadeStepper) -> Turns:
    return confirm(stepper, SHAPES, on_step=lambda shape: None)


def test_the_shapes_take_turns_twice_in_the_worker_that_is_there_and_once_in_a_fresh_one() -> None:
    stepper = MadeStepper()
    turns = turns_of(stepper)
    assert [(worker, shape) for worker, shape, _ in stepper.steps] == [
        *((1, shape) for shape in SHAPES * 2),
        *((2, shape) for shape in SHAPES),
    ]
    assert (turns.steps, turns.failures) == (9, [])


def test_the_cache_is_emptied_once_before_and_never_between() -> None:
    stepper = MadeStepper()
    turns_of(stepper)
    assert [release for *_, release in stepper.steps] == [True] + [False] * 8


def test_a_shape_that_runs_out_of_memory_among_the_others_fails() -> None:
    stepper = MadeStepper({SHORT: [OK, Stepped(outcome="oom", error="CUDA out of memory")]})
    turns = turns_of(stepper)
    assert [failure.shape for failure in turns.failures] == [SHORT]
    assert turns.failures[0].error == "in turns with the other shapes: CUDA out of memory"


def test_the_others_go_on_without_the_one_that_failed_and_no_fresh_worker_is_started() -> None:
    stepper = MadeStepper({SHORT: [Stepped(outcome="oom")], MIDDLE: [OK, Stepped(outcome="oom")]})
    turns = turns_of(stepper)
    assert [failure.shape for failure in turns.failures] == [SHORT, MIDDLE]
    assert [shape for _, shape, _ in stepper.steps] == [LONG, SHORT, MIDDLE, LONG, MIDDLE]
    assert stepper.worker == 1


def test_an_error_of_the_workloads_own_ends_the_turns() -> None:
    stepper = MadeStepper({LONG: [Stepped(outcome="error", error="IndexError")]})
    assert [failure.stepped.outcome for failure in turns_of(stepper).failures] == ["error"]
    assert len(stepper.steps) == 1


def test_a_shape_that_passes_because_the_cache_was_emptied_fits_and_that_is_counted() -> None:
    turns = turns_of(MadeStepper({MIDDLE: [Stepped(outcome="ok", alloc_retries=2)]}))
    assert (turns.failures, turns.alloc_retries) == ([], 2)


def test_a_worker_that_dies_once_is_forgiven_and_its_turns_are_done_anew() -> None:
    stepper = MadeStepper({MIDDLE: [Stepped(outcome="crash", error="was killed by SIGKILL")]})
    turns = turns_of(stepper)
    assert not turns.failures
    assert [shape for _, shape, _ in stepper.steps[3:9]] == SHAPES * 2


def test_a_shape_that_kills_the_worker_twice_fails() -> None:
    crash = Stepped(outcome="crash", error="was killed by SIGSEGV")
    turns = turns_of(MadeStepper({MIDDLE: [crash, crash]}))
    assert [(failure.shape, failure.stepped.outcome) for failure in turns.failures] == [(MIDDLE, "crash")]


def test_the_caches_growth_is_what_comes_after_each_shape_has_been_run_once() -> None:
    assert turns_of(MadeStepper(reserved=[50, 80, 90, 90, 97, 92])).reserved_growth_bytes == 7
    assert turns_of(MadeStepper(reserved=[100, 80, 90, 90, 95, 92])).reserved_growth_bytes == 0
