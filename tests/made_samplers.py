"""A small bucket table, and streams of made examples with it."""

from __future__ import annotations

from typing import Any

from batchtune import BucketedStream

TABLE: dict[str, Any] = {
    "bucket_boundaries": [5, 12, 30],
    "bucket_batch_sizes": [9, 4, 2],
}


def length_of(example: dict[str, Any]) -> float:
    return float(example["length"])


def ids(batch: list[dict[str, Any]]) -> list[Any]:
    return [example["id"] for example in batch]


def made_stream_of(source: Any, **options: Any) -> BucketedStream:
    """A stream whose batches are the ids of their examples."""
    given = {"length_of": length_of, "buffer_size": 40, "collate_fn": ids, **TABLE}
    return BucketedStream(source, **{**given, **options})
