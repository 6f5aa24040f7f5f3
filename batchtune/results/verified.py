"""The record of `verify.json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from batchtune.results.measured import Outcome
from batchtune.results.shared import (
    PER_CENT,
    Amount,
    ByteChange,
    Bytes,
    Count,
    Length,
    Measured,
    Record,
    Share,
    Size,
    StreamAlgorithm,
    TargetLength,
    wrong_table,
)

VerifyPhase = Literal["worst", "shuffled"]


class VerifyFailure(Record, frozen=True, kw_only=True):
    """A batch of the verification that failed.

    Attributes:
        phase: Among the worst shapes, or among the shuffled batches.
        step: Position in its phase, from 0.
        bucket: Index of its bucket in the table.
        outcome: `oom`, `crash` or `timeout`.
    """

    phase: VerifyPhase
    step: Count
    bucket: Count
    batch_size: Size
    length: Length
    target_length: TargetLength | None
    outcome: Outcome
    error: str | None


class Verification(Measured, frozen=True, kw_only=True):
    """`verify.json`: the recommended batches, run for real.

    Attributes:
        bucket_boundaries, bucket_batch_sizes, max_batch_length: The table that was run, as in `sampler.yaml`.
        pool_size, batch_overhead: How batches were cut from pools, likewise; None: they were made in buckets.
        algorithm, buffer_size, max_padding_ratio: Of a stream's batches, as in `stream.yaml`; None without a stream.
        worst_steps: Steps with the worst shape of each bucket, before the shuffled ones.
        steps: Shuffled steps that passed.
        planned_steps: Shuffled steps that were to be run.
        epoch_batches: Batches of one epoch.
        alloc_retries: How often the allocator emptied its cache to go on, after each shape had run once.
        peak_bytes, reserved_bytes: The most in use, and the most held by the allocator; None where unknown.
        rest_growth_bytes: Growth of the memory in use between steps, from the second to the last quarter of the
            shuffled steps (of the worst shapes' steps if there are no others); None if too few passed.
        reserved_growth_bytes: The same for the memory that the allocator holds.
        estimated_epoch_seconds: Of this table, by the probe's step times; None without them.
        measured_epoch_seconds: From the shuffled steps, scaled to the epoch; None if none passed.
        time_ratio: Measured / estimated time of exactly the batches that were run.
        time_ratio_error: Standard error of that ratio; None for fewer than four steps.
        holds: Whether every check passed.
        reasons: Why it does not hold, each a sentence without a full stop; empty if it holds.
        warnings: Each a sentence without a full stop.
    """

    FORMAT: ClassVar[str] = "batchtune/verify"

    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    max_batch_length: Length
    worst_steps: Count
    steps: Count
    planned_steps: Count
    epoch_batches: Count
    failures: list[VerifyFailure]
    alloc_retries: Count | None
    peak_bytes: Bytes | None
    reserved_bytes: Bytes | None
    rest_growth_bytes: ByteChange | None
    reserved_growth_bytes: ByteChange | None
    estimated_epoch_seconds: Amount | None
    measured_epoch_seconds: Amount | None
    time_ratio: Annotated[Amount, PER_CENT] | None
    time_ratio_error: Annotated[Amount, PER_CENT] | None
    holds: bool
    reasons: list[str]
    warnings: list[str]
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    algorithm: StreamAlgorithm | None = None
    buffer_size: Size | None = None
    max_padding_ratio: Share | None = None

    @property
    def of_stream(self) -> bool:
        """Whether the batches of a stream were run."""
        return self.algorithm is not None

    def problems(self) -> Iterator[str]:
        """Check the tables, and that the failures are in their buckets."""
        yield from wrong_table(self.bucket_boundaries, self.bucket_batch_sizes)
        for failure in self.failures:
            if failure.bucket >= len(self.bucket_boundaries):
                yield f"failures: bucket {failure.bucket} of {len(self.bucket_boundaries)}"
