from __future__ import annotations

import numpy as np

from batchtune.cost import Frontier, JointFrontier
from batchtune.results import CostModel, FrontierPoint

# 1000 bytes at rest, 1 byte for each cell of the input, 10 for each of the target.
MODEL = CostModel(floor=0, constant=1000, linear=1, quadratic=0, relative_error=0.01, target_linear=10)
LIMIT = 11_000


def fits(length: float, target: float) -> int:
    return int((LIMIT - 1000) / (length + 10 * target))


def point(length: float, target: float) -> FrontierPoint:
    return FrontierPoint(
        length=length,
        target_length=target,
        batch_size=fits(length, target),
        closed_by="memory",
        oom_batch_size=None,
        step_seconds=None,
        peak_bytes=None,
    )


def joint() -> JointFrontier:
    return JointFrontier(Frontier.of([point(10, 50), point(100, 50)]), MODEL, LIMIT)


def test_with_the_worst_target_it_is_what_was_measured() -> None:
    assert joint()(100, 50) == fits(100, 50)


def test_with_short_targets_it_is_what_the_model_says_but_for_twice_its_error() -> None:
    assert joint()(100, 1) == int((LIMIT * 0.98 - 1000) / 110)


def test_it_never_goes_below_what_was_measured_nor_above_what_fits() -> None:
    lengths, targets = np.meshgrid(np.linspace(1, 100, 40), np.linspace(0, 50, 40))
    sizes = joint()(lengths, targets)
    assert (sizes >= joint().frontier(lengths)).all()
    assert (sizes * (lengths + 10 * targets) <= LIMIT - 1000).all()


def test_beyond_the_longest_measured_length_nothing_is_known() -> None:
    assert joint()(101, 0) == 1
