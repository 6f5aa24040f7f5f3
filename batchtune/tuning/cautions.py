"""Warnings about the tables that were compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.batching.strategies import STRATEGIES
from batchtune.batching.strategies.speechbrain import capped_by_num_buckets, single_bucket
from batchtune.batching.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import Row
from batchtune.tuning.current.base import Current, CurrentTable
from batchtune.tuning.unit_hints import limit_unit_hint
from batchtune.units import format_length

_CURRENT = "your current config"


def cautions(lengths: Lengths, limits: Limits, num_buckets: Sequence[int], rows: Sequence[Row]) -> list[str]:
    """Return the warnings of a sweep, each at most once however many rows it concerns.

    Args:
        lengths: The data set.
        limits: What limits the batch size.
        num_buckets: The bucket counts that were asked for.
        rows: The tables that came of them.
    """
    limit = limits.max_batch_length
    unit = limit_unit_hint(lengths, limit)
    found = [*([] if unit is None else [unit]), *_overlong(lengths, limit)]
    for name, strategy in STRATEGIES.items():
        found += strategy.cautions(lengths, limit, [row for row in rows if row.strategy == name])
    return [*found, *_more_buckets_than_lengths(lengths, num_buckets)]


def cap_cautions(current: Current, recommended: Row | None, max_batch_size: int | None) -> Iterator[str]:
    """Yield the limits in use now that the compared tables do not keep.

    Args:
        current: The settings in use now.
        recommended: The recommended row; None without one.
        max_batch_size: The most examples that the tables were allowed in a batch; None: any.
    """
    name = {"speechbrain": "max_batch_ex", "nemo": "batch_size"}.get(current.kind)
    cap = None if name is None else current.settings.get(name)
    beside = current.kind != "nemo" or (
        "batch_duration" in current.settings and "bucket_batch_size" not in current.settings
    )
    if isinstance(cap, int) and beside and recommended is not None and max(recommended.batch_sizes) > cap:
        swept = "" if max_batch_size is None else f" (--max-batch-size {max_batch_size})"
        yield (
            f"{name} of {_CURRENT} allows {cap:,} examples in a batch, the recommended table up to "
            f"{max(recommended.batch_sizes):,}{swept}: to keep your limit, sweep with --max-batch-size {cap}"
        )
    if current.kind == "nemo" and "quadratic_duration" in current.settings:
        yield (
            f"quadratic_duration of {_CURRENT} makes batches of long examples smaller, and the tables do not know it: "
            "batch sizes from a probe are measured at each length and need none, those from --max-batch-length alone "
            "may not fit where yours do"
        )


def current_cautions(current: Current, found: CurrentTable, row: Row) -> list[str]:
    """Return warnings about the settings that are in use now, each a sentence without a full stop.

    Args:
        current: The settings.
        found: The batches that they make of the lengths.
        row: That table, evaluated.
    """
    cautions = []
    left_out = sum(found.left_out.values())
    if left_out:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in found.left_out.items())
        cautions.append(
            f"{_CURRENT} leaves out {left_out:,} of {found.lengths.count + left_out:,} examples ({reasons}): its "
            "figures are those of the others"
        )
    limit = found.max_batch_length
    if current.kind == "speechbrain" and limit is not None:
        consequence = "SpeechBrain makes {each} a batch of one"
        cautions += _longer_than(found.lengths, limit, f"max_batch_length of {_CURRENT},", consequence)
        # Boundaries that are given stay where they are when max_batch_length is raised.
        if "bucket_boundaries" not in current.settings:
            cautions += capped_by_num_buckets(found.lengths, limit, [row], _CURRENT)
            cautions += single_bucket([row], _CURRENT)
        elif max(row.batch_sizes) == 1 < current.settings.get("max_batch_ex", limit) and row.boundaries[0] > limit / 2:
            smallest = format_length(row.boundaries[0], found.lengths.unit)
            cautions.append(
                f"{_CURRENT} makes batches of one example, because its smallest boundary, {smallest}, is more than "
                f"half of max_batch_length {format_length(limit, found.lengths.unit)}"
            )
    elif current.kind == "nemo" and limit is not None:
        consequence = "batches that hold such an example exceed it"
        cautions += _longer_than(found.lengths, limit, f"batch_duration of {_CURRENT},", consequence)
    return cautions


def _overlong(lengths: Lengths, max_batch_length: float) -> Iterator[str]:
    """Warn of examples that alone exceed the limit, and say what the frameworks do with them.

    Sources: `DynamicBatchSampler` of SpeechBrain 1.1 (batch size at least 1, and 1 beyond the last boundary);
    `TimeConstraint` of Lhotse 1.33 and `NumElementsBatchSampler` of ESPnet (an example is added first, and closes the
    batch if it then exceeds); `data_utils_fast.pyx` of fairseq (asserts that none is above max_tokens);
    `BucketingFilter` of NeMo.
    """
    consequence = (
        "where it sets the batch size (SpeechBrain, batchtune's sampler), {each} becomes a batch of one; Lhotse and "
        "ESPnet make batches that exceed it, fairseq stops with an error; NeMo with bucket_batch_size drops only what "
        "is longer than its last bin"
    )
    yield from _longer_than(lengths, max_batch_length, "max_batch_length", consequence)


def _longer_than(lengths: Lengths, limit: float, name: str, consequence: str) -> Iterator[str]:
    """`consequence` may say {each} for "it" or "each of them"."""
    overlong = int(np.count_nonzero(lengths.values > limit))
    if not overlong:
        return
    examples, each = ("example is", "it") if overlong == 1 else ("examples are", "each of them")
    shown, longest = (format_length(length, lengths.unit) for length in (limit, lengths.longest))
    then = consequence.format(each=each)
    yield f"{overlong:,} {examples} longer than {name} {shown} (the longest is {longest}): {then}"


def _more_buckets_than_lengths(lengths: Lengths, num_buckets: Sequence[int]) -> Iterator[str]:
    distinct = lengths.histogram.lengths.size
    if max(num_buckets) > distinct:
        values = "only one value" if distinct == 1 else f"only {distinct} different values"
        yield (
            f"up to {max(num_buckets)} buckets were asked for, but the lengths take {values}: "
            f"no more than {distinct} can hold an example"
        )
