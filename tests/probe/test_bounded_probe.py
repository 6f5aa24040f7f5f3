"""How long a probe takes: what `--minutes`, interruptions, scattered times and a long tail make of it."""

import math
from collections import Counter

import numpy as np
import pytest
from benchmarks.laws import probe_law, table_of
from made_trials import altered
from memory_laws import (
    BASE_BYTES,
    LAWS,
    LIMIT_BYTES,
    MADE,
    Law,
    LawDevice,
    made_lengths,
    ooms,
    probe_on,
    warns,
)
from msgspec.structs import replace

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.errors import ProbeError
from batchtune.lengths import Lengths
from batchtune.results import (
    PROBE_FILE,
    BatchShape,
    Probe,
    SweepSettings,
    read_result,
)

LIMITED = replace(MADE, num_lengths=6, memory_fraction=1.0)


class Timed(LawDevice):
    """Takes a second of the monotonic clock for a trial or a step; interrupts what comes after `most` of them.

    In turns, batches take `less_in_turns` bytes less, all but those of the longest.
    """

    now = 0.0
    most = math.inf
    start_seconds = 0.0
    less_in_turns = 0

    def start(self):
        self.now += self.start_seconds
        return super().start()

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        self.now += 1.0
        if self.now > self.most:
            raise KeyboardInterrupt
        return altered(reply, elapsed_seconds=1.0, step_seconds=0.8)

    def step(self, shape, others=(), *, release=False):
        reply = super().step(shape, others, release=release)
        peak = reply.trial.peak_bytes
        if shape.length == self.lengths.longest or peak is None:
            return reply
        return altered(reply, peak_bytes=peak - self.less_in_turns)


@pytest.fixture
def timed(monkeypatch):
    device = Timed(LAWS["blocks of length"], made_lengths("speech", count=300))
    monkeypatch.setattr("batchtune.probe.flow.time.monotonic", lambda: device.now)
    return device


def probe_timed(device, folder, minutes=None):
    return probe_on(device, folder, replace(LIMITED, minutes=minutes))


def test_minutes_end_a_probe_with_what_is_proven_by_then(timed, tmp_path):
    probe = probe_timed(timed, tmp_path, minutes=0.3)
    assert timed.now <= 18
    assert probe.unfinished
    assert probe.is_proven
    assert probe.frontier[-1].length == timed.lengths.longest
    assert warns(probe, "--minutes")
    swept = sweep(
        timed.lengths,
        probe.max_batch_length,
        SweepSettings(strategies=("optimal",)),
        costs_of(probe),
    )
    row = swept.rows[swept.recommended_table]
    assert not row.unproven
    assert timed.above_truth(table_of(row)) == 0
    whole = probe_timed(timed, tmp_path)
    assert not whole.unfinished
    assert whole.trials[: len(probe.trials)] == probe.trials
    assert len(whole.trials) > len(probe.trials)


@pytest.mark.parametrize("minutes", [0.3, 0.35, 0.4, 0.45])
def test_what_the_turns_refute_is_replaced_within_minutes(minutes, timed, tmp_path):
    """The margin that unsteady memory asks for is larger than before."""
    timed.less_in_turns = int(0.04 * LIMIT_BYTES)
    probe = probe_timed(timed, tmp_path, minutes=minutes)
    assert timed.now <= 60 * minutes
    assert probe.unfinished
    longest = probe.frontier[-1]
    largest = max(
        trial.batch_size
        for trial in probe.trials
        if trial.length == longest.length and trial.outcome == "ok"
    )
    assert longest.length == timed.lengths.longest
    assert longest.batch_size >= 0.65 * largest


def test_minutes_that_end_before_any_trial_are_an_error(timed, tmp_path):
    timed.start_seconds = 10.0
    message = "--minutes ended before the first trial: a start takes 10 s"
    hint = "at least --minutes 2, to tune 3"
    with pytest.raises(ProbeError, match=rf"{message}.*\n.*{hint}"):
        probe_timed(timed, tmp_path, minutes=0.1)


def test_minutes_that_end_early_warn_of_an_ignored_shape(timed, tmp_path):
    timed.law = Law(lambda size, length, target: 1.0)
    probe = probe_timed(timed, tmp_path, minutes=0.08)
    assert probe.unfinished
    assert warns(probe, "ignore its `shape`")


def test_an_interruption_overwrites_nothing_that_is_proven(timed, tmp_path):
    proven = probe_timed(timed, tmp_path, minutes=0.3)
    timed.most = timed.now + 2
    with pytest.raises(KeyboardInterrupt):
        probe_timed(timed, tmp_path)
    assert read_result(tmp_path / PROBE_FILE, Probe) == proven


def most_at_a_length(probe):
    return max(Counter(trial.length for trial in probe.trials).values())


class Scattered(LawDevice):
    """Steps take up to five times as long, and later processes hold 1.5% of the memory less than the first."""

    def seconds(self, shape):
        return super().seconds(shape) * self._random.lognormal(0.0, 0.5)

    def bytes(self, shape):
        return super().bytes(shape) + self.base_bytes - BASE_BYTES

    def _renew(self):
        super()._renew()
        if self.worker > 1:
            self.base_bytes = BASE_BYTES - 120_000_000


class Buffering(LawDevice):
    """A process keeps buffers of 60% of the largest batch that it has run, and may be replaced after each trial."""

    def __init__(self, *arguments, replaced):
        super().__init__(*arguments)
        self._replaced = replaced
        self._kept = {0: 0.0}  # by the worker

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        rest_bytes = reply.trial.rest_bytes
        if rest_bytes is None:
            return reply
        kept = self._kept.get(self.worker, 0.0)
        largest = max(kept, 0.6 * (self.bytes(shape) - rest_bytes))
        self._kept[self.worker] = largest
        if self._replaced:
            self.lose_worker()
        return altered(
            reply,
            held_bytes=int(rest_bytes + kept),
            rest_bytes=int(rest_bytes + largest),
        )


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("law", ["linear", "quadratic"])
def test_what_processes_keep_of_their_batches_costs_no_trials(law, replaced):
    lengths = made_lengths("speech", count=3000)
    device = Buffering(LAWS[law], lengths, replaced=replaced)
    probe = probe_law(device)
    assert most_at_a_length(probe) <= 6
    assert len(probe.trials) <= 32 and ooms(probe.trials) <= 2
    for point in probe.frontier:
        assert device.fits(BatchShape(point.batch_size, point.length))
        beyond = BatchShape(math.ceil(1.1 * point.batch_size), point.length)
        assert point.closed_by == "data" or not device.fits(beyond)


class Heap(Buffering):
    """Uses two thirds of the limit between steps, as on the CPU; the peaks of equal batches scatter."""

    def bytes(self, shape):
        return (2 * LIMIT_BYTES + super().bytes(shape)) / 3

    def run(self, shape, steps):
        reply = super().run(shape, steps)
        peak = reply.trial.peak_bytes
        if peak is None:
            return reply
        less = int(self._random.integers(LIMIT_BYTES // 250))
        rest_bytes = (2 * LIMIT_BYTES + reply.trial.rest_bytes) // 3
        return altered(
            reply,
            peak_bytes=peak - less,
            rest_bytes=rest_bytes,
            peak_spread_bytes=less // 2,
        )


def test_peaks_that_scatter_do_not_make_the_search_creep():
    for seed in range(4):
        lengths = made_lengths("speech", count=3000)
        device = Heap(LAWS["affine"], lengths, replaced=False)
        device.fitting = 200
        device._random = np.random.default_rng(seed)
        probe = probe_law(device)
        assert most_at_a_length(probe) <= 10  # 14 or more if it creeps
        for point in probe.frontier:
            assert device.fits(BatchShape(point.batch_size, point.length))


def test_scattered_times_cost_no_trials_on_a_long_tail():
    """Lengths as those of meetings: most of a few seconds, the longest 48 times the median."""
    values = np.random.default_rng(11).lognormal(0.55, 1.0, 8_000)
    values = values.clip(0.1, 80).round(2)
    values[0] = 82.5
    lengths = Lengths.of(values)
    truth = LawDevice(LAWS["quadratic"], lengths)
    for device in (truth, Scattered(LAWS["quadratic"], lengths)):
        probe = probe_law(device)
        assert len(probe.trials) <= 35
        assert ooms(probe.trials) <= 2
        assert probe.confirmation.given_up == 0
        for point in probe.frontier:
            assert truth.fits(BatchShape(point.batch_size, point.length))


def test_the_time_left_counts_all_that_follows(tmp_path):
    device = Timed(LAWS["linear"], made_lengths("speech", count=300))
    said = []
    probe = probe_on(device, tmp_path, on_progress=said.append, proof_share=1 / 3)
    left = [progress.seconds_left for progress in said if progress.confirming]
    assert left[-1] > len(probe.trials) / 3
    assert left == sorted(left, reverse=True)
    assert len(probe.frontier) > 12
    ends = [
        trials + progress.seconds_left
        for trials, progress in enumerate(filter(lambda each: each.trial, said), 1)
        if progress.done
    ]
    assert max(ends) < 1.2 * min(ends)


def test_what_more_lengths_would_save_is_said():
    probe = probe_law(
        LawDevice(
            LAWS["another kernel for long ones"], made_lengths("tokens", count=3000)
        )
    )
    assert warns(probe, "More lengths would save up to")
