"""Warnings about the data and the tables that were compared, and hints at a wrong unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.buckets.strategies import STRATEGIES
from batchtune.epochs.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import Row
from batchtune.units import counted, format_length

# Sources: `DynamicBatchSampler` of SpeechBrain 1.1 (batch size at least 1, and 1 beyond the last boundary);
# `TimeConstraint` of Lhotse 1.33 and `NumElementsBatchSampler` of ESPnet (an example is added first, and closes the
# batch if it then exceeds); `data_utils_fast.pyx` of fairseq (asserts that none is above max_tokens);
# `BucketingFilter` of NeMo.
_OVERLONG = (
    "where it sets the batch size (SpeechBrain, batchtune's sampler), each becomes a batch of one; Lhotse and "
    "ESPnet make batches that exceed it, fairseq stops with an error; NeMo with bucket_batch_size drops only what "
    "is longer than its last bin"
)
# How to turn lengths into seconds; where the unit does not say it, as they are most often.
_TO_SECONDS = {"ms": "1/1000", "samples": "1/16000", "frames": "1/100"}


def cautions(lengths: Lengths, limits: Limits, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the warnings of a sweep, each at most once however many rows it concerns."""
    limit = limits.max_batch_length
    unit = limit_unit_hint(lengths, limit)
    if unit is not None:
        yield unit
    yield from longer_than(lengths, limit, "max_batch_length", _OVERLONG)
    for name, strategy in STRATEGIES.items():
        yield from strategy.cautions(
            lengths, limit, [row for row in rows if row.strategy == name]
        )
    if rows and all(row.unproven for row in rows):
        yield (
            "every row has batch sizes that are not proven to fit, the recommended one too: run its batches with "
            "`batchtune verify` before you train with them"
        )


def longer_than(
    lengths: Lengths, limit: float, name: str, consequence: str
) -> Iterator[str]:
    """Warn of examples beyond a limit, and what becomes of each."""
    overlong = int(np.count_nonzero(lengths.values > limit))
    if overlong:
        shown = format_length(limit, lengths.unit)
        longest = format_length(lengths.longest, lengths.unit)
        yield f"{counted(overlong, 'example')} longer than {name} {shown} (the longest is {longest}): {consequence}"


def workload_unit_hint(lengths: Lengths, workload: str) -> str | None:
    """Return a hint, in full sentences, where one example does not fit and the workload may expect seconds.

    None where the lengths are seconds, or no times; a built-in workload knows the unit.
    """
    if lengths.unit not in _TO_SECONDS or workload.startswith("builtin:"):
        return None
    return (
        f"Is the unit right? The workload is given lengths up to {format_length(lengths.longest, lengths.unit)}. If it "
        f"expects seconds, convert them, for example with --length-scale {_TO_SECONDS[lengths.unit]} --unit s."
    )


def limit_unit_hint(lengths: Lengths, max_batch_length: float) -> str | None:
    """Return a doubt about the unit of max_batch_length, without a full stop; None if it is plausible."""
    median = float(lengths.values[lengths.count // 2])
    if max_batch_length >= median:
        return None
    unit = "The unit of the lengths is not known"
    if lengths.unit is not None:
        unit = f"The lengths are in {lengths.unit}"
    return (
        f"max_batch_length {format_length(max_batch_length, lengths.unit)} is shorter than the median example "
        f"({format_length(median, lengths.unit)}). Is it in another unit? {unit}"
    )
