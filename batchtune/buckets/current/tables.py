"""Settings that are a table themselves: boundaries with batch sizes, and a fixed batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from batchtune.buckets.current.base import Current, CurrentTable, Settings, TableKind
from batchtune.epochs.batchers import Batching
from batchtune.epochs.table import BucketTable
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.units import counted, format_length


def table_for(settings: Mapping[str, Any], source: str, lengths: Lengths) -> BucketTable:
    """Return boundaries and batch sizes as a table.

    Raises ResultError if they end before the longest length, ValueError for no table.
    """
    last = settings["bucket_boundaries"][-1]
    if lengths.longest > last:
        raise ResultError(
            f"{source}: the longest example ({format_length(lengths.longest, lengths.unit)}) is beyond the "
            f"last boundary {format_length(last, lengths.unit)}, so batchtune's sampler would refuse it",
            "The table is of other data: leave --current out, or longer examples with --max-length.",
        )
    return BucketTable(np.array(settings["bucket_boundaries"]), np.array(settings["bucket_batch_sizes"]))


def checked_table(settings: Settings) -> dict[str, object]:
    """Return boundaries and batch sizes, checked."""
    for name in ("bucket_boundaries", "bucket_batch_sizes"):
        if not settings.has(name):
            raise settings.wrong(name, "is missing", "A table needs boundaries and a batch size for each.")
    boundaries = settings.lengths("bucket_boundaries")
    sizes = settings.counts("bucket_batch_sizes")
    if len(boundaries) != len(sizes):
        problem = f"has {counted(len(sizes), 'number')} for {len(boundaries):,} bucket_boundaries"
        raise settings.wrong("bucket_batch_sizes", problem, "Give one batch size for each boundary.")
    return {"bucket_boundaries": boundaries, "bucket_batch_sizes": sizes}


class OwnTable(TableKind):
    """Boundaries and a batch size for each, or the same with pools."""

    name = "batchtune"
    keys = ("bucket_boundaries", "bucket_batch_sizes", "pool_size", "batch_overhead")
    signs = ("bucket_batch_sizes",)

    def read(self, settings: Settings) -> dict[str, object]:
        """Check boundaries and sizes."""
        pool_size = settings.given(settings.count, "pool_size")
        overhead = settings.given(settings.amount, "batch_overhead")
        if overhead and not pool_size:
            raise settings.wrong("batch_overhead", "goes with pool_size", "Give both, or neither.")
        return {**pool_size, **overhead, **checked_table(settings)}

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the table itself; an example beyond its last boundary, which the sampler refuses, is an error."""
        settings = current.settings
        pool_size = settings.get("pool_size")
        made = counted(len(settings["bucket_boundaries"]), "bucket")
        if pool_size is not None:
            made = f"pools of {counted(pool_size, 'example')}"
        table = table_for(settings, current.given.source, lengths)
        return CurrentTable(
            batching=Batching(table, pool_size, settings.get("batch_overhead")),
            describe=f"batchtune's sampler, {made}",
        )


class FixedSize(TableKind):
    """A fixed batch size."""

    name = "fixed"
    keys = ("batch_size",)
    signs = ("batch_size",)

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the batch size."""
        return {"batch_size": settings.count("batch_size")}

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return one bucket up to the longest length."""
        size = current.settings["batch_size"]
        return CurrentTable(
            batching=Batching(BucketTable(np.array([lengths.longest]), np.array([size], dtype=np.int64))),
            describe=f"fixed batches of {size:,}",
        )
