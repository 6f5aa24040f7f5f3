"""Finds out whether the workers of a loader repeat each other, so that their batches count as no throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from batchtune.errors import LoaderError
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.demand import epoch_examples
from batchtune.loaders.runner import LoaderRunner, Measurement, Plan
from batchtune.results import Arguments
from batchtune.units import counted, format_number

# How many batches of each worker are compared, and for how long they are taken at most.
_ROUNDS = 8
_SECONDS = 10.0
# Fewer batches of each worker might be equal by chance.
_MIN_ROUNDS = 4


class WorkerRepeats:
    """Whether workers repeat each other, by their first batches or by the examples of an epoch.

    Attributes:
        error: How they do, and what to change, on two lines; None as long as they are not known to.
    """

    def __init__(self, kind: LoaderKind, *, dealt: bool) -> None:
        self.error: str | None = None
        self._kind = kind
        self._dealt = dealt

    def setting_to_compare(self, settings: Sequence[Arguments]) -> Arguments | None:
        """Return the first setting with several workers; None if all have their examples dealt to them."""
        if self._dealt:
            return None
        return next((arguments for arguments in settings if self._kind.workers(arguments) > 1), None)

    def compare_batches(self, runner: LoaderRunner, arguments: Arguments) -> None:
        """Compare the first batches of the workers by value."""
        workers = self._kind.workers(arguments)
        plan = Plan(seconds=_SECONDS, batches=_ROUNDS * workers, digests=True)
        with suppress(LoaderError):  # which its measurement shows, too
            measured = runner.measure(arguments, plan, self._kind)
            if measured.outcome == "ok" and repeated_batches(measured.epochs[0].digests, workers):
                self._set_error(f"the first batches of {workers} are the same, one after the other")

    def compare_epochs(self, measurement: Measurement, others: Mapping[str, Measurement]) -> None:
        """Compare the examples of an epoch with those that one worker or none delivered, in whatever order."""
        workers = self._kind.workers(measurement.arguments)
        examples = epoch_examples(measurement.epochs)
        if self._dealt or workers < 2 or not examples:
            return
        for other in others.values():
            is_alone = self._kind.workers(other.arguments) < 2
            if is_alone and examples == workers * (epoch_examples(other.epochs) or 0):
                self._set_error("each delivers the whole data set")

    def warnings(self, measured: Mapping[str, Measurement]) -> Iterator[str]:
        """Yield a warning if workers repeat each other, or an epoch has more examples with some numbers of them."""
        if self.error is not None:
            how, split = self.error.splitlines()
            left_out = f"Settings with several {self._kind.WORKERS_ARE} are left out."
            yield f"{how[0].upper()}{how[1:]}. {split} {left_out}"
        if not self._kind.MORE_WORKERS:
            return
        examples_by_workers: dict[int, int] = {}
        for measurement in measured.values():
            examples = epoch_examples(measurement.epochs)
            if examples is not None:
                examples_by_workers.setdefault(self._kind.workers(measurement.arguments), examples)
        if len(set(examples_by_workers.values())) < 2:
            return
        fewest = min(examples_by_workers, key=lambda workers: examples_by_workers[workers])
        largest = max(examples_by_workers, key=lambda workers: examples_by_workers[workers])
        yield (
            f"An epoch has {format_number(examples_by_workers[fewest])} examples with {counted(fewest, 'worker')}, and "
            f"{format_number(examples_by_workers[largest])} with {counted(largest, 'worker')}: workers share the data "
            f"set wrongly. {self._kind.SPLIT}"
        )

    def _set_error(self, how: str) -> None:
        self.error = f"{self._kind.WORKERS_ARE} repeat each other: {how}\n{self._kind.SPLIT}"


def repeated_batches(digests: Sequence[dict[str, str]], workers: int) -> bool:
    """Return whether workers repeat each other: in each of four rounds or more, all deliver the same batch.

    Workers deliver in turn. The batches of different rounds must differ: constant batches, or few different labels, are
    the same by chance.
    """
    rounds = len(digests) // workers
    firsts = [digests[workers * number] for number in range(rounds)]
    if rounds < _MIN_ROUNDS or any(batch in firsts[:number] for number, batch in enumerate(firsts)):
        return False
    return all(digests[number] == firsts[number // workers] for number in range(rounds * workers))
