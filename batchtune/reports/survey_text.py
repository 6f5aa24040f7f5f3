"""A survey of lengths as plain text: in two or three lines, or whole, with a histogram."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import pairwise

from batchtune.lengths import Unit
from batchtune.survey import Spread, Survey
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


def headline(survey: Survey, unit: Unit | None, *, ascii: bool = False) -> list[str]:
    """The data in a few lines, as every command shows them: the lengths, what was left out, what the reader found.

    Args:
        survey: What to show.
        unit: What the lengths count.
        ascii: Whether the histogram is left out, for streams that can't encode block characters.
    """
    spark = [] if ascii or survey.distinct == 1 else [_spark(survey, unit)]
    return [*_summary(survey, unit), *spark, *(f"Left out: {text}" for text in _left_out(survey)), *survey.notes]


def render_survey(survey: Survey, unit: Unit | None, width: int = _WIDTH, *, ascii: bool = False) -> str:
    """The whole survey: lengths, percentiles, histogram, what was left out, and what looks wrong.

    Args:
        survey: What to show.
        unit: What the lengths count.
        width: Of a line, at least 60; running text is broken into lines, an option from its value never.
        ascii: Whether nothing but ASCII is wanted, for streams that can't encode block characters.
    """
    extent = _wrapped(_extent(survey, unit), width)
    blocks = [
        [*extent, f"They take {survey.distinct:,} different values."] if survey.distinct > 1 else extent,
        _percentiles(survey, width),
        _histogram(survey, unit, width, ascii=ascii),
        _listed("Left out", _left_out(survey), width),
        _listed("Notes", survey.notes, width),
        _listed("Warnings", (f"{caution.message}\n{caution.remedy}" for caution in survey.cautions), width),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return text.replace("µ", "u").encode("ascii", "replace").decode() if ascii else text


def _summary(survey: Survey, unit: Unit | None) -> Iterator[str]:
    yield _extent(survey, unit)
    if survey.distinct > 1:
        yield (
            f"Median {format_number(survey.median)}, p95 {format_number(survey.p95)}, "
            f"p99 {format_length(survey.p99, unit)}; {survey.distinct:,} different lengths."
        )
    if survey.targets is not None:
        targets = survey.targets
        yield (
            f"Targets: {format_number(targets.longest)} to {format_number(targets.shortest)}, "
            f"{_large(targets.total)} in all; median {format_number(targets.median)}, "
            f"p95 {format_number(targets.p95)}, p99 {format_number(targets.p99)}."
        )


def _spark(survey: Survey, unit: Unit | None) -> str:
    """The histogram in one line: a bar for each bin, the longest lengths first; a bin without examples is blank."""
    most = max(one.count for one in survey.histogram)
    heights = [math.ceil(one.count / most * len(_HEIGHTS)) for one in survey.histogram]
    bars = "".join(_HEIGHTS[height - 1] if height else " " for height in heights)
    edges = survey.histogram[0].up_to, survey.histogram[-1].above
    scale = " on a logarithmic scale" if survey.log_bins else ""
    return f"From {format_length(max(edges), unit)} to {format_length(min(edges), unit)}{scale}: ▕{bars}▏"


def _extent(survey: Survey, unit: Unit | None) -> str:
    lengths, total = counted(survey.count, "length"), _total(survey.total, unit)
    shortest, longest = format_length(survey.shortest, unit), format_length(survey.longest, unit)
    if survey.distinct == 1:
        return f"{lengths}, all of {longest}: {total} in all." if survey.count > 1 else f"1 length: {longest}."
    if unit not in _SECONDS:
        longest = format_number(survey.longest)
    return f"{lengths} in descending order: {longest} to {shortest}, {total} in all."


def _total(total: float, unit: Unit | None) -> str:
    """A total length, as people say it: time in hours, all else in thousands, millions or billions."""
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


def _left_out(survey: Survey) -> Iterator[str]:
    for reason, count in survey.left_out.items():
        yield f"{counted(count, 'example')}, {reason}."


def _percentiles(survey: Survey, width: int) -> list[str]:
    rows = [
        ["", "longest", "p99.9", "p99", "p95", "median", "mean", "shortest"],
        ["length", *_figures(survey)],
    ]
    if survey.targets is not None:
        rows.append(["target", *_figures(survey.targets)])
    lines = _aligned(rows)
    # Very long numbers find room one below the other.
    return lines if max(map(len, lines)) <= width else _aligned([*zip(*rows, strict=True)])


def _figures(spread: Spread) -> list[str]:
    """The figures of a row, with the decimals that give the median 4 digits; none where lengths are whole numbers."""
    lengths = [spread.longest, spread.p999, spread.p99, spread.p95, spread.median, spread.shortest]
    decimals = of_mean = max(0, 4 - len(f"{spread.median:.0f}"))
    if all(length.is_integer() for length in lengths):
        decimals, of_mean = 0, 0 if spread.mean.is_integer() else min(of_mean, 1)
    *longer, shortest = (_with_decimals(length, decimals) for length in lengths)
    return [*longer, _with_decimals(spread.mean, of_mean), shortest]


def _with_decimals(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return format_number(value) if value and not float(text.replace(",", "")) else text


def _histogram(survey: Survey, unit: Unit | None, width: int, *, ascii: bool) -> list[str]:
    """One line a bin: its edges, the examples in it, their share of all, and a bar as long as the share."""
    bins = survey.histogram
    edges = _edges([*(one.up_to for one in bins), bins[-1].above], even=not survey.log_bins)
    ranges = [f"{upper} to {lower}" for upper, lower in pairwise(edges)]
    counts = [f"{one.count:,}" for one in bins]
    shares = [_share(one.count, survey.count) for one in bins]
    title = (f"length ({unit})" if unit else "length", "examples", "share")
    lines = _aligned([title, *zip(ranges, counts, shares, strict=True)])
    room = max(1, width - max(map(len, lines)) - len(_INDENT))
    most = max(one.count for one in bins)
    draw = _ascii_bar if ascii else _bar
    bars = [draw(one.count / most * room) for one in bins]
    return [lines[0], *(f"{line}{_INDENT}{bar}".rstrip() for line, bar in zip(lines[1:], bars, strict=True))]


def _edges(lengths: Sequence[float], *, even: bool) -> list[str]:
    """Round numbers, exactly, set to the right; where they are evenly spaced, with as many decimals each."""
    exact = [Decimal(repr(length).removesuffix(".0")) for length in lengths]
    places = max(len(f"{length:f}".partition(".")[2]) for length in exact)
    texts = [f"{length:,.{places}f}" if even else f"{length:,f}" for length in exact]
    size = max(map(len, texts))
    return [text.rjust(size) for text in texts]


def _share(count: int, total: int) -> str:
    percent = 100 * count / total
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def _bar(cells: float) -> str:
    """A bar of blocks, to an eighth of a cell; what is not 0 can be seen."""
    eighths = max(round(8 * cells), 1 if cells else 0)
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[7] * whole + (_EIGHTHS[rest - 1] if rest else "")


def _ascii_bar(cells: float) -> str:
    return "#" * round(cells) or ("." if cells else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells in columns, the first set to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(others, widths[1:], strict=True))]
        lines.append(_INDENT + _INDENT.join(cells))
    return lines


def _listed(title: str, texts: Iterable[str], width: int) -> list[str]:
    """A heading, and each text under a dash; nothing where there are no texts."""
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
