"""Numbers with their units, for people to read and write."""

from __future__ import annotations

import math
import re

from batchtune.errors import UsageError, shortened

_SIZE = re.compile(
    r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE | re.ASCII
)
_FEWEST_BARE_BYTES = 1024**2
# Unit of time → how many make a second; lengths of an unknown unit are assumed to be seconds.
PER_SECOND = {"s": 1.0, "ms": 1000.0, None: 1.0}


def parse_size(text: str) -> int:
    """Read a memory size such as `2GiB`, `500MB`, `24g` or `1073741824`, in bytes.

    `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024, as are the bare letters `K`, `M`, `G`, `T` (as `ulimit` and
    `docker` read them); `kB`, `MB`, `GB`, `TB` are powers of 1000.

    Raises:
        UsageError: Not a size, or not positive, or a number below 1 MiB without a unit: `16` hardly means bytes.
    """
    size = 0.0
    if match := _SIZE.fullmatch(text):
        decimal = match[2] and not match[3] and text.strip().lower().endswith("b")
        size = float(match[1]) * (1000 if decimal else 1024) ** " KMGT".index(
            (match[2] or " ").upper()
        )
        if 1 <= size < _FEWEST_BARE_BYTES and text.strip().replace(".", "").isdecimal():
            number = text.strip()
            raise UsageError(
                f"the memory size {shortened(number)} needs a unit",
                f"Write {number}GiB or {number}MiB.",
            )
    if not 1 <= size < math.inf:
        raise UsageError(
            f"{shortened(text)} is not a memory size",
            "Write a number with a unit, such as 2GiB or 500MB.",
        )
    return round(size)


def format_size(size_bytes: float) -> str:
    """Format bytes for a person with 3 significant digits: `1.9 GiB`."""
    size = float(round(size_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(abs(size)) < 1024:
            return f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def _three_digits(value: float) -> str:
    """Format with 3 significant digits, or more before the point: `.3g` would write 1000 as `1e+03`."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def counts_samples(limit: float, longest: float) -> bool:
    """Return whether a batch's limit must count audio samples, for lengths in seconds up to `longest`.

    No batch holds 2000 times the longest example; limits in samples are larger.
    """
    return limit > 2000 * longest


def format_number(value: float) -> str:
    """Format a number for a person: at most 4 significant digits below 10,000, grouped by thousands above."""
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """Return `1 cell`, `2 cells`, `28,539 lengths`, `3 processes`, `4 batches`."""
    plural = "es" if noun.endswith(("ss", "batch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def format_length(value: float, unit: str | None) -> str:
    """Format a length with its unit, if known: `24.5 s`, `1 word`."""
    number = format_number(value)
    if unit is None or unit == "":
        return number
    if number == "1" and unit not in PER_SECOND:
        return f"1 {unit.removesuffix('s')}"
    return f"{number} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a time span for a person: `430 µs`, `45 ms`, `12.3 s`, `4 min 05 s`, `3 h 12 min`.

    The unit is chosen by the rounded number: 59.96 s is `1 min 00 s`, not `60 s`.
    """
    if seconds == 0:
        return "0 s"
    if seconds * 1e6 < 999.5:
        return f"{seconds * 1e6:.3g} µs"
    if seconds * 1e3 < 999.5:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_ratio(value: float) -> str:
    """Format a ratio with 3 significant digits, keeping zeros: `1.60`, `12.3`, `104`."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def format_percent(ratio: float) -> str:
    """Format a ratio as per cent: `11.4%`."""
    return f"{100 * ratio:.1f}%"


def with_full_stop(text: str) -> str:
    """End a sentence from a result file, where most have no full stop, with one."""
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?", "…")) else f"{text}."
