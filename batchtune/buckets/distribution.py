"""The distribution of a data set's lengths, as such and over a table's buckets, for reports and for drift."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from batchtune.buckets.epoch_cost import Pricing
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.measured_costs import ProvenBy
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths
from batchtune.results import BucketUse, HistogramBin, Row

QUANTILES = 1000
_BINS = 60
# Where the longest is more than so many times the shortest, even bins would put nearly all into the first.
_WIDE = 200.0


def histogram_of(lengths: Lengths, bins: int = _BINS) -> list[HistogramBin]:
    """Return ascending bins that cover all lengths: even, or of even ratio where lengths span more than 200 times."""
    shortest = lengths.shortest
    longest = lengths.longest
    if shortest == longest:
        return [
            HistogramBin(
                from_=math.nextafter(shortest, 0), to=longest, count=lengths.count
            )
        ]
    spaced = np.geomspace if longest > _WIDE * shortest else np.linspace
    edges = spaced(shortest, longest, bins + 1)
    edges[0] = math.nextafter(shortest, 0)
    edges[-1] = longest
    counts = np.diff(
        np.searchsorted(lengths.values[::-1], edges, side="right")
    ).tolist()
    spans = pairwise(edges.tolist())
    return [
        HistogramBin(from_=low, to=high, count=count)
        for (low, high), count in zip(spans, counts, strict=True)
    ]


def quantiles_of(lengths: Lengths) -> list[float]:
    """Shape (1001,): quantile i / 1000 at position i, by nearest rank, so that each occurs; ascending."""
    ranks = np.ceil(np.arange(QUANTILES + 1) / QUANTILES * lengths.count).astype(
        np.int64
    )
    quantiles: list[float] = lengths.values[::-1][np.maximum(ranks, 1) - 1].tolist()
    return quantiles


def bucket_uses(
    lengths: Lengths, pricing: Pricing, row: Row, proven_by: ProvenBy | None = None
) -> list[BucketUse]:
    """Describe what each bucket of a row's table holds and costs over all ranks, those without examples too.

    Of pools the list is empty: their batches hold examples of several buckets. `pricing` has the lengths as batches are
    padded to them, `lengths` the true ones.
    """
    if row.pool_size is not None:
        return []
    table = BucketTable.of(row.boundaries, row.batch_sizes)
    histogram = pricing.lengths.histogram
    expected = expected_batches(histogram, table, pricing.ranks.dealing)
    ends = table.edges(histogram)[1:]
    counts = table.counts(histogram)
    cells = expected.numbers * expected.batch_sizes * expected.lengths
    padded = np.bincount(expected.buckets, cells, table.num_buckets)
    batches = np.bincount(
        expected.tally.buckets, expected.tally.numbers, table.num_buckets
    )
    totals = np.concatenate(([0.0], np.cumsum(lengths.values[::-1])))
    true = np.diff(totals[np.cumsum(counts)], prepend=0.0)
    buckets = []
    for bucket in range(table.num_buckets):
        examples = int(counts[bucket])
        proof = None
        if proven_by is not None and examples:
            longest = float(histogram.lengths[ends[bucket] - 1])
            proof = proven_by(longest, min(row.batch_sizes[bucket], examples))
        buckets.append(
            BucketUse(
                boundary=row.boundaries[bucket],
                batch_size=row.batch_sizes[bucket],
                examples=examples,
                batches=int(batches[bucket]),
                length=float(true[bucket]),
                padded_length=max(float(padded[bucket]), float(true[bucket])),
                proven_by=proof,
            )
        )
    return buckets
