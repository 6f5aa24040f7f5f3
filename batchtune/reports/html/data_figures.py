"""What the data look like, and what the recommended buckets make of them."""

from __future__ import annotations

import math

from batchtune.reports.html.figure import (
    Figure,
    Point,
    Trace,
    View,
    axis,
    drawable,
    hover,
    label,
    length_unit,
    points,
    short,
    thinned,
)
from batchtune.reports.table import UNKNOWN, Column, Table
from batchtune.results import BucketUse, HistogramBin, Row, Sweep
from batchtune.units import counted, format_length, format_number, format_percent


def histogram_figure(sweep: Sweep) -> Figure | None:
    """Draw how many examples have which length, with the recommended boundaries; None without a histogram."""
    bins = [b for b in sweep.histogram if drawable(b.from_) and drawable(b.to) and drawable(b.count) and b.to > b.from_]
    if not bins:
        return None
    unit = sweep.lengths.unit
    logarithmic = _widen(bins) and bins[0].from_ > 0
    data = [_bars(bins, unit, logarithmic)]
    row = sweep.recommended_row
    if row is not None:
        data.append(_boundaries(row, unit, logarithmic))
    layout = {
        "xaxis": axis("length", unit, type="log" if logarithmic else "linear"),
        "yaxis": axis("examples", rangemode="tozero"),
        # Boundaries keep their height when the reader zooms into the bars.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "barmode": "overlay",
    }
    return Figure(
        name="histogram",
        title="Lengths, and where the buckets end" if row is not None else "Lengths",
        caption=_describe_lengths(sweep),
        views=(View(label="examples", data=data, layout=layout),),
        table=_histogram_table(bins, unit),
    )


def padding_figure(sweep: Sweep) -> Figure | None:
    """Draw what each bucket of the recommended table holds and pads; None where it is not known."""
    buckets = [b for b in sweep.buckets if drawable(b.length) and drawable(b.padded_length)]
    if not buckets:
        return None
    unit = sweep.lengths.unit
    shown = thinned(buckets)
    size, size_name = length_unit(max(b.padded_length for b in shown), unit)
    texts = [_bucket_text(bucket, unit) for bucket in shown]
    names = [label(f"≤ {format_number(bucket.boundary)}") for bucket in shown]
    x_axis = axis("bucket: lengths up to", unit, type="category")
    true = _stack("true length", names, [b.length / size for b in shown], texts, "--hue-4")
    padding = _stack("padding", names, [_padding(b) / size for b in shown], texts, "--hue-0")
    share = _stack("padding", names, [100 * _padding_share(b) for b in shown], texts, "--hue-0")
    layout = {"xaxis": x_axis, "bargap": 0.25}
    lengths = layout | {
        "yaxis": axis("length of one epoch", size_name, rangemode="tozero"),
        "barmode": "stack",
    }
    shares = layout | {"yaxis": axis("padding, % of the bucket's cells", rangemode="tozero"), "showlegend": False}
    return Figure(
        name="padding",
        title="Padding, bucket by bucket",
        caption=_describe_padding(buckets, unit),
        views=(
            View(label="length", data=[true, padding], layout=lengths),
            View(label="share", data=[share], layout=shares),
        ),
        table=_padding_table(shown, unit),
    )


def _widen(bins: list[HistogramBin]) -> bool:
    """Return whether bins are spaced by their logarithm."""
    return (bins[-1].to - bins[-1].from_) > 1.5 * (bins[0].to - bins[0].from_)


def _bars(bins: list[HistogramBin], unit: str | None, logarithmic: bool) -> Trace:
    shown = thinned(bins)
    middle = [math.sqrt(b.from_ * b.to) if logarithmic else (b.from_ + b.to) / 2 for b in shown]
    return {
        "type": "bar",
        "name": "examples",
        "x": [short(value) for value in middle],
        "y": [b.count for b in shown],
        # plotly.js takes widths in the axis' own measure, also on a logarithmic one.
        "width": [short(0.94 * (b.to - b.from_)) for b in shown],
        "hovertext": [
            hover(f"{format_length(b.from_, unit)} to {format_length(b.to, unit)}", counted(b.count, "example"))
            for b in shown
        ],
        "marker": {"color": "--hue-1", "opacity": 0.65},
    }


def _boundaries(row: Row, unit: str | None, logarithmic: bool) -> Trace:
    """Draw one vertical line a boundary; its points are close together, so that the pointer meets them."""
    values: list[Point] = []
    table = [
        (number, boundary, size)
        for number, (boundary, size) in enumerate(zip(row.boundaries, row.batch_sizes, strict=True), start=1)
        if drawable(boundary, logarithmic=logarithmic)
    ]
    for number, boundary, size in thinned(table):
        text = hover(f"bucket {number}: up to {format_length(boundary, unit)}", f"batch size {format_number(size)}")
        values += [(boundary, step / 12, text) for step in range(13)]
        values.append((None, None, ""))
    return points("bucket boundaries", values, color="--accent", mode="lines", yaxis="y2", line={"width": 1})


def _describe_lengths(sweep: Sweep) -> str:
    unit = sweep.lengths.unit
    sentence = f"{counted(sweep.lengths.count, 'example')}"
    quantiles = sweep.quantiles
    if len(quantiles) == 1001:
        half, most = format_length(quantiles[500], unit), format_length(quantiles[990], unit)
        sentence += f": half of them up to {half}, 99% up to {most}"
    sentence += f", the longest {format_length(sweep.lengths.max, unit)}."
    if sweep.recommended_row is not None:
        sentence += " The lines are the boundaries of the recommended buckets."
    return sentence


def _histogram_table(bins: list[HistogramBin], unit: str | None) -> Table:
    rows = tuple((format_length(b.from_, unit), format_length(b.to, unit), f"{b.count:,}") for b in thinned(bins))
    return Table(title="Lengths", columns=(Column("over"), Column("up to"), Column("examples")), rows=rows)


def _stack(name: str, names: list[str], values: list[float], texts: list[str], color: str) -> Trace:
    return {
        "type": "bar",
        "name": name,
        "x": names,
        "y": [short(value) for value in values],
        "hovertext": texts,
        "marker": {"color": color},
    }


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


def _describe_padding(buckets: list[BucketUse], unit: str | None) -> str:
    padded = sum(bucket.padded_length for bucket in buckets)
    padding = sum(_padding(bucket) for bucket in buckets)
    most = max(buckets, key=_padding)
    share = format_percent(padding / padded) if padded > 0 else UNKNOWN
    return (
        f"{share} of all cells of an epoch are padding; most of it in the bucket that ends at "
        f"{format_length(most.boundary, unit)}."
    )


def _padding_table(buckets: list[BucketUse], unit: str | None) -> Table:
    columns = ("up to", "batch size", "examples", "batches", "true length", "padding", "share")
    rows = tuple(
        (
            format_length(b.boundary, unit),
            format_number(b.batch_size),
            f"{b.examples:,}",
            f"{b.batches:,}",
            format_length(b.length, unit),
            format_length(_padding(b), unit),
            format_percent(_padding_share(b)),
        )
        for b in buckets
    )
    return Table(title="Padding, bucket by bucket", columns=tuple(Column(name) for name in columns), rows=rows)
