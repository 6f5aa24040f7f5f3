import pytest

from batchtune.epochs.frontier import Frontier
from batchtune.results import FrontierPoint


def point(length: float, target: float | None, size: int) -> FrontierPoint:
    return FrontierPoint(
        length=length,
        target_length=target,
        batch_size=size,
        closed_by="memory",
        oom_batch_size=None,
        step_seconds=None,
        peak_bytes=None,
        trial=0,
    )


POINTS = [point(10, 50, 20), point(100, 50, 4), point(100, 10, 8), point(60, 20, 9)]


def test_the_size_is_the_largest_among_shapes_no_smaller() -> None:
    joint = Frontier.of_pairs(POINTS)
    assert joint([5, 10, 11, 60, 61, 100], [50, 50, 50, 20, 10, 11]).tolist() == [20, 20, 4, 9, 8, 4]


def test_beyond_all_measurements_a_size_of_one_is_unproven() -> None:
    joint = Frontier.of_pairs(POINTS)
    assert joint([101, 5], [1, 51]).tolist() == [1, 1]
    assert joint.proven([101, 5], [1, 51]).tolist() == [0, 0]


def test_points_without_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="target"):
        Frontier.of_pairs([point(10, None, 3)])
