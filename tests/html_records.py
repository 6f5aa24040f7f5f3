"""Made records for the tests of the HTML report: all that a page can show."""

import dataclasses

from loader_records import hostile_loader, made_loader
from msgspec.structs import replace
from report_records import (
    COUNT,
    TOTAL_SECONDS,
    hostile_results,
    made_probe,
    made_verification,
    whole_sweep,
)
from streamed_records import hostile_stream, whole_stream

from batchtune.reports import RunResults
from batchtune.results import BucketUse, HistogramBin

CONFIGS = {
    "sampler.yaml": "# <b>the</b> recommendation\nnum_buckets: 13\n\nbucket_boundaries: [1.5, 3.25]  # & more\n",
    "speechbrain": "\n  dynamic_batching: !new:x\n    note: \"it's 'quoted'\"\n",
    "nemo": "trainer:\n  max_epochs: 1",
}


def with_data(sweep, count=COUNT, *, logarithmic=True):
    """The sweep with a histogram, quantiles and use of buckets, of so many examples."""
    ratio = 24.525 / 1.41
    edges = [
        1.41 * ratio ** (i / 40) if logarithmic else 1.41 + (24.525 - 1.41) * i / 40
        for i in range(41)
    ]
    shares = [i * (40 - i) for i in range(40)]
    bins = [
        HistogramBin(from_=low, to=high, count=count * share // sum(shares))
        for low, high, share in zip(edges, edges[1:], shares, strict=False)
    ]
    total = TOTAL_SECONDS * count / COUNT
    row = sweep.recommended_row
    buckets = []
    if row is not None:
        examples = count // len(row.boundaries)
        length = total / len(row.boundaries)
        buckets = [
            BucketUse(
                boundary=boundary,
                batch_size=size,
                examples=examples,
                batches=-(-examples // size),
                length=length,
                padded_length=length * 1.05,
            )
            for boundary, size in zip(row.boundaries, row.batch_sizes, strict=True)
        ]
    return replace(
        sweep,
        lengths=replace(sweep.lengths, count=count, total=total),
        histogram=bins,
        buckets=buckets,
    )


def full_results():
    """A run whose report has every section."""
    return RunResults(
        name="librispeech-100",
        probe=made_probe(),
        sweep=with_data(whole_sweep()),
        verification=made_verification(),
        stream=whole_stream(),
        loader=made_loader(),
    )


def hostile_full_results(text):
    """A run with every section in which every string that a file can freely choose holds this text."""
    results = hostile_results(text)
    return dataclasses.replace(
        results,
        sweep=with_data(results.sweep),
        stream=hostile_stream(text),
        loader=hostile_loader(text),
    )
