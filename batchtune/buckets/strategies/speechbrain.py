"""Boundaries as SpeechBrain's DynamicBatchSampler takes them from `num_buckets`, and its traps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.buckets.strategies.base import Problem, Strategy
from batchtune.epochs.samplers import speechbrain_table
from batchtune.lengths import SPEECH_UNITS, FloatArray, Lengths
from batchtune.results import Row
from batchtune.units import format_length, format_number


class SpeechBrain(Strategy):
    """SpeechBrain's own boundaries."""

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Return SpeechBrain's boundaries, and one more, the longest length, where that is beyond its last.

        max_batch_length / boundary is below 1 in that one more bucket, or 1 where rounding put SpeechBrain's last
        boundary just below max_batch_length: its batch size is 1 by the common rule too.
        """
        histogram = problem.histogram
        limit = problem.max_batch_length
        return [speechbrain_table(histogram, limit, num_buckets=buckets).boundaries for buckets in num_buckets]

    def cautions(self, lengths: Lengths, max_batch_length: float, rows: Sequence[Row]) -> Iterator[str]:
        """Warn of numbers of buckets that keep batches small; of text, nobody takes SpeechBrain's."""
        if lengths.unit not in (*SPEECH_UNITS, None):
            return
        yield from capped_by_num_buckets(lengths, max_batch_length, rows)
        yield from single_bucket(rows)

    def practice(self, num_buckets: int) -> str | None:
        """Return a name for 10 to 20 buckets, which SpeechBrain's recipes and its documentation set."""
        if 10 <= num_buckets <= 20:
            return f"SpeechBrain's num_buckets={num_buckets}"
        return None


def capped_by_num_buckets(
    lengths: Lengths, max_batch_length: float, rows: Sequence[Row], who: str = "speechbrain"
) -> Iterator[str]:
    """Warn of rows whose batches max_batch_length can't make larger: the first boundary grows with it.

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
    if capped:
        first = capped[0]
        last = capped[-1]
        others = f"; the same holds up to num_buckets={last.num_buckets}" if last is not first else ""
        yield (
            f"{who} with num_buckets={first.num_buckets} can't make a batch of more than "
            f"{first.batch_sizes[0]} examples whatever max_batch_length is: its fullest batch here is "
            f"{format_number(first.largest_padded_length)} of {format_length(max_batch_length, lengths.unit)}; "
            f"raising max_batch_length changes nothing{others}"
        )


def single_bucket(rows: Sequence[Row], who: str = "speechbrain") -> Iterator[str]:
    """Warn of a single bucket, which makes batches of one."""
    if any(row.num_buckets == 1 for row in rows):
        yield f"{who} with num_buckets=1 makes batches of one example, because its only boundary is max_batch_length"
