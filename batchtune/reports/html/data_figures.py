"""What the data look like, and what the recommended buckets make of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchtune.reports.html.figure import (
    Figure,
    Point,
    View,
    axis,
    bars,
    drawable,
    hover,
    label,
    length_unit,
    points,
    thinned,
)
from batchtune.reports.table import UNKNOWN, Column, make_table
from batchtune.results import BucketUse, Row, Sweep
from batchtune.units import counted, format_length, format_number, format_percent


def histogram_figure(sweep: Sweep) -> Figure | None:
    """Draw how many examples have which length, with the recommended boundaries; None without a histogram."""
    bins = [b for b in sweep.histogram if drawable(b.from_) and drawable(b.to) and drawable(b.count) and b.to > b.from_]
    if not bins:
        return None
    unit, row, shown = sweep.lengths.unit, sweep.recommended_row, thinned(bins)
    # Bins that widen are spaced by their logarithm.
    logarithmic = bins[0].from_ > 0 and (bins[-1].to - bins[-1].from_) > 1.5 * (bins[0].to - bins[0].from_)
    edges = [(format_length(b.from_, unit), format_length(b.to, unit)) for b in shown]
    values = [
        (
            math.sqrt(b.from_ * b.to) if logarithmic else (b.from_ + b.to) / 2,
            b.count,
            hover(f"{low} to {high}", counted(b.count, "example")),
        )
        for b, (low, high) in zip(shown, edges, strict=True)
    ]
    # plotly.js takes widths in the axis' own measure, also on a logarithmic one.
    widths = [float(f"{0.94 * (b.to - b.from_):.6g}") for b in shown]
    data = [bars("examples", values, "--hue-1", width=widths, marker={"opacity": 0.65})]
    if row is not None:
        lines = _boundaries(row, unit, logarithmic)
        data.append(points("bucket boundaries", lines, "--accent", mode="lines", yaxis="y2", line={"width": 1}))
    layout = {
        "xaxis": axis("length", unit, type="log" if logarithmic else "linear"),
        "yaxis": axis("examples", rangemode="tozero"),
        # Boundaries keep their height when the reader zooms into the bars.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "barmode": "overlay",
    }
    half = most = ""
    if len(sweep.quantiles) == 1001:
        half = f": half of them up to {format_length(sweep.quantiles[500], unit)}"
        most = f", 99% up to {format_length(sweep.quantiles[990], unit)}"
    ends = "" if row is None else " The lines are the boundaries of the recommended buckets."
    longest = f", the longest {format_length(sweep.lengths.max, unit)}."
    counts = [(*ends, f"{b.count:,}") for b, ends in zip(shown, edges, strict=True)]
    return Figure(
        name="histogram",
        title="Lengths" if row is None else "Lengths, and where the buckets end",
        caption=f"{counted(sweep.lengths.count, 'example')}{half}{most}{longest}{ends}",
        views=(View("examples", data, layout),),
        table=make_table("Lengths", (Column("over"), Column("up to"), Column("examples")), counts),
    )


def _boundaries(row: Row, unit: str | None, logarithmic: bool) -> Iterator[Point]:
    """Yield one vertical line a boundary; its points are close together, so that the pointer meets them."""
    table = zip(range(1, len(row.boundaries) + 1), row.boundaries, row.batch_sizes, strict=True)
    drawn = [bucket for bucket in table if drawable(bucket[1], logarithmic=logarithmic)]
    for number, boundary, size in thinned(drawn):
        text = hover(f"bucket {number}: up to {format_length(boundary, unit)}", f"batch size {format_number(size)}")
        yield from ((boundary, step / 12, text) for step in range(13))
        yield None, None, ""


def padding_figure(sweep: Sweep) -> Figure | None:
    """Draw what each bucket of the recommended table holds and pads; None where it is not known."""
    buckets = [b for b in sweep.buckets if drawable(b.length) and drawable(b.padded_length)]
    if not buckets:
        return None
    unit, shown = sweep.lengths.unit, thinned(buckets)
    size, size_name = length_unit(max(b.padded_length for b in shown), unit)
    texts = [_bucket_text(bucket, unit) for bucket in shown]
    names = [label(f"≤ {format_number(bucket.boundary)}") for bucket in shown]
    true = zip(names, [b.length / size for b in shown], texts, strict=True)
    padding = zip(names, [_padding(b) / size for b in shown], texts, strict=True)
    share = zip(names, [100 * _padding_share(b) for b in shown], texts, strict=True)
    layout = {"xaxis": axis("bucket: lengths up to", unit, type="category"), "bargap": 0.25}
    lengths = layout | {"yaxis": axis("length of one epoch", size_name, rangemode="tozero"), "barmode": "stack"}
    shares = layout | {"yaxis": axis("padding, % of the bucket's cells", rangemode="tozero"), "showlegend": False}
    most = max(buckets, key=_padding)
    padded = sum(bucket.padded_length for bucket in buckets)
    of_all = format_percent(sum(map(_padding, buckets)) / padded) if padded > 0 else UNKNOWN
    columns = ("up to", "batch size", "examples", "batches", "true length", "padding", "share")
    rows = [
        (
            format_length(b.boundary, unit),
            format_number(b.batch_size),
            f"{b.examples:,}",
            f"{b.batches:,}",
            format_length(b.length, unit),
            format_length(_padding(b), unit),
            format_percent(_padding_share(b)),
        )
        for b in shown
    ]
    return Figure(
        name="padding",
        title="Padding, bucket by bucket",
        caption=f"{of_all} of all cells of an epoch are padding; most of it in the bucket that ends at "
        f"{format_length(most.boundary, unit)}.",
        views=(
            View("length", [bars("true length", true, "--hue-4"), bars("padding", padding, "--hue-0")], lengths),
            View("share", [bars("padding", share, "--hue-0")], shares),
        ),
        table=make_table("Padding, bucket by bucket", [Column(name) for name in columns], rows),
    )


def _padding(bucket: BucketUse) -> float:
    return max(0.0, bucket.padded_length - bucket.length)


def _padding_share(bucket: BucketUse) -> float:
    return _padding(bucket) / bucket.padded_length if bucket.padded_length > 0 else 0.0


def _bucket_text(bucket: BucketUse, unit: str | None) -> str:
    batches = "1 batch" if bucket.batches == 1 else f"{bucket.batches:,} batches"
    return hover(
        f"up to {format_length(bucket.boundary, unit)}",
        f"{counted(bucket.examples, 'example')} in {batches} of {format_number(bucket.batch_size)}",
        f"true length {format_length(bucket.length, unit)}",
        f"padding {format_length(_padding(bucket), unit)} ({format_percent(_padding_share(bucket))})",
    )
