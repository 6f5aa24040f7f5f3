"""The record of `sampler.yaml`."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from batchtune.results.shared import (
    Amount,
    Bytes,
    Count,
    Length,
    Record,
    Seed,
    Share,
    Size,
)


class SamplerEvidence(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evidence for the recommendation.

    Attributes:
        fingerprint: Of the lengths that the table was made for.
        device: Name of the device that was measured; None without a probe.
        batches: Batches of one epoch, over all ranks of the sweep.
        padding_ratio: Padded cells / all cells.
        estimated_epoch_seconds: None without step times.
        unproven: How many buckets have a batch size that is not proven to fit; None without a probe.
        margin_bytes: Memory that proven batches leave free; None if unknown.
        min_length, max_length: The limits of --min-length and --max-length: no batch with shorter or longer examples
            was counted or run. None without such a limit.
        left_out: Reason → number of examples left out.
        truncate: Where training cuts longer examples off: the sampler counts them as this long. None: nowhere.
        multiple_of: Batches were counted as padded to multiples of it; None: to their longest example.
    """

    fingerprint: str
    device: str | None
    batches: Count
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None
    unproven: Count | None = None
    margin_bytes: Bytes | None = None
    min_length: Length | None = None
    max_length: Length | None = None
    left_out: dict[str, Count] = msgspec.field(default_factory=dict)
    truncate: Length | None = None
    multiple_of: Length | None = None


class SamplerConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `sampler.yaml`, in its order.

    Attributes:
        unit: Of lengths, boundaries and max_batch_length; None if unknown.
        max_batch_length: The largest padded length of a batch that the sweep allowed.
        max_batch_size: The largest of bucket_batch_sizes.
        num_buckets: Number of boundaries.
        bucket_boundaries: Inclusive upper edges, strictly ascending.
        bucket_batch_sizes: One for each boundary, at least 1.
        sampler: How batches are made: in the buckets, or in sorted pools, where the buckets say how many examples fit
            with the longest one of a batch.
        pool_size: The most examples of a pool; None in buckets.
        batch_overhead: The cost of a batch beyond its padded length, in the unit; pools are cut to minimise the total.
            None: each batch holds as many examples as fit.
    """

    FORMAT: ClassVar[str] = "batchtune/sampler"

    format: str
    version: int
    unit: str | None
    max_batch_length: Length
    max_batch_size: Size
    num_buckets: Size
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    shuffle: bool
    batch_ordering: Literal["random", "ascending", "descending"]
    drop_last: bool
    seed: Seed
    evidence: SamplerEvidence
    sampler: Literal["bucket", "pooled"] = "bucket"
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
