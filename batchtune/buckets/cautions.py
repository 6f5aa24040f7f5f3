"""Warnings about the data and the tables that were compared, and hints at a wrong unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.buckets.current.base import longer_than
from batchtune.buckets.strategies import STRATEGIES
from batchtune.epochs.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import Row
from batchtune.units import format_length, format_seconds

# Sources: `DynamicBatchSampler` of SpeechBrain 1.1 (batch size at least 1, and 1 beyond the last boundary);
# `TimeConstraint` of Lhotse 1.33 and `NumElementsBatchSampler` of ESPnet (an example is added first, and closes the
# batch if it then exceeds); `data_utils_fast.pyx` of fairseq (asserts that none is above max_tokens);
# `BucketingFilter` of NeMo.
_OVERLONG = (
    "where it sets the batch size (SpeechBrain, batchtune's sampler), {each} becomes a batch of one; Lhotse and "
    "ESPnet make batches that exceed it, fairseq stops with an error; NeMo with bucket_batch_size drops only what "
    "is longer than its last bin"
)
# How many make a second, as it is most often; and what is assumed for that.
_IN_A_SECOND: dict[str, tuple[int, str]] = {
    "ms": (1000, ""),
    "samples": (16_000, " at 16 kHz"),
    "frames": (100, " of 10 ms"),
}
# No utterance is so many seconds long.
_LONG_SECONDS = 1000.0
# More than so many seconds in a batch are none: then max_batch_length is meant as it is written.
_MOST_SECONDS = 7200.0
# A max_batch_length of so little more than the longest example is suspicious, too. Of frames it may be meant.
_NEAR = {"ms": 1.5, "samples": 1.5}


def cautions(lengths: Lengths, limits: Limits, num_buckets: Sequence[int], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the warnings of a sweep, each at most once however many rows it concerns."""
    limit = limits.max_batch_length
    distinct = lengths.histogram.lengths.size
    if (unit := limit_unit_hint(lengths, limit)) is not None:
        yield unit
    yield from longer_than(lengths, limit, "max_batch_length", _OVERLONG)
    for name, strategy in STRATEGIES.items():
        yield from strategy.cautions(lengths, limit, [row for row in rows if row.strategy == name])
    if rows and all(row.unproven for row in rows):
        yield (
            "every row has batch sizes that are not proven to fit, the recommended one too: run its batches with "
            "`batchtune verify` before you train with them"
        )
    if max(num_buckets) > distinct and any(row.pool_size is None for row in rows):
        values = "only one value" if distinct == 1 else f"only {distinct} different values"
        yield (
            f"up to {max(num_buckets)} buckets were asked for, but the lengths take {values}: "
            f"no more than {distinct} can hold an example"
        )


def workload_unit_hint(lengths: Lengths, workload: str) -> str | None:
    """Return a hint, in full sentences, where one example does not fit and the workload may expect seconds.

    None where the lengths can be seconds, or count something else; a built-in workload knows the unit.
    """
    longest = lengths.longest
    unit = lengths.unit
    if unit in _IN_A_SECOND and not workload.startswith("builtin:"):
        return (
            f"Is the unit right? The workload is given lengths in {unit}, up to {format_length(longest, unit)}. If it "
            f"expects seconds, convert them: {_conversion(unit, longest)}."
        )
    if unit not in ("s", None) or longest <= _LONG_SECONDS:
        return None
    given = "Is the unit right? The workload is given lengths up to"
    if unit:
        found = f"{format_length(longest, unit)} ({format_seconds(longest)})"
    else:
        found = format_length(longest, None)
    unknown = "" if unit else ", and nothing says what they count (--unit does)"
    others = "; ".join(f"if they are {one}, {_conversion(one, longest)}" for one in ("ms", "samples"))
    return f"{given} {found}{unknown}. If it expects seconds: {others}."


def _conversion(unit: str, longest: float) -> str:
    """`--length-scale 1/1000 --unit s (the longest is then 23.4 s)`."""
    count, assumed = _IN_A_SECOND[unit]
    which = f", for {unit}{assumed}" if assumed else ""
    return f"--length-scale 1/{count} --unit s (the longest is then {format_seconds(longest / count)}{which})"


def limit_unit_hint(lengths: Lengths, max_batch_length: float) -> str | None:
    """Return a guess at the intended max_batch_length, without a full stop; None if it is plausible as it is."""
    unit = lengths.unit
    longest = lengths.longest
    median = float(lengths.values[lengths.count // 2])
    meant = []
    if max_batch_length < longest * _NEAR.get(unit or "", 1.0) and max_batch_length <= _MOST_SECONDS:
        for other in [unit] if unit else ["ms", "samples"]:
            count, assumed = _IN_A_SECOND.get(other, (0, ""))
            if max_batch_length * count >= 2 * longest:  # a batch of several examples
                which = f" (for {other}{assumed})" if assumed or not unit else ""
                meant.append(f"--max-batch-length {max_batch_length * count:.15g}{which}")
    if not meant and max_batch_length >= median:
        return None
    limit = format_length(max_batch_length, unit)
    if max_batch_length < median:
        than = f"shorter than the median example ({format_length(median, unit)})"
    elif max_batch_length < longest:
        than = f"shorter than the longest example ({format_length(longest, unit)})"
    else:
        than = f"hardly longer than the longest example ({format_length(longest, unit)})"
    counted = f"The lengths are in {unit}" if unit else "Nothing says what the lengths count"
    values = f": if {limit.split()[0]} s is meant, give {' or '.join(meant)}" if meant else ""
    return f"max_batch_length {limit} is {than}. Is it in another unit? {counted}{values}"
