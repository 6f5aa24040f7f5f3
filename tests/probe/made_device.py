"""A made device for searches: its memory is a formula, exact and noise-free, and the truth is found by trying."""

from made_trials import altered
from memory_laws import largest_fitting

from batchtune.probe.devices.law import Coefficients, MadeDevice, failed
from batchtune.results import BatchShape


def quadratic_peak(constant=1e9, linear=2e6, quadratic=5e3):
    return Coefficients(constant=constant, linear=linear, quadratic=quadratic).bytes_of


class SearchedDevice(MadeDevice):
    """Runs trials by a formula; `faults` holds the outcomes of the first trials of a shape."""

    def __init__(self, peak, limit_bytes, tells_peak=True):
        super().__init__(
            bytes_of=peak,
            seconds_of=lambda shape: 1e-3 + 1e-4 * shape.padded_length,
            limit_bytes=limit_bytes,
            base_bytes=int(peak(BatchShape(1, 1e-6))),
            trial_steps=3,
            fault=self._planned,
        )
        self.tells_peak = tells_peak
        self.faults = {}

    def _planned(self, shape, run):
        outcomes = self.faults.get(shape)
        if not outcomes:
            return None
        outcome = outcomes.pop(0)
        return failed(shape, outcome, f"made {outcome}")

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        if self.tells_peak:
            return reply
        unknown = ("peak_bytes", "rest_bytes", "steady_peak_bytes", "peak_spread_bytes")
        return altered(reply, **dict.fromkeys(unknown))

    def largest(self, length, cap):
        """The truth, where memory grows with the batch size."""
        return largest_fitting(
            lambda size: self.bytes_of(BatchShape(size, length)) <= self.limit_bytes,
            cap,
        )


def search_to_the_end(search, device, trials=None):
    """Run what is proposed after these trials."""
    trials = [] if trials is None else trials
    while (proposal := search.propose(trials)) is not None:
        reply = device.measure(proposal.shape, len(trials), fresh=proposal.fresh)
        trials.append(reply.trial)
        assert len(trials) < 400, "the search does not end"
    return trials
