"""Hints at a wrong unit: numbers that look like another one's."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.lengths import Lengths
from batchtune.units import format_length, format_seconds

# How many make a second, as it is most often; and what is assumed for that.
_IN_A_SECOND: dict[str, tuple[int, str]] = {
    "ms": (1000, ""),
    "samples": (16_000, " at 16 kHz"),
    "frames": (100, " of 10 ms"),
}
# No utterance is so many seconds long.
_LONG_SECONDS = 1000.0
# More than so many seconds in a batch are none: then max_batch_length is meant as it is written.
_MOST_SECONDS = 7200.0
# A max_batch_length of so little more than the longest example is suspicious, too. Of frames it may be meant.
_NEAR = {"ms": 1.5, "samples": 1.5}


def workload_unit_hint(lengths: Lengths, workload: str) -> str | None:
    """Return a hint where one example does not fit, and the workload may expect seconds.

    Args:
        lengths: The data set.
        workload: Its spec; a built-in knows the unit.

    Returns:
        Full sentences; None where the lengths can be seconds, or count something else.
    """
    longest, unit = lengths.longest, lengths.unit
    if unit in _IN_A_SECOND and not workload.startswith("builtin:"):
        return (
            f"Is the unit right? The workload is given lengths in {unit}, up to {format_length(longest, unit)}. If it "
            f"expects seconds, convert them: {_conversion(unit, longest)}."
        )
    if unit not in ("s", None) or longest <= _LONG_SECONDS:
        return None
    given = "Is the unit right? The workload is given lengths up to"
    found = f"{format_length(longest, unit)} ({format_seconds(longest)})" if unit else format_length(longest, None)
    unknown = "" if unit else ", and nothing says what they count (--unit does)"
    others = "; ".join(f"if they are {one}, {_conversion(one, longest)}" for one in ("ms", "samples"))
    return f"{given} {found}{unknown}. If it expects seconds: {others}."


def _conversion(unit: str, longest: float) -> str:
    """`--length-scale 1/1000 --unit s (the longest is then 23.4 s)`."""
    count, assumed = _IN_A_SECOND[unit]
    which = f", for {unit}{assumed}" if assumed else ""
    return f"--length-scale 1/{count} --unit s (the longest is then {format_seconds(longest / count)}{which})"


def limit_unit_hint(lengths: Lengths, max_batch_length: float) -> str | None:
    """Return what max_batch_length may have been meant to be; None where it can be what it says.

    Args:
        lengths: The data set.
        max_batch_length: In its unit.

    Returns:
        A sentence without a full stop.
    """
    unit, median = lengths.unit, float(lengths.values[lengths.count // 2])
    is_short = max_batch_length < lengths.longest * _NEAR.get(unit or "", 1.0)
    meant = list(_meant(lengths, max_batch_length)) if is_short else []
    if not meant and max_batch_length >= median:
        return None
    limit = format_length(max_batch_length, unit)
    if max_batch_length < median:
        than = f"shorter than the median example ({format_length(median, unit)})"
    elif max_batch_length < lengths.longest:
        than = f"shorter than the longest example ({format_length(lengths.longest, unit)})"
    else:
        than = f"hardly longer than the longest example ({format_length(lengths.longest, unit)})"
    counted = f"the lengths are in {unit}" if unit else "nothing says what the lengths count"
    values = f": if {limit.split()[0]} s is meant, give {' or '.join(meant)}" if meant else ""
    return f"max_batch_length {limit} is {than}. Is it in another unit? {counted[0].upper()}{counted[1:]}{values}"


def _meant(lengths: Lengths, limit: float) -> Iterator[str]:
    """The options that say the same number of seconds, where that is a batch of several examples."""
    if limit > _MOST_SECONDS:
        return
    candidates = [lengths.unit] if lengths.unit else ["ms", "samples"]
    for unit in candidates:
        count, assumed = _IN_A_SECOND.get(unit, (0, ""))
        if limit * count >= 2 * lengths.longest:
            which = f" (for {unit}{assumed})" if assumed or not lengths.unit else ""
            yield f"--max-batch-length {limit * count:.15g}{which}"
