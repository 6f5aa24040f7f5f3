"""Small matters of language, and ratios for people."""

from __future__ import annotations

from batchtune.reports.table import TIMES


def with_full_stop(text: str) -> str:
    """A sentence from a result file, where sentences have none."""
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def format_ratio(value: float) -> str:
    """A ratio with 3 significant digits that keeps its zeros: `1.60`, `12.3`, `104`."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def format_percent(ratio: float) -> str:
    """A ratio as per cent: `11.4%`."""
    return f"{100 * ratio:.1f}%"


def format_times(baseline_cost: float | None, cost: float | None) -> str | None:
    """The baseline's cost as a multiple of the cost; None where one is unknown or 0."""
    if not baseline_cost or not cost:
        return None
    return f"{format_ratio(baseline_cost / cost)}{TIMES}"
