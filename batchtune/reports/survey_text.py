"""A survey of lengths as plain text: in two or three lines, or whole, with a histogram."""

from __future__ import annotations

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
_SECONDS = {"s": 1.0, "ms": 0.001}
_HOUR = 3600.0

# An option and its value, to be kept on one line.
_OPTION = re.compile(r"(--[a-z-]+) (?=\S)")
_GLUE = "\0"


def headline(lengths: Lengths) -> list[str]:
    """Show the data in a few lines, as every command does."""
    scan = survey(lengths)
    lines = [_extent(scan)]
    if scan.distinct > 1:
        spread = scan.percentiles
        lines.append(
            f"Median {format_number(spread.median)}, p95 {format_number(spread.p95)}, "
            f"p99 {format_length(spread.p99, lengths.unit)}; {scan.distinct:,} different lengths."
        )
    if scan.targets is not None and lengths.targets is not None:
        targets = scan.targets
        lines.append(
            f"Targets: {format_number(targets.max)} to {format_number(targets.min)}, "
            f"{_large(float(lengths.targets.sum()))} in all; median {format_number(targets.median)}, "
            f"p95 {format_number(targets.p95)}, p99 {format_number(targets.p99)}."
        )
    lines += [f"Left out: {text}" for text in _left_out(scan)]
    lines += [f"Truncated: {text}" for text in _truncated(scan)]
    return [*lines, *scan.notes, *(f"Warning: {text}" for text in scan.warnings)]


def render_survey(lengths: Lengths, *, ascii: bool = False) -> str:
    """Show the whole survey: lengths, percentiles, histogram, what was left out, and what looks wrong.

    Lines have 80 columns; an option is never parted from its value. ascii: nothing but ASCII.
    """
    scan = survey(lengths)
    summary = _wrapped(_extent(scan))
    if scan.distinct > 1:
        summary.append(f"{scan.distinct:,} distinct lengths.")
    blocks = [
        summary,
        _percentiles(scan, lengths),
        _histogram(scan, ascii=ascii),
        _listed("Left out", _left_out(scan)),
        _listed("Truncated", _truncated(scan)),
        _listed("Notes", scan.notes),
        # A warning's first sentence says what is wrong, the others what to do.
        _listed("Warnings", (text.replace(". ", ".\n", 1) for text in scan.warnings)),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return text.replace("µ", "u").encode("ascii", "replace").decode() if ascii else text


def _is_even(scan: Scan) -> bool:
    """Return whether the bins have the same width, but for rounding errors."""
    first = scan.histogram[0]
    last = scan.histogram[-1]
    return first.to - first.from_ < 1.5 * (last.to - last.from_)


def _left_out(scan: Scan) -> list[str]:
    return [f"{counted(count, 'example')}, {reason}." for reason, count in scan.left_out.items()]


def _truncated(scan: Scan) -> list[str]:
    truncated = truncated_words(scan.lengths)
    return [f"{truncated}."] if truncated else []


def _extent(scan: Scan) -> str:
    """Say how many, how long and how much: time in hours, all else in thousands, millions or billions."""
    summary = scan.lengths
    unit = summary.unit
    lengths = counted(summary.count, "length")
    longest = format_length(summary.max, unit)
    if scan.distinct == 1 == summary.count:
        return f"1 length: {longest}."
    total = _large(summary.total)
    if unit in _SECONDS:
        seconds = summary.total * _SECONDS[unit]
        total = f"{format_number(seconds / _HOUR)} h" if seconds >= _HOUR else format_seconds(seconds)
    if scan.distinct == 1:
        return f"{lengths}, all of {longest}: {total} in all."
    if unit not in _SECONDS:
        longest = format_number(summary.max)
    return f"{lengths} in descending order: {longest} to {format_length(summary.min, unit)}, {total} in all."


def _large(number: float) -> str:
    if number < 999_950:
        return format_number(number)
    if number < 999_950_000:
        return f"{format_number(number / 1e6)} million"
    return f"{format_number(number / 1e9)} billion"


def _percentiles(scan: Scan, lengths: Lengths) -> list[str]:
    rows = [
        ["", "longest", "p99.9", "p99", "p95", "median", "mean", "shortest"],
        ["length", *_figures(scan.percentiles, lengths.total / lengths.count)],
    ]
    if scan.targets is not None and lengths.targets is not None:
        rows.append(["target", *_figures(scan.targets, float(lengths.targets.sum()) / lengths.count)])
    lines = _aligned(rows)
    # Very long numbers find room one below the other.
    return lines if max(map(len, lines)) <= _WIDTH else _aligned([*zip(*rows, strict=True)])


def _figures(spread: Percentiles, mean: float) -> list[str]:
    """Return a row's figures, with the decimals that give the median 4 digits; none where lengths are whole numbers."""
    lengths = [spread.max, spread.p999, spread.p99, spread.p95, spread.median, spread.min]
    decimals = max(0, 4 - len(f"{spread.median:.0f}"))
    decimals_of_mean = decimals
    if all(length.is_integer() for length in lengths):
        decimals = 0
        decimals_of_mean = 0 if mean.is_integer() else min(decimals_of_mean, 1)
    texts = [_decimal_text(length, decimals) for length in lengths]
    texts.insert(-1, _decimal_text(mean, decimals_of_mean))
    return texts


def _decimal_text(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or more if they would make it 0."""
    if value and round(value, decimals) == 0:
        return format_number(value)
    return f"{value:,.{decimals}f}"


def _histogram(scan: Scan, *, ascii: bool) -> list[str]:
    """Return one line a bin: its edges, the examples in it, their share of all, and a bar as long as the share."""
    unit = scan.lengths.unit
    bins = scan.histogram
    rows = [(f"length ({unit})" if unit else "length", "examples", "share")]
    edges = _edges([*(bin_.to for bin_ in bins), bins[-1].from_], even=_is_even(scan))
    for bin_, (upper, lower) in zip(bins, pairwise(edges), strict=True):
        percent = 100 * bin_.count / scan.lengths.count
        share = "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"
        rows.append((f"{upper} to {lower}", f"{bin_.count:,}", share))
    title, *lines = _aligned(rows)
    room = max(1, _WIDTH - max(map(len, [title, *lines])) - len(_INDENT))
    largest = max(bin_.count for bin_ in bins)
    drawn = [title]
    for line, bin_ in zip(lines, bins, strict=True):
        bar = _bar(bin_.count / largest * room, ascii=ascii)
        drawn.append(f"{line}{_INDENT}{bar}".rstrip())
    return drawn


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
    if not cells:
        return ""
    whole, eighths = divmod(max(round(8 * cells), 1), 8)
    return _EIGHTHS[7] * whole + _EIGHTHS[eighths - 1 : eighths]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells in columns, the first set to the left and the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = _INDENT.join(["", f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return [form.format(*row) for row in rows]


def _listed(title: str, texts: Iterable[str]) -> list[str]:
    """Return a heading, and each text under a dash; nothing without texts."""
    lines: list[str] = []
    for text in texts:
        for index, paragraph in enumerate(text.splitlines()):
            lines += _wrapped(paragraph, _INDENT if index else "- ", _INDENT)
    return [title, *lines] if lines else []


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    glued = _OPTION.sub(rf"\1{_GLUE}", text)
    lines = textwrap.TextWrapper(
        _WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    ).wrap(glued)
    return [line.replace(_GLUE, " ") for line in lines]
