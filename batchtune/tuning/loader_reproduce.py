"""Whether a loader gives the same batches twice, from the same seed."""

from __future__ import annotations

from batchtune.errors import LoaderError
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.runner import LoaderRunner, Plan
from batchtune.results import Arguments, Reproduced

# An epoch that takes longer is compared up to there.
_SECONDS = 60.0


def reproduced(runner: LoaderRunner, arguments: Arguments, kind: LoaderKind) -> Reproduced:
    """Take an epoch in each of two fresh processes, from the same seed, and compare all tensors bit for bit.

    Raises:
        LoaderError: One of the two fails.
    """
    plan = Plan(seconds=_SECONDS, digests=True)
    epochs = []
    for _ in range(2):
        measured = runner.measure(arguments, plan, kind)
        if measured.outcome != "ok":
            raise LoaderError(f"the epoch to compare failed: {measured.error}")
        epochs.append(measured.trials[0][0])
    first, second = (epoch.digests for epoch in epochs)
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
            return Reproduced(batches=index + 1, first_difference=index, what=f"{', '.join(names)} differ")
    shorter = min(len(first), len(second))
    if len(first) != len(second) and all(epoch.complete for epoch in epochs):
        what = f"one epoch has {len(first)} batches, the other {len(second)}"
        return Reproduced(batches=shorter, first_difference=shorter, what=what)
    return Reproduced(batches=shorter)
