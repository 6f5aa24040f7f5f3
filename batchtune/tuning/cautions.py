"""What a user should know about the tables that were compared, as full sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.batching.limits import Limits
from batchtune.lengths import Lengths
from batchtune.results import Row
from batchtune.units import format_length, format_number


def cautions(lengths: Lengths, limits: Limits, num_buckets: Sequence[int], rows: Sequence[Row]) -> list[str]:
    """The warnings of a sweep, each at most once however many rows it concerns.

    Args:
        lengths: The data set.
        limits: What limits the batch size.
        num_buckets: The bucket counts that were asked for.
        rows: The tables that came of them.
    """
    of_speechbrain = [row for row in rows if row.strategy == "speechbrain"]
    return [
        *_overlong(lengths, limits.max_batch_length),
        *_capped_by_num_buckets(lengths, limits.max_batch_length, of_speechbrain),
        *_single_bucket(of_speechbrain),
        *_more_buckets_than_lengths(lengths, num_buckets),
    ]


def _overlong(lengths: Lengths, max_batch_length: float) -> Iterator[str]:
    overlong = int(np.count_nonzero(lengths.values > max_batch_length))
    if not overlong:
        return
    examples, each = ("example is", "it") if overlong == 1 else ("examples are", "each of them")
    limit, longest = (format_length(length, lengths.unit) for length in (max_batch_length, lengths.longest))
    yield (
        f"{overlong:,} {examples} longer than max_batch_length {limit} (the longest is {longest}): "
        f"where it sets the batch size, {each} becomes a batch of one"
    )


def _capped_by_num_buckets(lengths: Lengths, max_batch_length: float, rows: Sequence[Row]) -> Iterator[str]:
    """SpeechBrain's first boundary grows with max_batch_length, so its batch size never does.

    It is about exp(2·z_N), z_N the normal quantile at N / (N + 1); once everything falls into the first
    bucket it is the size of all batches.
    """
    capped = [
        row
        for row in sorted(rows, key=lambda row: row.num_buckets)
        if row.num_buckets > 1
        and lengths.longest <= row.boundaries[0]
        and row.batch_sizes[0] == int(max_batch_length / row.boundaries[0])
        and row.batch_sizes[0] < lengths.count
    ]
    if not capped:
        return
    first, last = capped[0], capped[-1]
    others = f"; the same holds up to num_buckets={last.num_buckets}" if last is not first else ""
    yield (
        f"speechbrain with num_buckets={first.num_buckets} can't make a batch of more than "
        f"{first.batch_sizes[0]} examples whatever max_batch_length is: its fullest batch here is "
        f"{format_number(first.largest_padded_length)} of {format_length(max_batch_length, lengths.unit)}; "
        f"raising max_batch_length changes nothing{others}"
    )


def _single_bucket(rows: Sequence[Row]) -> Iterator[str]:
    if any(row.num_buckets == 1 for row in rows):
        yield (
            "speechbrain with num_buckets=1 makes batches of one example, because its only boundary is max_batch_length"
        )


def _more_buckets_than_lengths(lengths: Lengths, num_buckets: Sequence[int]) -> Iterator[str]:
    distinct = lengths.histogram.lengths.size
    if max(num_buckets) > distinct:
        values = "only one value" if distinct == 1 else f"only {distinct} different values"
        yield (
            f"up to {max(num_buckets)} buckets were asked for, but the lengths take {values}: "
            f"no more than {distinct} can hold an example"
        )
