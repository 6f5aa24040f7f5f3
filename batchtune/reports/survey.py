"""The spread of a data set's lengths, and what looks wrong with them.

There may be hundreds of millions: they are read in place, a chunk at a time, and never copied whole.
"""

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

_CHUNK = 1 << 18
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

    Needs less than 30 MB besides the lengths, however many they are. Percentiles are by nearest rank (NumPy's
    `inverted_cdf`): the smallest length that at least that share of the examples does not exceed. Each warning says
    what is wrong, then the remedy. `sources` tell the record's reader where the lengths come from.
    """
    values, size = lengths.values, lengths.count
    # Nearest ranks of the percentiles 0, 50, 95, 99, 99.9 and 100; 1 is the smallest.
    ranks = [max(1, -(-size * thousandths // 1000)) for thousandths in (0, 500, 950, 990, 999, 1000)]
    spread = _percentiles([float(values[size - rank]) for rank in ranks])
    distinct = 1 + sum(int(np.count_nonzero(part[1:] != part[:-1])) for part in _chunks(values, overlap=1))
    fractional = sum(int(np.count_nonzero(_fractional(part))) for part in _chunks(values))
    whole = not fractional and spread.max >= 0.5  # near 0, nothing is a whole number of anything
    edges = _edges(spread, whole=whole)
    longer = [_longer(values, edge) for edge in edges]
    bins = zip(pairwise(edges), pairwise(longer), strict=True)
    return Scan(
        meta=meta_of(Scan),
        sources=list(sources),
        lengths=lengths.summary(),
        distinct=distinct,
        percentiles=spread,
        targets=None if lengths.targets is None else _percentiles(_at_ranks(lengths.targets, ranks)),
        histogram=[HistogramBin(from_=low, to=high, count=above - beyond) for (low, high), (above, beyond) in bins][
            ::-1
        ],
        left_out=dict(lengths.left_out),
        notes=list(lengths.notes),
        warnings=list(_cautions(lengths, spread, distinct, fractional)),
    )


def _percentiles(at_ranks: Sequence[float]) -> Percentiles:
    low, median, p95, p99, p999, high = at_ranks
    return Percentiles(min=low, median=median, p95=p95, p99=p99, p999=p999, max=high)


def _chunks(values: FloatArray, *, overlap: int = 0) -> Iterator[FloatArray]:
    for start in range(0, values.size, _CHUNK):
        yield values[start : start + _CHUNK + overlap]


def _at_ranks(values: FloatArray, ranks: Sequence[int]) -> list[float]:
    """Return the values of these ranks, from 1, among numbers in any order, without a sorted copy of them.

    Numbers that are not negative are ordered as the integers that their bits make, which are found 16 bits at a
    time: how many examples share the bits found so far and have each of the next ones.
    """
    found, left = [0] * len(ranks), list(ranks)
    for shift in (48, 32, 16, 0):
        tallies = {bits: np.zeros(1 << 16, dtype=np.int64) for bits in found}
        for part in _chunks(values):
            shifted = np.abs(part).view(np.int64) >> shift  # the bits of -0.0 would come last
            for bits, tally in tallies.items():
                tally += np.bincount(shifted[shifted >> 16 == bits] & 0xFFFF, minlength=1 << 16)
        for index, bits in enumerate(found):
            up_to = np.cumsum(tallies[bits])
            following = int(np.searchsorted(up_to, left[index]))
            left[index] -= int(up_to[following - 1]) if following else 0
            found[index] = bits << 16 | following
    return [float(value) for value in np.array(found, dtype=np.int64).view(np.float64)]


def _fractional(values: FloatArray) -> npt.NDArray[np.bool_]:
    return np.abs(values - np.rint(values)) > _WHOLE


def _longer(values: FloatArray, length: float) -> int:
    """Return how many of the descending values are longer; where the others begin."""
    return values.size - int(np.searchsorted(values[::-1], length, side="right"))


def _edges(spread: Percentiles, *, whole: bool) -> list[float]:
    """Return the closest round edges, ascending, that part all lengths into at most 20 bins."""
    long_tail = spread.max > 100 * spread.min and spread.max > 10 * spread.median
    for ladder in _log_ladders(spread) if long_tail else _even_ladders(spread, whole=whole):
        if whole:
            ladder = [0.0, *(edge for edge in ladder if edge >= 1 and edge.is_integer())]
        first, last = bisect_left(ladder, spread.min) - 1, bisect_left(ladder, spread.max)
        if last - first <= MOST_BINS:
            return ladder[first : last + 1]
    raise AssertionError  # the ladders do not end


def _even_ladders(spread: Percentiles, *, whole: bool) -> Iterator[list[float]]:
    """Yield edges at multiples of 1, 2 or 5 times a power of ten, ever fewer."""
    # Much closer edges would look alike in 4 digits.
    least = max((spread.max - spread.min) / MOST_BINS, spread.max / 500, 1 if whole else 0)
    for exponent in count(math.floor(math.log10(least))):
        for digit in (1, 2, 5):
            width = _decimal(digit, exponent)
            if width >= least:
                # With one more on either side: a quotient may be rounded to the wrong side of a whole number.
                numbers = range(max(0, math.floor(spread.min / width) - 1), math.floor(spread.max / width) + 3)
                yield [_decimal(number * digit, exponent) for number in numbers]


def _log_ladders(spread: Percentiles) -> Iterator[list[float]]:
    """Yield edges at the same few digits of each power of ten, then of every second one, ever fewer."""
    lowest, highest = (math.floor(math.log10(length)) for length in (spread.min, spread.max))
    for digits, stride in (((10, 15, 20, 30, 50, 70), 1), ((10, 20, 50), 1), *(((10,), n) for n in range(1, 400))):
        exponents = range(lowest - stride, highest + stride + 1, stride)
        yield [_decimal(digit, exponent - 1) for exponent in exponents for digit in digits]


def _decimal(digits: int, exponent: int) -> float:
    return float(f"{digits}e{exponent}")


def _cautions(lengths: Lengths, spread: Percentiles, distinct: int, fractional: int) -> Iterator[str]:
    yield from _wrong_unit(lengths, spread.median, fractional)
    if zeros := lengths.left_out.get(_ZERO, 0):
        was, them = ("was", "it") if zeros == 1 else ("were", "them")
        yield (
            f"{counted(zeros, 'example')} of length zero {was} left out. Look for what is empty or damaged, and leave "
            f"{them} out of the training data too."
        )
    if distinct > 1:
        if not lengths.truncated:
            yield from _cut_off(lengths)
        yield from _outliers(lengths, spread)
    elif lengths.count > 1:
        yield (
            f"All {lengths.count:,} examples have the same length, {format_length(lengths.longest, lengths.unit)}: "
            "batches need no padding, and dynamic batching gains nothing. Use a fixed batch size; "
            "`batchtune probe-oom` finds the largest that fits."
        )


def _wrong_unit(lengths: Lengths, median: float, fractional: int) -> Iterator[str]:
    unit = lengths.unit
    said = f"A median of {format_length(median, unit)}"
    most = _LONGEST_SECONDS if fractional else _LONGEST_WHOLE_SECONDS
    if unit == "ms" and median > 1000 * most:
        yield (
            f"{said} is {format_seconds(median / 1000)} for one example: these look scaled once too often. If the "
            "lengths are milliseconds as they stand, give --length-scale 1 --unit ms."
        )
    elif unit == "s" and median > most:
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
        yield (f"{said} is too short for speech: these look like seconds. If they are, give --length-scale 1 --unit s.")
    elif unit == "samples" and median < _FEWEST_SAMPLES:
        yield (
            f"{said} is {format_seconds(median / 16000)} at 16 kHz: these look like seconds. If they are, give "
            "--length-scale 1 --unit s."
        )
    elif unit in _COUNTS and fractional:
        first = next(float(part[_fractional(part)][0]) for part in _chunks(lengths.values) if _fractional(part).any())
        are = "is not" if fractional == 1 else "are not"
        yield (
            f"{unit.capitalize()} come in whole numbers, but {_examples(lengths, fractional, 'length')} {are}, such "
            f"as {format_number(first)}. If they are seconds, give --length-scale 1 --unit s; if --length-scale made "
            "fractions of them, take all that follows as an estimate."
        )


def _cut_off(lengths: Lengths) -> Iterator[str]:
    """Truncation leaves many examples of exactly one length, the longest, where the next shorter ones have few."""
    values, neighbours = lengths.values, 0
    at_longest = end = _first_shorter(values, lengths.longest)
    if at_longest <= max(10, _CUT_SHARE * lengths.count):
        return
    while end < values.size and neighbours < _CUT_NEIGHBOURS:
        end = _first_shorter(values, float(values[end]))
        neighbours += 1
    if at_longest * neighbours >= _CUT_RATIO * (end - at_longest):
        below = _round_up(float(values[at_longest]), below=lengths.longest)
        yield (
            f"{_examples(lengths, at_longest)} have exactly the longest length, "
            f"{format_length(lengths.longest, lengths.unit)}: they look cut off there. If that is not meant, look for "
            f"what cut them; --max-length {below} leaves them out."
        )


def _first_shorter(values: FloatArray, length: float) -> int:
    return values.size - int(np.searchsorted(values[::-1], length, side="left"))


def _outliers(lengths: Lengths, spread: Percentiles) -> Iterator[str]:
    """Find a few examples much longer than all others: one in a thousand, or in a hundred in small data sets."""
    rare, unit = spread.p999 if lengths.count >= 1000 else spread.p99, lengths.unit
    if rare * _OUTLYING >= spread.max:
        return
    limit = _round_up(rare, below=spread.max)
    longer = _longer(lengths.values, float(limit))
    ratio = spread.max / float(lengths.values[longer])
    lost = _share(float(lengths.values[:longer].sum()), lengths.total)
    yield (
        f"{_examples(lengths, longer)} {'is' if longer == 1 else 'are'} longer than "
        f"{format_length(float(limit), unit)}, up to {format_length(spread.max, unit)}: they alone decide how large a "
        f"fixed batch can be. --max-length {limit} leaves them out, {lost} of the total length; a fixed batch size can "
        f"then be {ratio:,.{2 if ratio < 10 else 0}f} times as large for the same padded length."
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
