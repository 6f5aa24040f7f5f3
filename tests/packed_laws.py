"""A made device for packed batches: its memory is a formula of the sequences, exact or with noise."""

import numpy as np
from memory_laws import (
    BASE_BYTES,
    LAWS,
    LawDevice,
    largest_fitting,
    made_lengths,
    probe_on,
)

from batchtune.lengths import Lengths
from batchtune.probe.packed_search import COMPOSITIONS, Compositions
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape

TOKENS = made_lengths("tokens", count=4_000)
SENTENCES = Lengths.of((made_lengths("sentences", count=8_000).values * 60).round())


def a_tenth_of_a_megabyte_each(shape):
    return 1e5 * shape.tokens


class PackedDevice(LawDevice):
    """Runs packed batches by a formula; a peak is its value ± half of the law's noise."""

    def __init__(
        self,
        law=LAWS["linear"],
        lengths=TOKENS,
        *,
        packed=True,
        memory=a_tenth_of_a_megabyte_each,
    ):
        super().__init__(law, lengths, packed=packed)
        self.memory = memory

    def bytes(self, shape):
        if shape.sequences is None:
            return super().bytes(shape)
        return BASE_BYTES + self.memory(shape)

    def seconds(self, shape):
        if shape.sequences is None:
            return super().seconds(shape)
        return 0.02 + 1e-6 * shape.tokens + 1e-9 * shape.squared_tokens

    def largest_budget(self, most):
        """The most tokens up to `most` of which all compositions fit, by trying; memory must grow with them."""
        compositions = Compositions(self.lengths, 0)

        def all_fit(tokens):
            shapes = [compositions.shape(name, tokens) for name in COMPOSITIONS]
            return all(map(self.fits, shapes))

        return largest_fitting(all_fit, most)


def settings(*, dear=False, **changed):
    return ProbeSettings(
        workload="made.py:Packs",
        options={},
        device="cuda",
        memory_fraction=1.0,
        nproc_per_node=2 if dear else None,
        **changed,
    )


def probe_packed(device, folder, *, dear=False, **changed):
    return probe_on(device, folder, settings(dear=dear, **changed))


def trials_before_turns(probe):
    """How many trials the search took, without what failed in turns, or after that."""
    given_up = [trial.index for trial in probe.trials if trial.confirmation]
    return min(given_up, default=len(probe.trials))


def drawn_batches(lengths, tokens, count):
    """Micro-batches as packers make them: random sequences of some part of the data, as many as fit."""
    rng = np.random.default_rng(7)
    values = lengths.values.astype(int)
    batches = []
    for _ in range(count):
        start, end = np.sort(rng.integers(0, values.size, 2))
        row = []
        for length in rng.permutation(values[start : end + 1]).tolist():
            if sum(row) + length > tokens:
                break
            row.append(length)
        if row:
            batches.append(BatchShape.packed(row))
    return batches
