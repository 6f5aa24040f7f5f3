"""Memory laws of the kinds that real models have, a made device that follows them, and the truth by brute force.

A law gives the bytes that a batch takes; a device runs batches by it, with noise where the law has some. Three made
data sets: speech that piles up near its longest length, sentences with a long tail, and tokens over two orders of
magnitude; each with targets that depend on the length only loosely, and without.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from made_trials import altered

from batchtune.lengths import Lengths
from batchtune.probe.devices.law import MadeDevice
from batchtune.probe.flow import run_probe
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape

GB = 10**9
LIMIT_BYTES = 8 * GB
BASE_BYTES = GB


def made_lengths(name, *, targets=False, count=12_000):
    """One of the data sets: `speech`, `sentences` or `tokens`."""
    rng = np.random.default_rng(["speech", "sentences", "tokens"].index(name))
    if name == "speech":
        near_end = rng.random(count) < 0.7
        values = (
            np.where(
                near_end, rng.normal(14.5, 1.2, count), rng.uniform(1.4, 14, count)
            )
            .clip(1.4, 24.5)
            .round(2)
        )
    elif name == "sentences":
        values = rng.gamma(6.0, 0.7, count).clip(1.1, 15).round(2)
    else:
        values = np.exp(rng.normal(5.5, 0.9, count)).clip(8, 2048).round()
    if not targets:
        return Lengths.of(values)
    return Lengths.of(
        values,
        np.maximum(
            1,
            (
                values * np.exp(rng.normal(0, 0.6, count)) / np.median(values) * 40
            ).round(),
        ),
    )


Need = Callable[[int, float, float], float]
"""(batch size, length, target) in units of the longest length and target -> memory, 1 for one longest example."""


@dataclass(frozen=True)
class Law:
    """How memory depends on the shape.

    Attributes:
        need: Memory of the examples; length and target run from above 0 to 1.
        noise: Each step's peak is multiplied by 1 ± half of this.
        monotone: Whether it grows with batch size, length and target.
    """

    need: Need
    noise: float = 0.0
    monotone: bool = True


def _up(value, step):
    return math.ceil(value / step - 1e-9) * step


LAWS = {
    "linear": Law(lambda b, u, t: b * u),
    "affine": Law(lambda b, u, t: b * (0.8 * u + 0.2)),
    "quadratic": Law(lambda b, u, t: b * (0.4 * u + 0.6 * u * u)),
    "blocks of length": Law(lambda b, u, t: b * _up(u, 1 / 16)),
    "powers of two in length": Law(
        lambda b, u, t: b * 2.0 ** math.ceil(math.log2(u) - 1e-9)
    ),
    "powers of two in batch": Law(lambda b, u, t: u * (1 << (b - 1).bit_length())),
    "another kernel for long ones": Law(
        lambda b, u, t: b * u * (1.4 if u > 0.45 else 1.0)
    ),
    "another kernel for large batches": Law(
        lambda b, u, t: b * u * (1.25 if b * u > 9 else 1.0)
    ),
    "a floor": Law(lambda b, u, t: max(8.0, b * u)),
    "truncation": Law(lambda b, u, t: b * min(u, 0.5)),
    "concave": Law(lambda b, u, t: b * u**0.6),
    "noise of 3%": Law(lambda b, u, t: b * (0.7 * u + 0.3 * u * u), noise=0.03),
    "batches in eights": Law(lambda b, u, t: _up(b, 8) * u),
    "lengths in eighths": Law(lambda b, u, t: b * _up(u, 1 / 256)),
    "steps of memory": Law(lambda b, u, t: _up(b * u, 0.5)),
    "a steep end": Law(lambda b, u, t: b * (u + 3 * max(0.0, u - 0.8))),
    "workspace by the octave": Law(
        lambda b, u, t: (b + 4 * math.ceil(math.log2(b))) * u
    ),
    "more work in each octave": Law(
        lambda b, u, t: b * (1 + 0.1 * math.ceil(math.log2(b))) * u
    ),
    "falls with the length": Law(
        lambda b, u, t: b * u * (0.6 if u > 0.7 else 1.0), monotone=False
    ),
    "length modulo eight": Law(
        lambda b, u, t: b * u * (1.0 if round(u * 2048) % 8 == 0 else 1.12),
        monotone=False,
    ),
}


def _plus_target(need):
    return lambda b, u, t: 0.7 * need(b, u, 0.0) + 0.3 * b * t


TARGET_LAWS = {
    "length times target": Law(lambda b, u, t: b * (0.1 * u + u * t)),
    "larger of both": Law(lambda b, u, t: b * max(u, t)),
    "larger of length and twice target": Law(lambda b, u, t: b * max(u, 2 * t)),
    "root of the target": Law(lambda b, u, t: b * (0.3 * u + 0.7 * math.sqrt(t))),
    "target above a cliff": Law(lambda b, u, t: b * (u + (2.0 if t > 0.5 else 0.0))),
    "both squared": Law(lambda b, u, t: b * (u + t) ** 2 / 4),
    **{
        f"{name}, plus target": replace(law, need=_plus_target(law.need))
        for name, law in LAWS.items()
    },
}


def largest_fitting(fits, most):
    """The largest number up to `most` up to which all fit, 0 if none; found by bisection."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


class LawDevice(MadeDevice):
    """Runs trials and steps by a law, whose 1 is the longest length and target of a data set.

    Attributes:
        fitting: How many of the longest examples, with the longest target, fill the memory above the base.
        slower_in_turns: A step in turns takes so many times as long as one of a trial.
        first_step: The first step of a process takes so many bytes more. An OOM then costs the process.
    """

    def __init__(
        self,
        law,
        lengths,
        *,
        fitting=24.0,
        slower_in_turns=1.0,
        first_step=None,
        packed=False,
    ):
        super().__init__(
            bytes_of=self.bytes,
            seconds_of=self.seconds,
            limit_bytes=LIMIT_BYTES,
            base_bytes=BASE_BYTES,
            noise=law.noise,
            trial_steps=4,
            packed=packed,
        )
        self.law = law
        self.lengths = lengths
        self.fitting = fitting
        self.slower_in_turns = slower_in_turns
        self.first_step = first_step
        self.steps = 0  # in turns
        self._warm = -1  # the worker that has run a step
        self._longest = lengths.longest
        self._most = 1.0
        if lengths.targets is not None:
            self._most = max(1.0, float(lengths.targets.max()))

    def bytes(self, shape):
        """What a batch takes without noise."""
        need = self.law.need(
            shape.batch_size,
            shape.length / self._longest,
            (shape.target_length or 0.0) / self._most,
        )
        return BASE_BYTES + need * (LIMIT_BYTES - BASE_BYTES) / self.fitting

    def fits(self, shape):
        """Whether it fits whatever the noise."""
        return self.bytes(shape) * (1 + self.law.noise / 2) <= LIMIT_BYTES

    def seconds(self, shape):
        return 0.02 + 0.01 * shape.padded_length / self._longest

    def peaks(self, shape, steps):
        peaks = super().peaks(shape, steps)
        if self.first_step is not None and self._warm < self.worker:
            peaks[0] += self.first_step(shape)
            self._warm = self.worker
        return peaks

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        if self.first_step is not None and reply.trial.outcome == "oom":
            self.lose_worker()
        return reply

    def step(self, shape, others=(), *, release=False, **how):
        self.steps += 1
        reply = super().step(shape, others, release=release, **how)
        seconds = reply.trial.step_seconds
        if seconds is None:
            return reply
        return altered(reply, step_seconds=seconds * self.slower_in_turns)

    # The truth

    def largest(self, lengths, targets=None):
        """The largest batch size up to which all fit at each length, found by bisection where memory is monotone.

        Where it falls with the length or the batch size, the largest that fits there and at all lengths before.
        """
        found = np.zeros(lengths.size, dtype=np.int64)
        most = 1 << 22
        for index, length in enumerate(lengths.tolist()):
            target = None if targets is None else float(targets[index])
            largest = self._largest_at(length, target, most)
            if targets is None:
                most = largest
            found[index] = largest
        return found

    def _largest_at(self, length, target, most):
        return largest_fitting(
            lambda size: self.fits(BatchShape(size, length, target)), most
        )

    def above_truth(self, table):
        """How many buckets have a batch that may not fit, tried at each length that occurs in them."""
        histogram = self.lengths.histogram
        edges, counts = table.divide(histogram)
        above = 0
        for bucket in np.flatnonzero(counts):
            own = histogram.lengths[edges[bucket] : edges[bucket + 1]]
            size = int(min(table.batch_sizes[bucket], counts[bucket]))
            below = 0.0 if bucket == 0 else float(table.boundaries[bucket - 1])
            target = self._worst_in(below, float(own[-1]))
            above += not all(
                self.fits(BatchShape(size, float(length), target)) for length in own
            )
        return above

    def _worst_in(self, below, up_to):
        if self.lengths.targets is None:
            return None
        inside = (self.lengths.values > below) & (self.lengths.values <= up_to)
        return float(self.lengths.targets[inside].max())


# Probes on it


MADE = ProbeSettings(workload="made.py:Made", options={}, device="cuda")


def probe_on(
    device,
    folder,
    settings=MADE,
    *,
    force=False,
    **hooks,
):
    return run_probe(
        device.lengths,
        settings,
        folder,
        force=force,
        hooks=ProbeHooks(measurer=device, **hooks),
    )


def ooms(trials):
    """How many ran out of memory."""
    return sum(trial.outcome == "oom" for trial in trials)


def warns(probe, words):
    """Whether a warning has these words."""
    return any(words in text for text in probe.warnings)
