"""When a verification holds: no failure, memory that does not creep, the time that was estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.results import VerifyFailure
from batchtune.tuning.costs import ProvenBy
from batchtune.units import counted, format_length, format_seconds, format_size

FEWEST_STEPS = 12
"""With fewer steps growth can't be told from noise."""

# As for the trials of the probe: what would take less than 5% of the limit in 10,000 more steps does no harm.
_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05

# Growth counts where it is this many times as large as what the figures spread by anyhow.
_ABOVE_NOISE = 4.0

# Growth at the end that is less than this part of what it was before slows down, as that of a cache that fills up.
_SAME_PACE = 2 / 3

# The end is no fewer steps than these, and so many that growth at the same pace is so many times the noise of its mean.
_FEWEST_AT_THE_END = 4
_END_ABOVE_NOISE = 8.0

# The allocator's cache settles after some steps more than once: it creeps where it has grown by this part of the
# limit from the second to the last quarter, and in each half of that.
_CACHE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Growth:
    """How a figure in bytes grew over steps.

    Attributes:
        total_bytes: Median of the last quarter of the steps - median of the second.
        steps: Steps between the middles of these quarters.
        steady: Whether it grew from the second quarter to the third, and from that to the last.
        noise_bytes: By how much the figures spread around a straight line within a quarter: the interquartile range.
        pace: Growth a step at the end / that from the second quarter to the third; 1 where these did not grow. The end
            is as small a part of the last quarter as the noise allows.
    """

    total_bytes: float
    steps: float
    steady: bool
    noise_bytes: float
    pace: float

    @property
    def per_step_bytes(self) -> float:
        """Growth a step."""
        return self.total_bytes / self.steps

    @property
    def slows_down(self) -> bool:
        """Whether it grew clearly less at the end than before."""
        return self.pace < _SAME_PACE


def growth_of(figures: Sequence[int | None]) -> Growth | None:
    """How these figures, one a step, grew after the first quarter, in which things may still settle.

    Medians of quarters are compared, so that single steps decide nothing.

    Returns:
        None where one is unknown, or there are fewer than 12.
    """
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures) or len(known) < FEWEST_STEPS:
        return None
    quarters = np.array_split(np.array(known, dtype=np.float64), 4)[1:]
    second, third, last = (float(np.median(quarter)) for quarter in quarters)
    steps = len(known) / 2
    rise = (last - second) / steps  # within a quarter it must not count as noise
    return Growth(last - second, steps, second < third < last, _noise(quarters, rise), _pace(*quarters))


def _noise(quarters: Sequence[FloatArray], rise: float) -> float:
    """The largest spread of the figures around a line that rises so much a step."""
    return max(_spread(quarter - rise * np.arange(quarter.size)) for quarter in quarters)


def _pace(second: FloatArray, third: FloatArray, end: FloatArray) -> float:
    """Growth a step at the end of the last quarter / that from the second quarter to the third."""
    before = _rise(second, third)
    if before <= 0:
        return 1.0
    noise = _noise((second, third), before)  # not of the last: a bend is no noise
    while True:
        later = end[end.size // 2 :]
        half = later.size / 2
        if later.size < _FEWEST_AT_THE_END or before * half < _END_ABOVE_NOISE * noise / math.sqrt(half):
            return _rise(*np.array_split(end, 2)) / before
        end = later


def _rise(first: FloatArray, second: FloatArray) -> float:
    """Growth a step from the middle of some steps to that of those which follow."""
    return float(np.median(second) - np.median(first)) / ((first.size + second.size) / 2)


def leaks(rest: Growth | None, limit_bytes: int) -> bool:
    """Whether memory in use between steps creeps, and did so to the end at the same pace: `settles` is the other case.

    A cache that these steps did not fill looks the same.

    Args:
        rest: Of the bytes in use after each step, its batch freed.
        limit_bytes: The memory limit; what takes less than 5% of it in 10,000 steps does no harm.
    """
    return rest is not None and _creeps(rest, limit_bytes) and not rest.slows_down


def settles(rest: Growth | None, limit_bytes: int) -> bool:
    """Whether memory in use between steps crept, but less at the end, as with a cache that fills up.

    Args:
        rest: As for `leaks`.
        limit_bytes: Likewise.
    """
    return rest is not None and _creeps(rest, limit_bytes) and rest.slows_down


def _creeps(rest: Growth, limit_bytes: int) -> bool:
    """Whether it grew: steadily, above the noise, and enough to matter."""
    if not rest.steady or rest.total_bytes < _ABOVE_NOISE * rest.noise_bytes:
        return False
    return rest.per_step_bytes * _FORESEEN_STEPS > _HARMLESS_SHARE * limit_bytes


def cache_creeps(unused: Growth | None, limit_bytes: int) -> bool:
    """Whether the allocator's cache still grows: steadily, and by 2% of the limit from second to last quarter.

    Args:
        unused: Of the most bytes that the allocator held, step by step, less those in use after the step: what the
            workload keeps is not the allocator's doing.
        limit_bytes: The memory limit.
    """
    return unused is not None and unused.steady and unused.total_bytes > _CACHE_SHARE * limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Measured against estimated time.

    Attributes:
        estimated_epoch_seconds: By the probe's step times; None without them.
        measured_epoch_seconds: Scaled from the steps that were run to the epoch; None where none were.
        ratio: Sum of the measured / sum of the estimated times of exactly the steps that were run.
        spread: Interquartile range of that ratio over the steps; None for fewer than four.
    """

    estimated_epoch_seconds: float | None
    measured_epoch_seconds: float | None
    ratio: float | None
    spread: float | None

    def within(self, tolerance: float) -> bool:
        """Whether the time is as estimated; true where there is nothing to compare."""
        return self.ratio is None or abs(self.ratio - 1) <= tolerance


def timing_of(
    seconds: Sequence[float],
    estimated: FloatArray | None,
    estimated_epoch_seconds: float | None,
    epoch_batches: int,
) -> Timing:
    """What the shuffled steps say of an epoch's time.

    The same batches are compared: the ratio of the sums over the steps that were run, which weighs each step by its
    time, is what scales the epoch's estimate. Slow steps count in both sums. Without an estimate the mean step is
    taken times the number of batches.

    Args:
        seconds: Measured time of each step.
        estimated: Shape (steps,): its expected time by the probe's step times; None without them.
        estimated_epoch_seconds: Of the epoch; None likewise.
        epoch_batches: Batches of one epoch.
    """
    if not seconds:
        return Timing(
            estimated_epoch_seconds=estimated_epoch_seconds, measured_epoch_seconds=None, ratio=None, spread=None
        )
    measured = np.array(seconds, dtype=np.float64)
    ratio = spread = None
    if estimated is not None and float(estimated.sum()) > 0:
        ratio = float(measured.sum() / estimated.sum())
        spread = _spread(measured / np.maximum(estimated, 1e-12)) if measured.size >= 4 else None
    if ratio is not None and estimated_epoch_seconds is not None:
        epoch = ratio * estimated_epoch_seconds
    else:
        epoch = float(measured.mean()) * epoch_batches
    return Timing(
        estimated_epoch_seconds=estimated_epoch_seconds, measured_epoch_seconds=epoch, ratio=ratio, spread=spread
    )


def failure_reasons(
    failures: Sequence[VerifyFailure],
    boundaries: Sequence[float],
    unit: str | None,
    proven_by: ProvenBy | None = None,
) -> list[str]:
    """A sentence for each bucket that has a batch which failed: its first, and how many more.

    Args:
        failures: Of the verification.
        boundaries: Of all buckets.
        unit: Of the lengths.
        proven_by: What the probe knows; None without one.
    """
    reasons = []
    for bucket in dict.fromkeys(failure.bucket for failure in failures):
        own = [failure for failure in failures if failure.bucket == bucket]
        first = own[0]
        target = "" if first.target_length is None else f" with targets up to {first.target_length:g}"
        batch = f"{first.batch_size:,} × {format_length(first.length, unit)}{target}"
        more = f", and {len(own) - 1} more of it" if len(own) > 1 else ""
        said = f": {first.error}" if first.error and first.outcome != "oom" else ""
        reasons.append(
            f"A batch of {batch} {_WENT[first.outcome]} (bucket {bucket + 1} of {len(boundaries)}, up to "
            f"{format_length(boundaries[bucket], unit)}){more}{said}{_about_proof(first, proven_by)}"
        )
    return reasons


def _about_proof(failure: VerifyFailure, proven_by: ProvenBy | None) -> str:
    """Whether the probe has run what ran out of memory now."""
    if proven_by is None or failure.outcome != "oom":
        return ""
    trial = proven_by(failure.length, failure.batch_size)
    if trial is None:
        return "; the probe ran no batch as large with memory to spare, so this size was not proven"
    return f"; trial {trial} of the probe ran a batch as large with memory to spare: memory differs from then"


_WENT = {"oom": "ran out of memory", "crash": "ended its process", "timeout": "took too long", "error": "failed"}


SINGLE_FAILS = (
    "A single example fails too, so no smaller batch size helps: leave the longest out with --max-length, or give more "
    "memory, and probe anew"
)


def leak_reason(rest: Growth) -> str:
    """What is told of memory in use that creeps, at the end as fast as before."""
    return (
        f"{_grew(rest)}, at the end as fast as before: the workload leaks, or fills a cache for which these steps are "
        "too few (run more with --steps to tell). If it goes on, memory runs out whatever the batch size. Look for "
        "what keeps tensors, such as a loss that is added to a list without .item() or .detach()"
    )


def settling_warning(rest: Growth) -> str:
    """What is told of memory in use that crept, but less at the end."""
    how, cache = ("more slowly", "fills up") if rest.pace > 0 else ("no more", "is full")
    return (
        f"{_grew(rest)}, but {how} at the end, as with a cache that {cache}. Run more with --steps to see whether it "
        "has stopped"
    )


def _grew(rest: Growth) -> str:
    return (
        f"Memory in use between steps grew by {format_size(rest.total_bytes)} in {rest.steps:.0f} steps "
        f"({format_size(rest.per_step_bytes)} a step)"
    )


def cache_reason(unused: Growth) -> str:
    """What is told of an allocator's cache that creeps."""
    return (
        f"The allocator's cache grew by {format_size(unused.total_bytes)} in {unused.steps:.0f} steps and was "
        "still growing: memory is being fragmented by batches of different shapes. Set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True, or keep more memory free with --memory-fraction, and probe anew"
    )


def time_reason(timing: Timing, tolerance: float) -> str:
    """What is told of a time that is not as estimated."""
    assert timing.ratio is not None
    assert timing.measured_epoch_seconds is not None and timing.estimated_epoch_seconds is not None
    if timing.ratio > 1:
        why = (
            "something slowed the steps down that was not there when the probe timed them (other programs, a hot "
            "device, a changed workload)"
        )
    else:
        why = "steps were timed under worse conditions, or as another workload, by the probe"
    return (
        f"An epoch takes {format_seconds(timing.measured_epoch_seconds)} measured against "
        f"{format_seconds(timing.estimated_epoch_seconds)} estimated ({timing.ratio:.2f} times, where "
        f"{1 - tolerance:.2f} to {1 + tolerance:.2f} is allowed): {why}. Probe anew with --force when the machine "
        "does nothing else, or allow more with --time-tolerance"
    )


def retry_warning(retries: int) -> str:
    """What is told where the allocator had to empty its cache: no failure, but close to one, and slow."""
    return (
        f"The allocator emptied its cache {counted(retries, 'time')} to go on, which costs time and is the last step "
        "before running out of memory. Keep more free with --memory-fraction or --reserve, or set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True, and probe anew"
    )


def _spread(values: FloatArray) -> float:
    """The interquartile range."""
    low, high = np.percentile(values, (25, 75))
    return float(high - low)
