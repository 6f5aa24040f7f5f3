"""Do the batches at the limit also fit one after the other? Training never runs one shape alone.

An allocator keeps what it freed in blocks that another shape may not fit into. So the shapes run in turns, the cache
kept, first in the worker that the search leaves behind, then in a fresh one, as training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batchtune.probe.protocol import Stepped
from batchtune.shapes import BatchShape

# How often the shapes take turns in the search's worker, and in the fresh one.
ROUNDS = (2, 1)


class Stepper(Protocol):
    """Runs single steps; the supervisor is one."""

    def start(self) -> object:
        """Builds the workload in a new worker."""

    def step(self, shape: BatchShape, *, release: bool = False) -> Stepped:
        """One step of a new batch, the allocator's cache kept, or emptied before."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The shape that failed among the others, and how."""

    shape: BatchShape
    stepped: Stepped

    @property
    def error(self) -> str:
        """What happened, in a few words."""
        return f"in turns with the other shapes: {self.stepped.error or self.stepped.outcome}"


@dataclass(slots=True, kw_only=True)
class Turns:
    """What the turns showed.

    Attributes:
        steps: That passed.
        alloc_retries: How often the allocator emptied its cache to go on.
        reserved_growth_bytes: By how much its cache grew after each shape had been run once; None where it has none.
        failures: The shapes that failed; they take no further turns, and no fresh worker is started after them.
    """

    steps: int = 0
    alloc_retries: int = 0
    reserved_growth_bytes: int | None = None
    failures: list[Failure] = field(default_factory=list)
    _reserved_first: int = 0

    def start_anew(self) -> None:
        """Another worker's cache says nothing of the one before."""
        self._reserved_first = 0

    def note(self, turn: int, stepped: Stepped) -> None:
        """Takes a step that passed in."""
        self.steps += 1
        self.alloc_retries += stepped.alloc_retries or 0
        if stepped.reserved_bytes is None:
            return
        if turn == 0:
            self._reserved_first = max(self._reserved_first, stepped.reserved_bytes)
        else:
            growth = stepped.reserved_bytes - self._reserved_first
            self.reserved_growth_bytes = max(0, growth, self.reserved_growth_bytes or 0)


def confirm(stepper: Stepper, shapes: Sequence[BatchShape], on_step: Callable[[BatchShape], None]) -> Turns:
    """Runs the shapes in turns, and finds all that fail so in the first worker, else in the fresh one.

    A shape fails where it runs out of memory, or where it crashes or hangs a second time, in a fresh worker. Where it
    passes because the allocator empties its cache, that is counted: it fits, at the cost of time.

    Args:
        stepper: Runs the steps.
        shapes: In the order of their turns.
        on_step: Told each shape before it is run.

    Raises:
        WorkloadError, ProbeError: A worker was needed and can't be built.
    """
    turns = Turns()
    faults: set[BatchShape] = set()
    for worker, rounds in enumerate(ROUNDS):
        while not _run(stepper, shapes, rounds, turns, faults, on_step, fresh=worker > 0):
            pass
        if turns.failures:
            break
    return turns


def _run(
    stepper: Stepper,
    shapes: Sequence[BatchShape],
    rounds: int,
    turns: Turns,
    faults: set[BatchShape],
    on_step: Callable[[BatchShape], None],
    *,
    fresh: bool,
) -> bool:
    """One worker's turns; False where it has to be done once more, because the worker died."""
    turns.start_anew()
    if fresh:
        stepper.start()
    for turn, first, shape in _turns(shapes, rounds):
        if any(failure.shape == shape for failure in turns.failures):
            continue
        on_step(shape)
        stepped = stepper.step(shape, release=first and not fresh)
        if stepped.outcome in ("crash", "timeout") and shape not in faults:
            faults.add(shape)
            return False
        if stepped.outcome == "ok":
            turns.note(turn, stepped)
        else:
            turns.failures.append(Failure(shape, stepped))
        if stepped.outcome == "error":  # the workload's own: nothing more can be learnt
            break
    return True


def _turns(shapes: Sequence[BatchShape], rounds: int) -> Iterator[tuple[int, bool, BatchShape]]:
    for turn in range(rounds):
        for position, shape in enumerate(shapes):
            yield turn, turn == 0 and position == 0, shape
