"""The survey of a data set: how its lengths are spread, and what in them hurts batching."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.lengths import Histogram, Lengths
from batchtune.reports.section import Section, Table, format_share, make_table
from batchtune.results import Percentiles, Scan, meta_of
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
)

_BINS = 20
_BAR = 30  # characters of the longest bar of the histogram
_PER_SECOND = {"s": 1, "ms": 1000, "samples": 16_000}
_COUNTS = ("samples", "frames", "tokens", "words", "characters", "bytes")
# Medians beyond these are no ordinary data: a sequence shorter than 0.05 s holds no syllable and no two windows of
# speech features; one of over 3 h is longer than long podcasts, meetings and lectures.
_SHORTEST_SECONDS = 0.05
_LONGEST_SECONDS = 3 * 3600.0
# Warn of the longest examples if they are this many times as long as nearly all others.
_OUTLYING = 1.5


def survey(lengths: Lengths, sources: Sequence[str] = ()) -> Scan:
    """Look at the lengths of a data set: their spread, a histogram, and what looks wrong or wasteful.

    Percentiles are by nearest rank: the smallest length that at least that share of the examples does not exceed. Each
    warning says what is wrong, then the remedy. `sources` tell the record's reader where the lengths come from.
    """
    spread = _percentiles(lengths.histogram)
    targets = None
    if lengths.runs.targets is not None:
        targets = _percentiles(Histogram.of(lengths.runs.targets, lengths.runs.counts))
    return Scan(
        meta=meta_of(Scan),
        sources=list(sources),
        lengths=lengths.summary(),
        distinct=lengths.histogram.lengths.size,
        percentiles=spread,
        targets=targets,
        histogram=lengths.bins(_BINS)[::-1],
        left_out=dict(lengths.left_out),
        notes=list(lengths.notes),
        warnings=[*_wrong_unit(lengths, spread.median), *_outliers(lengths, spread)],
    )


def _percentiles(histogram: Histogram) -> Percentiles:
    def nearest_rank(thousandths: int) -> float:
        rank = max(1, -(-histogram.count * thousandths // 1000))
        return float(histogram.at(rank - 1))

    return Percentiles(
        min=nearest_rank(0),
        median=nearest_rank(500),
        p95=nearest_rank(950),
        p99=nearest_rank(990),
        p999=nearest_rank(999),
        max=nearest_rank(1000),
    )


def _wrong_unit(lengths: Lengths, median: float) -> Iterator[str]:
    """Warn of lengths that can't be what their unit says."""
    unit = lengths.unit or ""
    remedy = "Is the unit right? --unit names it, and --length-scale converts (1/16000 for samples at 16 kHz to s)."
    if (
        unit in _PER_SECOND
        and not _SHORTEST_SECONDS <= median / _PER_SECOND[unit] <= _LONGEST_SECONDS
    ):
        seconds = format_seconds(median / _PER_SECOND[unit])
        yield f"A median of {format_length(median, unit)} is {seconds} for one example. {remedy}"
    values = lengths.runs.values
    fractions = values[np.abs(values - np.rint(values)) > 0.01]
    if unit in _COUNTS and fractions.size:
        yield (
            f"{unit.capitalize()} come in whole numbers, but some lengths are not whole, such as "
            f"{format_number(float(fractions[0]))}. {remedy}"
        )


def _outliers(lengths: Lengths, spread: Percentiles) -> Iterator[str]:
    """Warn of a few examples much longer than all others: one in a thousand, or in a hundred in small data sets."""
    rare = spread.p999 if lengths.count >= 1000 else spread.p99
    if rare * _OUTLYING >= spread.max:
        return
    digits = 2 - math.floor(math.log10(rare))
    limit = math.ceil(rare * 10.0**digits) / 10.0**digits
    longer = lengths.count_beyond(limit)
    so_far = lengths.histogram.total_of(
        np.array([lengths.count - longer, lengths.count])
    )
    share = 1 - float(so_far[0] / so_far[1])
    yield (
        f"{counted(longer, 'example')} longer than {format_length(limit, lengths.unit)}, up to "
        f"{format_length(spread.max, lengths.unit)}, alone decide how large a fixed batch can be. --max-length "
        f"{limit:.15g} leaves them out, {format_share(share)} of the total length."
    )


def survey_sentences(scan: Scan) -> Iterator[str]:
    """Say how many, how long and how much, how they are spread, and what was left out."""
    summary = scan.lengths
    total = format_length(summary.total, summary.unit)
    if summary.unit in ("s", "ms"):
        total = format_seconds(summary.total / _PER_SECOND[summary.unit])
    yield (
        f"{counted(summary.count, 'length')} in descending order: {format_length(summary.max, summary.unit)} to "
        f"{format_length(summary.min, summary.unit)}, {total} in all."
    )
    yield f"Percentiles: {_percentile_words(scan.percentiles)}; {counted(scan.distinct, 'distinct length')}."
    if scan.targets is not None:
        targets = (
            f"{format_number(scan.targets.max)} to {format_number(scan.targets.min)}"
        )
        yield f"Targets: {targets}; {_percentile_words(scan.targets)}."
    for reason, count in scan.left_out.items():
        yield f"Left out: {counted(count, 'example')}, {reason}."
    if summary.truncated:
        longest = format_length(summary.max, summary.unit)
        yield f"Truncated: {counted(summary.truncated, 'example')} count as {longest} long."
    yield from scan.notes


def _percentile_words(spread: Percentiles) -> str:
    values = {
        "median": spread.median,
        "p95": spread.p95,
        "p99": spread.p99,
        "p99.9": spread.p999,
    }
    return ", ".join(f"{name} {format_number(value)}" for name, value in values.items())


def survey_section(scan: Scan) -> Section:
    """Return the whole survey, with a histogram."""
    sentences = list(survey_sentences(scan))
    return Section(
        title="Lengths",
        sentences=sentences,
        brief=len(sentences),
        tables=[_histogram(scan)],
        warnings=scan.warnings,
    )


def _histogram(scan: Scan) -> Table:
    unit = scan.lengths.unit
    largest = max(bin_.count for bin_ in scan.histogram)
    rows = [
        {
            "from": format_length(bin_.from_, unit),
            "to": format_length(bin_.to, unit),
            "examples": f"{bin_.count:,}",
            "share": format_percent(bin_.count / scan.lengths.count),
            "": "█" * math.ceil(_BAR * bin_.count / largest),
        }
        for bin_ in scan.histogram
    ]
    return make_table("Lengths", rows, left=[""])
