"""batchtune's search against those of others, on a device that is a formula: exact, and without torch."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from probe.made_device import MadeDevice, Peak, quadratic_peak
from probe.peer_searches import each_length_anew, from_the_last_answer

from batchtune.epochs.cost_model import fit_cost
from batchtune.lengths import Lengths
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import ProbeSettings
from batchtune.results import FrontierPoint, Trial
from batchtune.shapes import BatchShape

TOLERANCE = 0.01
NUM_LENGTHS = 15
SPEECH = Lengths.of(np.round(np.random.default_rng(3).gamma(3.0, 4.0, 5_000).clip(1, 30), 2))
PEAKS = {
    "quadratic": quadratic_peak(),
    "a floor below": lambda shape: max(3e9, quadratic_peak()(shape)),
}
Search = Callable[..., Iterator[tuple[float, int]]]
PEERS: dict[str, Search] = {"each length anew": each_length_anew, "from the last answer": from_the_last_answer}


pytestmark = pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)


def search(device: MadeDevice) -> tuple[list[FrontierPoint], list[Trial]]:
    settings = ProbeSettings(
        workload="made",
        options={},
        num_lengths=NUM_LENGTHS,
        tolerance=TOLERANCE,
        max_batch_size=None,
    )
    found = FrontierSearch(SPEECH, settings, device.limit_bytes, fit=fit_cost)
    trials: list[Trial] = []
    while (proposal := found.propose(trials)) is not None:
        trials.append(device.measure(proposal.shape, len(trials)))
        assert len(trials) < 400, "the search does not end"
    return found.frontier(trials), trials


class Counted:
    """A device as the peers ask it: does it fit; and how often they asked."""

    def __init__(self, device: MadeDevice) -> None:
        self.device, self.trials = device, 0

    def __call__(self, batch_size: int, length: float) -> bool:
        self.trials += 1
        return self.device.measure(BatchShape(batch_size, length), self.trials).outcome == "ok"


@pytest.mark.parametrize("peak", PEAKS.values(), ids=PEAKS)
def test_peers_find_the_same_with_three_times_as_many_trials(peak: Peak, peer: Search) -> None:
    points, trials = search(MadeDevice(peak, limit_bytes=8_000_000_000))
    device = MadeDevice(peak, limit_bytes=8_000_000_000)
    asked = Counted(device)
    for length, found in peer(asked, [point.length for point in points], SPEECH.histogram.count_up_to, TOLERANCE):
        truth = device.largest(length, SPEECH.histogram.count_up_to(length))
        assert truth - max(1, int(found * TOLERANCE)) <= found <= truth
    assert asked.trials >= 3 * len(trials)


def test_a_peer_stops_where_nothing_fits_and_where_data_end(peer: Search) -> None:
    nothing_fits, all_fits = (Counted(MadeDevice(quadratic_peak(), limit_bytes=limit)) for limit in (1, 10**18))
    assert dict(peer(nothing_fits, [1.0, 2.0], lambda length: 100, TOLERANCE)) == {1.0: 0, 2.0: 0}
    assert dict(peer(all_fits, [2.0], lambda length: 70, TOLERANCE)) == {2.0: 70}
