"""batchtune's search against those of others, on a device that is a formula: exact, and without torch."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from probe.made_device import MadeDevice, Peak, quadratic_peak
from probe.peer_searches import each_length_anew, from_the_last_answer

from batchtune.cost import fit_cost
from batchtune.lengths import Lengths
from batchtune.probe.search import FrontierSearch
from batchtune.probe.settings import ProbeSettings
from batchtune.results import FrontierPoint, Trial
from batchtune.shapes import BatchShape

TOLERANCE = 0.01
NUM_LENGTHS = 15
SPEECH = Lengths.of(np.round(np.random.default_rng(3).gamma(3.0, 4.0, 40_000).clip(1, 30), 2))
PEAKS = {
    "quadratic": quadratic_peak(),
    "linear": quadratic_peak(quadratic=0),
    "steep": quadratic_peak(linear=1e4, quadratic=2e5),
    "a floor below": lambda shape: max(3e9, quadratic_peak()(shape)),
}
Search = Callable[..., Iterator[tuple[float, int]]]
PEERS: dict[str, Search] = {"each length anew": each_length_anew, "from the last answer": from_the_last_answer}


@pytest.fixture(params=list(PEAKS))
def peak(request: pytest.FixtureRequest) -> Peak:
    return PEAKS[request.param]


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
        self.device, self.trials, self.ooms = device, 0, 0

    def __call__(self, batch_size: int, length: float) -> bool:
        outcome = self.device.measure(BatchShape(batch_size, length), self.trials).outcome
        self.trials += 1
        self.ooms += outcome == "oom"
        return outcome == "ok"


def made(peak: Peak) -> MadeDevice:
    return MadeDevice(peak, limit_bytes=8_000_000_000)


def test_smooth_memory_needs_at_most_2_5_trials_a_length(peak: Peak) -> None:
    points, trials = search(made(peak))
    assert len(points) == NUM_LENGTHS
    assert len(trials) <= 2.5 * NUM_LENGTHS


def test_a_smooth_memory_is_run_out_of_at_most_four_times(peak: Peak) -> None:
    _, trials = search(made(peak))
    assert sum(trial.outcome == "oom" for trial in trials) <= 4


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_peers_need_at_least_three_times_as_many_trials(peak: Peak, peer: Search) -> None:
    points, trials = search(made(peak))
    asked = Counted(made(peak))
    list(peer(asked, [point.length for point in points], SPEECH.histogram.count_up_to, TOLERANCE))
    assert asked.trials >= 3 * len(trials)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_peers_find_the_truth_to_within_the_tolerance(peak: Peak, peer: Search) -> None:
    # Else a comparison with them would say nothing.
    device = made(peak)
    lengths = np.quantile(SPEECH.histogram.lengths, np.linspace(0, 1, NUM_LENGTHS), method="nearest").tolist()
    for length, found in peer(Counted(device), lengths, SPEECH.histogram.count_up_to, TOLERANCE):
        truth = device.largest(length, SPEECH.histogram.count_up_to(length))
        assert truth - max(1, int(found * TOLERANCE)) <= found <= truth


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_a_peer_finds_that_not_even_one_example_fits(peer: Search) -> None:
    nothing_fits = MadeDevice(quadratic_peak(), limit_bytes=1)
    assert dict(peer(Counted(nothing_fits), [1.0, 2.0], lambda length: 100, TOLERANCE)) == {1.0: 0, 2.0: 0}


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_a_peer_stops_at_what_the_data_can_fill(peer: Search) -> None:
    all_fits = MadeDevice(quadratic_peak(), limit_bytes=10**18)
    assert dict(peer(Counted(all_fits), [2.0], lambda length: 70, TOLERANCE)) == {2.0: 70}
