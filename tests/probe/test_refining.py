"""Where the probe measures more lengths, on a device whose memory is a formula."""

from __future__ import annotations

import numpy as np
import pytest
from probe.made_device import Peak, SearchedDevice, quadratic_peak, search_to_the_end

from batchtune.lengths import Lengths
from batchtune.probe.refining import Refinement
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import ProbeSettings
from batchtune.results import FrontierPoint

FEW = [1.0, 2.0, 5.0, 9.0]


def searched(
    lengths: Lengths, peak: Peak, num_lengths: int, max_lengths: int
) -> list[FrontierPoint]:
    device = SearchedDevice(peak, limit_bytes=16 << 30)
    settings = ProbeSettings(
        workload="made", options={}, num_lengths=num_lengths, max_lengths=max_lengths
    )
    search = FrontierSearch(
        lengths, settings, device.limit_bytes, refine=Refinement(lengths, (10,))
    )
    return search.frontier(search_to_the_end(search, device))


@pytest.mark.parametrize(
    ("peak", "targets"),
    [(lambda shape: 1e9, None), (quadratic_peak(), [3.0, 9.0, 1.0, 4.0])],
    ids=["constant", "growing, with targets"],
)
def test_if_the_data_can_fill_no_failing_batch_all_of_it_fits(
    peak: Peak, targets: list[float] | None
) -> None:
    lengths = Lengths.of(FEW, targets)
    points = searched(lengths, peak, num_lengths=2, max_lengths=10)
    assert {point.closed_by for point in points} == {"data"}
    assert points[-1].batch_size == len(FEW)


def test_no_more_lengths_are_measured_than_asked_for() -> None:
    lengths = Lengths.of(
        np.random.default_rng(0).gamma(6.0, 2.0, 5000).clip(1, 30).round(2)
    )
    peak = quadratic_peak(linear=2e7)
    spanning, refined = (
        searched(lengths, peak, num_lengths=3, max_lengths=most) for most in (3, 8)
    )
    assert len(spanning) == 3
    assert {point.length for point in spanning} < {point.length for point in refined}
    assert len(refined) <= 8


def test_the_length_before_a_gap_is_measured_where_it_limits_all() -> None:
    """One example of 246, none between 173 and it: unmeasured, as few of 173 count as fitting as of 246."""
    most = np.random.default_rng(0).gamma(40.0, 3.5, 3000).clip(20, 172).round()
    lengths = Lengths.of([*most, *[172.0] * 20, 172.5, 173.0, 246.0])
    points = searched(
        lengths, quadratic_peak(linear=2e6), num_lengths=5, max_lengths=60
    )
    assert 173 in [point.length for point in points]
