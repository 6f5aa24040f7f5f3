"""Where the probe measures more lengths, on a device whose memory is a formula."""

import numpy as np
from memory_laws import MADE
from msgspec.structs import replace
from probe.made_device import SearchedDevice, quadratic_peak, search_to_the_end

from batchtune.lengths import Lengths
from batchtune.probe.knowledge import Refinement
from batchtune.probe.search import FrontierSearch


def test_the_length_before_a_gap_is_measured_where_it_limits_all():
    """One example of 246, none between 173 and it: unmeasured, as few of 173 count as fitting as of 246."""
    most = np.random.default_rng(0).gamma(40.0, 3.5, 3000).clip(20, 172).round()
    lengths = Lengths.of([*most, *[172.0] * 20, 172.5, 173.0, 246.0])
    device = SearchedDevice(quadratic_peak(linear=2e6), limit_bytes=16 << 30)
    settings = replace(MADE, num_lengths=5, max_lengths=60)
    search = FrontierSearch(
        lengths, settings, device.limit_bytes, refine=Refinement(lengths, (10,))
    )
    points = search.frontier(search_to_the_end(search, device))
    assert 173 in [point.length for point in points]
