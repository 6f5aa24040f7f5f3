"""A small bucket table, and streams of made examples with it."""

from batchtune import BucketedStream

TABLE = {
    "bucket_boundaries": [5, 12, 30],
    "bucket_batch_sizes": [9, 4, 2],
}


def length_of(example):
    return float(example["length"])


def ids(batch):
    return [example["id"] for example in batch]


def made_stream_of(source, **options):
    """A stream whose batches are the ids of their examples."""
    given = {"length_of": length_of, "buffer_size": 40, "collate_fn": ids, **TABLE}
    return BucketedStream(source, **{**given, **options})
