"""A fixed batch size."""

from __future__ import annotations

import numpy as np

from batchtune.batching.table import BucketTable
from batchtune.lengths import Lengths
from batchtune.tuning.current.records import Current, CurrentTable
from batchtune.tuning.current.values import Settings

KEYS = ("batch_size", "sorting", "drop_last", "shuffle")


def read(settings: Settings) -> Current:
    """Checks the batch size.

    Raises:
        BatchtuneError: It is no whole number from 1.
    """
    if not settings.has("batch_size"):
        raise settings.wrong(None, "needs batch_size", "Give it as a whole number.")
    found: dict[str, object] = {"batch_size": settings.count("batch_size")}
    if settings.values.get("sorting") in ("ascending", "descending"):
        found["sorting"] = settings.values["sorting"]
    return Current(
        kind="fixed",
        settings=found,
        source=settings.source,
        key_path=settings.key_path,
        notes=settings.notes,
    )


def table(current: Current, lengths: Lengths) -> CurrentTable:
    """One bucket up to the longest length."""
    size = current.settings["batch_size"]
    sorting = current.settings.get("sorting")
    notes = list(current.notes)
    if sorting is not None:
        notes.append(
            f"the examples are sorted (sorting: {sorting}), which pads less than the shuffled batches counted here"
        )
    return CurrentTable(
        table=BucketTable(np.array([lengths.longest]), np.array([size], dtype=np.int64)),
        lengths=lengths,
        sizing="frontier",
        max_batch_length=None,
        describe=f"fixed batches of {size:,}",
        exact=sorting is None,
        notes=tuple(notes),
    )
