"""A survey of lengths as plain text: in two or three lines, or whole, with a histogram."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import pairwise

from batchtune.lengths import Lengths
from batchtune.reports.survey import survey
from batchtune.results import Percentiles, Scan
from batchtune.units import counted, format_length, format_number, format_seconds

_WIDTH = 80
_INDENT = "  "
_EIGHTHS = "▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_SECONDS = {"s": 1.0, "ms": 0.001}
_HOUR = 3600.0

# An option and its value, to be kept on one line.
_OPTION = re.compile(r"(--[a-z-]+) (?=\S)")
_GLUE = "\0"


def headline(lengths: Lengths, *, ascii: bool = False) -> list[str]:
    """Show the data in a few lines, as every command does: the lengths, what was left out, notes and warnings.

    Args:
        lengths: What to show.
        ascii: Whether the histogram is left out, for streams that can't encode block characters.
    """
    found = survey(lengths)
    spread, unit, targets = found.percentiles, lengths.unit, found.targets
    lines = [_extent(found)]
    if found.distinct > 1:
        lines.append(
            f"Median {format_number(spread.median)}, p95 {format_number(spread.p95)}, "
            f"p99 {format_length(spread.p99, unit)}; {found.distinct:,} different lengths."
        )
    if targets is not None and lengths.targets is not None:
        lines.append(
            f"Targets: {format_number(targets.max)} to {format_number(targets.min)}, "
            f"{_large(float(lengths.targets.sum()))} in all; median {format_number(targets.median)}, "
            f"p95 {format_number(targets.p95)}, p99 {format_number(targets.p99)}."
        )
    if found.distinct > 1 and not ascii:
        lines.append(_spark(found))
    lines += [f"Left out: {text}" for text in _left_out(found)]
    return [*lines, *found.notes, *(f"Warning: {text}" for text in found.warnings)]


def render_survey(lengths: Lengths, width: int = _WIDTH, *, ascii: bool = False) -> str:
    """Show the whole survey: lengths, percentiles, histogram, what was left out, and what looks wrong.

    Args:
        lengths: What to show.
        width: Of a line, at least 60; running text is broken into lines, an option from its value never.
        ascii: Whether to write nothing but ASCII, for streams that can't encode block characters.
    """
    found = survey(lengths)
    extent = _wrapped(_extent(found), width)
    blocks = [
        [*extent, f"They take {found.distinct:,} different values."] if found.distinct > 1 else extent,
        _percentiles(found, lengths, width),
        _histogram(found, width, ascii=ascii),
        _listed("Left out", _left_out(found), width),
        _listed("Notes", found.notes, width),
        # A warning's first sentence says what is wrong, the others what to do.
        _listed("Warnings", (text.replace(". ", ".\n", 1) for text in found.warnings), width),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return text.replace("µ", "u").encode("ascii", "replace").decode() if ascii else text


def _spark(found: Scan) -> str:
    """Draw the histogram in one line: a bar for each bin, the longest first; a bin without examples is blank."""
    unit, most = found.lengths.unit, max(one.count for one in found.histogram)
    heights = [math.ceil(one.count / most * len(_HEIGHTS)) for one in found.histogram]
    bars = "".join(_HEIGHTS[height - 1] if height else " " for height in heights)
    high, low = found.histogram[0].to, found.histogram[-1].from_
    scale = "" if _is_even(found) else " on a logarithmic scale"
    return f"From {format_length(high, unit)} to {format_length(low, unit)}{scale}: ▕{bars}▏"


def _is_even(found: Scan) -> bool:
    """Return whether the bins have the same width, but for rounding errors."""
    first, last = found.histogram[0], found.histogram[-1]
    return first.to - first.from_ < 1.5 * (last.to - last.from_)


def _extent(found: Scan) -> str:
    summary = found.lengths
    lengths, longest = counted(summary.count, "length"), format_length(summary.max, summary.unit)
    if found.distinct == 1 == summary.count:
        return f"1 length: {longest}."
    total = _total(summary.total, summary.unit)
    if found.distinct == 1:
        return f"{lengths}, all of {longest}: {total} in all."
    if summary.unit not in _SECONDS:
        longest = format_number(summary.max)
    shortest = format_length(summary.min, summary.unit)
    return f"{lengths} in descending order: {longest} to {shortest}, {total} in all."


def _total(total: float, unit: str | None) -> str:
    """Return a total length as people say it: time in hours, all else in thousands, millions or billions."""
    if unit in _SECONDS:
        seconds = total * _SECONDS[unit]
        return f"{format_number(seconds / _HOUR)} h" if seconds >= _HOUR else format_seconds(seconds)
    return _large(total)


def _large(number: float) -> str:
    if number < 999_950:
        return format_number(number)
    if number < 999_950_000:
        return f"{format_number(number / 1e6)} million"
    return f"{format_number(number / 1e9)} billion"


def _left_out(found: Scan) -> Iterator[str]:
    for reason, count in found.left_out.items():
        yield f"{counted(count, 'example')}, {reason}."


def _percentiles(found: Scan, lengths: Lengths, width: int) -> list[str]:
    rows = [
        ["", "longest", "p99.9", "p99", "p95", "median", "mean", "shortest"],
        ["length", *_figures(found.percentiles, lengths.total / lengths.count)],
    ]
    if found.targets is not None and lengths.targets is not None:
        rows.append(["target", *_figures(found.targets, float(lengths.targets.sum()) / lengths.count)])
    lines = _aligned(rows)
    # Very long numbers find room one below the other.
    return lines if max(map(len, lines)) <= width else _aligned([*zip(*rows, strict=True)])


def _figures(spread: Percentiles, mean: float) -> list[str]:
    """Return a row's figures, with the decimals that give the median 4 digits; none where lengths are whole numbers."""
    lengths = [spread.max, spread.p999, spread.p99, spread.p95, spread.median, spread.min]
    decimals = of_mean = max(0, 4 - len(f"{spread.median:.0f}"))
    if all(length.is_integer() for length in lengths):
        decimals, of_mean = 0, 0 if mean.is_integer() else min(of_mean, 1)
    *longer, shortest = (_with_decimals(length, decimals) for length in lengths)
    return [*longer, _with_decimals(mean, of_mean), shortest]


def _with_decimals(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return format_number(value) if value and not float(text.replace(",", "")) else text


def _histogram(found: Scan, width: int, *, ascii: bool) -> list[str]:
    """Return one line a bin: its edges, the examples in it, their share of all, and a bar as long as the share."""
    bins, unit = found.histogram, found.lengths.unit
    edges = _edges([*(one.to for one in bins), bins[-1].from_], even=_is_even(found))
    ranges = [f"{upper} to {lower}" for upper, lower in pairwise(edges)]
    counts = [f"{one.count:,}" for one in bins]
    shares = [_share(one.count, found.lengths.count) for one in bins]
    title = (f"length ({unit})" if unit else "length", "examples", "share")
    lines = _aligned([title, *zip(ranges, counts, shares, strict=True)])
    room = max(1, width - max(map(len, lines)) - len(_INDENT))
    most = max(one.count for one in bins)
    draw = _ascii_bar if ascii else _bar
    bars = [draw(one.count / most * room) for one in bins]
    return [lines[0], *(f"{line}{_INDENT}{bar}".rstrip() for line, bar in zip(lines[1:], bars, strict=True))]


def _edges(lengths: Sequence[float], *, even: bool) -> list[str]:
    """Return round numbers, exactly, set to the right; where they are evenly spaced, with as many decimals each."""
    exact = [Decimal(repr(length).removesuffix(".0")) for length in lengths]
    places = max(len(f"{length:f}".partition(".")[2]) for length in exact)
    texts = [f"{length:,.{places}f}" if even else f"{length:,f}" for length in exact]
    size = max(map(len, texts))
    return [text.rjust(size) for text in texts]


def _share(count: int, total: int) -> str:
    percent = 100 * count / total
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def _bar(cells: float) -> str:
    """Return a bar of blocks, to an eighth of a cell; what is not 0 can be seen."""
    eighths = max(round(8 * cells), 1 if cells else 0)
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[7] * whole + (_EIGHTHS[rest - 1] if rest else "")


def _ascii_bar(cells: float) -> str:
    return "#" * round(cells) or ("." if cells else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells in columns, the first set to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(others, widths[1:], strict=True))]
        lines.append(_INDENT + _INDENT.join(cells))
    return lines


def _listed(title: str, texts: Iterable[str], width: int) -> list[str]:
    """Return a heading, and each text under a dash; nothing where there are no texts."""
    lines: list[str] = []
    for text in texts:
        for index, paragraph in enumerate(text.splitlines()):
            lines += _wrapped(paragraph, width, ("- " if index == 0 else _INDENT, _INDENT))
    return [title, *lines] if lines else []


def _wrapped(text: str, width: int, indents: tuple[str, str] = ("", "")) -> list[str]:
    wrapped = textwrap.wrap(
        _OPTION.sub(rf"\1{_GLUE}", text),
        width,
        initial_indent=indents[0],
        subsequent_indent=indents[1],
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in wrapped]
