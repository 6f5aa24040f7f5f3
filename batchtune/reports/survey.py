"""The spread of a data set's lengths, and what looks wrong with them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, Lengths, Unit
from batchtune.results import HistogramBin, Percentiles, Scan, meta_of
from batchtune.units import counted, format_length, format_number, format_seconds

MOST_BINS = 20

_ZERO = "invalid length (zero)"

# A distance from the next whole number that rounding to 6 decimals and scaling to samples can leave.
_WHOLE = 0.01
_COUNTS: tuple[Unit, ...] = ("samples", "frames", "tokens", "words", "characters", "bytes")

# Medians beyond these are no ordinary data. A sequence shorter than 0.05 s holds no syllable and no two windows of
# speech features; one of over 3 h is longer than long podcasts, meetings and lectures. In between the number alone
# can't tell seconds from milliseconds: 3,744 may be an hour of talk or a sentence.
_SHORTEST_SECONDS = 0.05
_LONGEST_SECONDS = 3 * 3600.0
# Milliseconds and samples are whole numbers, seconds of long recordings hardly ever all are.
_LONGEST_WHOLE_SECONDS = 1800.0
_FEWEST_SAMPLES = 100

# Warn of the longest examples if they are this many times as long as nearly all others.
_OUTLYING = 1.5
# Examples of exactly the longest length look cut off where they are more than 10, more than this share of all, and
# this many times as frequent as the next shorter lengths.
_CUT_SHARE = 0.005
_CUT_RATIO = 5
_CUT_NEIGHBOURS = 10


def survey(lengths: Lengths, sources: Sequence[str] = ()) -> Scan:
    """Look at the lengths of a data set: their spread, a histogram, and what looks wrong or wasteful.

    Percentiles are by nearest rank (NumPy's `inverted_cdf`): the smallest length that at least that share of the
    examples does not exceed. Each warning says what is wrong, then the remedy. `sources` tell the record's reader where
    the lengths come from.
    """
    ascending = lengths.values[::-1]
    spread = _percentiles(ascending)
    targets = None
    if lengths.targets is not None:
        targets = _percentiles(np.sort(np.abs(lengths.targets)))  # -0.0 is 0
    fractions = lengths.values[_is_fraction(lengths.values)]
    return Scan(
        meta=meta_of(Scan),
        sources=list(sources),
        lengths=lengths.summary(),
        distinct=lengths.histogram.lengths.size,
        percentiles=spread,
        targets=targets,
        histogram=_bins(ascending, spread, whole=fractions.size == 0),
        left_out=dict(lengths.left_out),
        notes=list(lengths.notes),
        warnings=list(_cautions(lengths, spread, fractions)),
    )


def _percentiles(ascending: FloatArray) -> Percentiles:
    def nearest_rank(thousandths: int) -> float:
        rank = max(1, -(-ascending.size * thousandths // 1000))
        return float(ascending[rank - 1])

    return Percentiles(
        min=nearest_rank(0),
        median=nearest_rank(500),
        p95=nearest_rank(950),
        p99=nearest_rank(990),
        p999=nearest_rank(999),
        max=nearest_rank(1000),
    )


def _is_fraction(values: FloatArray) -> npt.NDArray[np.bool_]:
    return np.abs(values - np.rint(values)) > _WHOLE


def _bins(ascending: FloatArray, spread: Percentiles, *, whole: bool) -> list[HistogramBin]:
    """Return the bins of the histogram, the longest first; each ends with its upper edge."""
    edges = _edges(spread, whole=whole and spread.max >= 0.5)  # near 0, nothing is a whole number of anything
    up_to = np.searchsorted(ascending, edges, side="right")
    bins = []
    for (low, high), examples in zip(pairwise(edges), np.diff(up_to).tolist(), strict=True):
        bins.append(HistogramBin(from_=low, to=high, count=examples))
    return bins[::-1]


def _edges(spread: Percentiles, *, whole: bool) -> list[float]:
    """Return the closest round edges, ascending, that part all lengths into at most 20 bins."""
    has_long_tail = spread.max > 100 * spread.min and spread.max > 10 * spread.median
    for edges in _log_edges(spread) if has_long_tail else _even_edges(spread, whole=whole):
        if whole:
            edges = [0.0, *(edge for edge in edges if edge >= 1 and edge.is_integer())]
        first = bisect_left(edges, spread.min) - 1
        last = bisect_left(edges, spread.max)
        if last - first <= MOST_BINS:
            return edges[first : last + 1]
    raise AssertionError  # they do not end


def _even_edges(spread: Percentiles, *, whole: bool) -> Iterator[list[float]]:
    """Yield edges at multiples of 1, 2 or 5 times a power of ten, ever fewer."""
    # Much closer edges would look alike in 4 digits.
    narrowest = max((spread.max - spread.min) / MOST_BINS, spread.max / 500, 1 if whole else 0)
    for exponent in count(math.floor(math.log10(narrowest))):
        for digit in (1, 2, 5):
            width = _decimal(digit, exponent)
            if width < narrowest:
                continue
            # One more on either side: a quotient may be rounded to the wrong side of a whole number.
            first = max(0, math.floor(spread.min / width) - 1)
            last = math.floor(spread.max / width) + 2
            yield [_decimal(number * digit, exponent) for number in range(first, last + 1)]


def _log_edges(spread: Percentiles) -> Iterator[list[float]]:
    """Yield edges at the same few digits of each power of ten, then of every second one, ever fewer."""
    lowest = math.floor(math.log10(spread.min))
    highest = math.floor(math.log10(spread.max))
    for digits, stride in (((10, 15, 20, 30, 50, 70), 1), ((10, 20, 50), 1), *(((10,), n) for n in range(1, 400))):
        edges: list[float] = []
        for exponent in range(lowest - stride, highest + stride + 1, stride):
            edges += [_decimal(digit, exponent - 1) for digit in digits]
        yield edges


def _decimal(digits: int, exponent: int) -> float:
    return float(f"{digits}e{exponent}")


def _cautions(lengths: Lengths, spread: Percentiles, fractions: FloatArray) -> Iterator[str]:
    yield from _wrong_unit(lengths, spread.median, fractions)
    zeros = lengths.left_out.get(_ZERO, 0)
    if zeros == 1:
        yield (
            "1 example of length zero was left out. Look for what is empty or damaged, and leave it out of the "
            "training data too."
        )
    elif zeros:
        yield (
            f"{zeros:,} examples of length zero were left out. Look for what is empty or damaged, and leave them out "
            "of the training data too."
        )
    if lengths.longest > lengths.shortest:
        if not lengths.truncated:
            yield from _cut_off(lengths)
        yield from _outliers(lengths, spread)
    elif lengths.count > 1:
        yield (
            f"All {lengths.count:,} examples have the same length, {format_length(lengths.longest, lengths.unit)}: "
            "batches need no padding, and dynamic batching gains nothing. Use a fixed batch size; "
            "`batchtune probe-oom` finds the largest that fits."
        )


def _wrong_unit(lengths: Lengths, median: float, fractions: FloatArray) -> Iterator[str]:
    unit = lengths.unit
    said = f"A median of {format_length(median, unit)}"
    longest_plausible = _LONGEST_SECONDS if fractions.size else _LONGEST_WHOLE_SECONDS
    if unit == "ms" and median > 1000 * longest_plausible:
        yield (
            f"{said} is {format_seconds(median / 1000)} for one example: these look scaled once too often. If the "
            "lengths are milliseconds as they stand, give --length-scale 1 --unit ms."
        )
    elif unit == "s" and median > longest_plausible:
        yield (
            f"{said} is {format_seconds(median)} for one example: these look like samples or milliseconds. If they "
            f"are samples at 16 kHz (a median of {format_seconds(median / 16000)}), give --length-scale 1/16000 "
            f"--unit s; if milliseconds ({format_seconds(median / 1000)}), --length-scale 1/1000 --unit s."
        )
    elif unit == "s" and median < _SHORTEST_SECONDS:
        yield (
            f"{said} is too short for speech: these look scaled once too often, or like hours. Check --length-scale; "
            "for hours, give --length-scale 3600 --unit s."
        )
    elif unit == "ms" and median < 1000 * _SHORTEST_SECONDS:
        yield f"{said} is too short for speech: these look like seconds. If they are, give --length-scale 1 --unit s."
    elif unit == "samples" and median < _FEWEST_SAMPLES:
        yield (
            f"{said} is {format_seconds(median / 16000)} at 16 kHz: these look like seconds. If they are, give "
            "--length-scale 1 --unit s."
        )
    elif unit in _COUNTS and fractions.size:
        are = "is not" if fractions.size == 1 else "are not"
        fractional = _examples(lengths, fractions.size, "length")
        yield (
            f"{unit.capitalize()} come in whole numbers, but {fractional} {are}, such as "
            f"{format_number(float(fractions[0]))}. If they are seconds, give --length-scale 1 --unit s; if "
            "--length-scale made fractions of them, take all that follows as an estimate."
        )


def _cut_off(lengths: Lengths) -> Iterator[str]:
    """Truncation leaves many examples of exactly one length, the longest, where the next shorter ones have few."""
    histogram = lengths.histogram
    at_longest = int(histogram.counts[-1])
    if at_longest <= max(10, _CUT_SHARE * lengths.count):
        return
    next_shorter = histogram.counts[-1 - _CUT_NEIGHBOURS : -1]
    if at_longest >= _CUT_RATIO * next_shorter.mean():
        below = _round_up(float(histogram.lengths[-2]), below=lengths.longest)
        yield (
            f"{_examples(lengths, at_longest)} have exactly the longest length, "
            f"{format_length(lengths.longest, lengths.unit)}: they look cut off there. If that is not meant, look for "
            f"what cut them; --max-length {below} leaves them out."
        )


def _outliers(lengths: Lengths, spread: Percentiles) -> Iterator[str]:
    """Find a few examples much longer than all others: one in a thousand, or in a hundred in small data sets."""
    rare = spread.p999 if lengths.count >= 1000 else spread.p99
    if rare * _OUTLYING >= spread.max:
        return
    limit = _round_up(rare, below=spread.max)
    longer = lengths.values[lengths.values > float(limit)]
    ratio = spread.max / float(lengths.values[longer.size])
    lost = _share(float(longer.sum()), lengths.total)
    yield (
        f"{_examples(lengths, longer.size)} {'is' if longer.size == 1 else 'are'} longer than "
        f"{format_length(float(limit), lengths.unit)}, up to {format_length(spread.max, lengths.unit)}: they alone "
        f"decide how large a fixed batch can be. --max-length {limit} leaves them out, {lost} of the total length; a "
        f"fixed batch size can then be {ratio:,.{2 if ratio < 10 else 0}f} times as large for the same padded length."
    )


def _examples(lengths: Lengths, number: int, noun: str = "example") -> str:
    return f"{counted(number, noun)} ({_share(number, lengths.count)})"


def _share(part: float, whole: float) -> str:
    """Return a share as per cent, for running text: `45.6%`, `0.042%`; never 0 for a positive share."""
    percent = 100 * part / whole
    if percent >= 0.995:
        return f"{percent:.1f}%"
    return f"{percent:.2g}%" if percent == 0 or percent >= 0.01 else "less than 0.01%"


def _round_up(length: float, *, below: float) -> str:
    """Return the roundest number, of 2 digits or more, from `length` to less than `below`: as a user would write it."""
    whole = math.floor(math.log10(length))
    for digits in range(2, 17):
        exponent = whole + 1 - digits
        rounded = math.ceil(length / _decimal(1, exponent))
        for candidate in (rounded, rounded + 1):
            if length <= _decimal(candidate, exponent) < below:
                return repr(_decimal(candidate, exponent)).removesuffix(".0")
    return repr(length)
