"""The records of `verify.json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from batchtune.results.probe import Outcome
from batchtune.results.shared import (
    Amount,
    ByteChange,
    Bytes,
    Count,
    Device,
    Length,
    LengthsSummary,
    Record,
    Result,
    Size,
    TargetLength,
    WorkloadRecord,
    wrong_boundaries,
)

VerifyPhase = Literal["worst", "shuffled"]


class VerifyFailure(Record, frozen=True, kw_only=True):
    """A batch of the verification that did not pass.

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


class Proposal(Record, frozen=True, kw_only=True):
    """The next smaller sizes, where a table did not hold.

    Attributes:
        bucket_batch_sizes: Instead of the table's, with its boundaries.
        max_batch_length: Instead of the table's, for samplers that work batch sizes out of it.
        verified: Whether these batch sizes were run like the table's, in a fresh worker process, and passed.
        steps: How many steps that took.
    """

    bucket_batch_sizes: list[Size]
    max_batch_length: Length
    verified: bool
    steps: Count


class Verification(Result, frozen=True, kw_only=True):
    """`verify.json`: the recommended batches, run for real.

    Attributes:
        bucket_boundaries, bucket_batch_sizes, max_batch_length: The table that was run, as `sampler.yaml` had it.
        worst_steps: Steps with the worst shape of each bucket, before the shuffled ones.
        steps: Shuffled steps that passed.
        planned_steps: Shuffled steps that were to be run; None where time decided.
        epoch_batches: Batches of one epoch.
        alloc_retries: How often the allocator emptied its cache to go on, after each shape had been run once.
        peak_bytes, reserved_bytes: The most in use, and the most held by the allocator; None where unknown.
        rest_growth_bytes: By how much memory in use between steps grew, from the second to the last quarter of the
            shuffled steps (of the worst shapes', where it did not come to those); None where too few steps passed.
        reserved_growth_bytes: The same of what the allocator holds.
        estimated_epoch_seconds: Of this table, by the probe's step times; None without them.
        measured_epoch_seconds: From the shuffled steps, scaled to the epoch; None where none passed.
        time_ratio: Measured / estimated time of exactly the batches that were run.
        time_ratio_spread: Interquartile range of that ratio over the steps.
        holds: Whether all that was checked is as it should be.
        reasons: Why it does not hold; sentences without a full stop. Empty where it does.
        warnings: What to know besides, each a sentence without a full stop.
        proposal: Smaller sizes; None where it holds, or where smaller sizes don't help.
    """

    FORMAT: ClassVar[str] = "batchtune/verify"

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    max_batch_length: Length
    worst_steps: Count
    steps: Count
    planned_steps: Count | None
    epoch_batches: Count
    failures: list[VerifyFailure]
    alloc_retries: Count | None
    peak_bytes: Bytes | None
    reserved_bytes: Bytes | None
    rest_growth_bytes: ByteChange | None
    reserved_growth_bytes: ByteChange | None
    estimated_epoch_seconds: Amount | None
    measured_epoch_seconds: Amount | None
    time_ratio: Amount | None
    time_ratio_spread: Amount | None
    holds: bool
    reasons: list[str]
    warnings: list[str]
    proposal: Proposal | None

    def problems(self) -> Iterator[str]:
        """Yield each contradiction between the numbers."""
        yield from self.lengths.problems()
        yield from wrong_boundaries(self.bucket_boundaries)
        buckets = len(self.bucket_boundaries)
        proposed = self.proposal.bucket_batch_sizes if self.proposal is not None else self.bucket_batch_sizes
        for what, sizes in (("batch sizes", self.bucket_batch_sizes), ("proposed batch sizes", proposed)):
            if len(sizes) != buckets:
                yield f"it has {buckets} boundaries and {len(sizes)} {what}"
        for failure in self.failures:
            if failure.bucket >= buckets:
                yield f"failures: bucket {failure.bucket} of {buckets}"
