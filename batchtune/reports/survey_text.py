"""A survey of lengths as plain text: in two or three lines, or whole, with a histogram."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import pairwise

from batchtune.lengths import Lengths
from batchtune.reports.rows import truncated_words
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
    """Show the data in a few lines, as every command does; ascii: without a histogram, which needs block characters."""
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
        # The histogram in one line: a bar for each bin, the longest first; a bin without examples is blank.
        bins, most = found.histogram, max(one.count for one in found.histogram)
        bars = "".join(f" {_HEIGHTS}"[math.ceil(one.count / most * len(_HEIGHTS))] for one in bins)
        scale = "" if _is_even(found) else " on a logarithmic scale"
        high, low = format_length(bins[0].to, unit), format_length(bins[-1].from_, unit)
        lines.append(f"From {high} to {low}{scale}: ▕{bars}▏")
    lines += [f"Left out: {text}" for text in _left_out(found)]
    lines += [f"Truncated: {text}" for text in _truncated(found)]
    return [*lines, *found.notes, *(f"Warning: {text}" for text in found.warnings)]


def render_survey(lengths: Lengths, width: int = _WIDTH, *, ascii: bool = False) -> str:
    """Show the whole survey: lengths, percentiles, histogram, what was left out, and what looks wrong.

    Lines have that width, at least 60; an option is never parted from its value. ascii: nothing but ASCII.
    """
    found = survey(lengths)
    values = [f"They take {found.distinct:,} different values."] if found.distinct > 1 else []
    blocks = [
        [*_wrapped(_extent(found), width), *values],
        _percentiles(found, lengths, width),
        _histogram(found, width, ascii=ascii),
        _listed("Left out", _left_out(found), width),
        _listed("Truncated", _truncated(found), width),
        _listed("Notes", found.notes, width),
        # A warning's first sentence says what is wrong, the others what to do.
        _listed("Warnings", (text.replace(". ", ".\n", 1) for text in found.warnings), width),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return text.replace("µ", "u").encode("ascii", "replace").decode() if ascii else text


def _is_even(found: Scan) -> bool:
    """Return whether the bins have the same width, but for rounding errors."""
    first, last = found.histogram[0], found.histogram[-1]
    return first.to - first.from_ < 1.5 * (last.to - last.from_)


def _left_out(found: Scan) -> list[str]:
    return [f"{counted(count, 'example')}, {reason}." for reason, count in found.left_out.items()]


def _truncated(found: Scan) -> list[str]:
    truncated = truncated_words(found.lengths)
    return [f"{truncated}."] if truncated else []


def _extent(found: Scan) -> str:
    """Say how many, how long and how much: time in hours, all else in thousands, millions or billions."""
    summary, unit = found.lengths, found.lengths.unit
    lengths, longest = counted(summary.count, "length"), format_length(summary.max, unit)
    if found.distinct == 1 == summary.count:
        return f"1 length: {longest}."
    total = _large(summary.total)
    if unit in _SECONDS:
        seconds = summary.total * _SECONDS[unit]
        total = f"{format_number(seconds / _HOUR)} h" if seconds >= _HOUR else format_seconds(seconds)
    if found.distinct == 1:
        return f"{lengths}, all of {longest}: {total} in all."
    if unit not in _SECONDS:
        longest = format_number(summary.max)
    return f"{lengths} in descending order: {longest} to {format_length(summary.min, unit)}, {total} in all."


def _large(number: float) -> str:
    if number < 999_950:
        return format_number(number)
    return (
        f"{format_number(number / 1e6)} million" if number < 999_950_000 else f"{format_number(number / 1e9)} billion"
    )


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
    places = [*(decimals for _ in lengths[:-1]), of_mean, decimals]
    texts = []
    for value, decimals in zip([*lengths[:-1], mean, lengths[-1]], places, strict=True):
        text = f"{value:,.{decimals}f}"
        texts.append(format_number(value) if value and not float(text.replace(",", "")) else text)
    return texts


def _histogram(found: Scan, width: int, *, ascii: bool) -> list[str]:
    """Return one line a bin: its edges, the examples in it, their share of all, and a bar as long as the share."""
    bins, unit, total = found.histogram, found.lengths.unit, found.lengths.count
    rows = [(f"length ({unit})" if unit else "length", "examples", "share")]
    edges = _edges([*(one.to for one in bins), bins[-1].from_], even=_is_even(found))
    for one, (upper, lower) in zip(bins, pairwise(edges), strict=True):
        percent = 100 * one.count / total
        share = "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"
        rows.append((f"{upper} to {lower}", f"{one.count:,}", share))
    title, *lines = _aligned(rows)
    room = max(1, width - max(map(len, [title, *lines])) - len(_INDENT))
    most = max(one.count for one in bins)
    bars = [_bar(one.count / most * room, ascii=ascii) for one in bins]
    return [title, *(f"{line}{_INDENT}{bar}".rstrip() for line, bar in zip(lines, bars, strict=True))]


def _edges(lengths: Sequence[float], *, even: bool) -> list[str]:
    """Return round numbers, exactly, set to the right; where they are evenly spaced, with as many decimals each."""
    exact = [Decimal(repr(length).removesuffix(".0")) for length in lengths]
    places = max(len(f"{length:f}".partition(".")[2]) for length in exact)
    texts = [f"{length:,.{places}f}" if even else f"{length:,f}" for length in exact]
    size = max(map(len, texts))
    return [text.rjust(size) for text in texts]


def _bar(cells: float, *, ascii: bool) -> str:
    """Return a bar of blocks, to an eighth of a cell; what is not 0 can be seen."""
    if ascii:
        return "#" * round(cells) or ("." if cells else "")
    whole, rest = divmod(max(round(8 * cells), 1 if cells else 0), 8)
    return _EIGHTHS[7] * whole + (_EIGHTHS[rest - 1] if rest else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells in columns, the first set to the left and the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = _INDENT.join(["", f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return [form.format(*row) for row in rows]


def _listed(title: str, texts: Iterable[str], width: int) -> list[str]:
    """Return a heading, and each text under a dash; nothing without texts."""
    lines: list[str] = []
    for text in texts:
        for index, paragraph in enumerate(text.splitlines()):
            lines += _wrapped(paragraph, width, _INDENT if index else "- ", _INDENT)
    return [title, *lines] if lines else []


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    glued = _OPTION.sub(rf"\1{_GLUE}", text)
    lines = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    ).wrap(glued)
    return [line.replace(_GLUE, " ") for line in lines]
