"""Chooses one row of a stream's sweep and says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchtune.results import Row, StreamRow, cost_of, have_times
from batchtune.tuning.recommend import TOLERANCE
from batchtune.units import format_number, format_percent, format_seconds


class StreamRecommendation(NamedTuple):
    """The positions of rows, None where there are none, and why, in a sentence without a full stop.

    Attributes:
        speechbrain: The best row of SpeechBrain's own algorithm.
    """

    row: int | None
    speechbrain: int | None
    reason: str


def recommend_stream(
    rows: Sequence[StreamRow], map_style: Row | None, *, min_randomness: float | None = None
) -> StreamRecommendation:
    """Recommend the smallest buffer among the best rows.

    They must have only batches that are proven to fit (unless no row has), be as random as asked for, and cost at most
    1% more than the best such row. Among rows with as large a buffer, a percent of mates that meet again weighs as much
    as a percent of the cost: the time, or without step times the batches and the padded length alike.
    """
    timed = have_times(rows)

    def cost(row: StreamRow | Row) -> float:
        return cost_of(row, timed=timed) or 0.0

    fewest, least = (min(getattr(row, name) for row in rows) for name in ("batches", "padded_length"))

    def burden(at: int) -> float:
        row = rows[at]
        alike = cost(row) if timed else row.batches / fewest + row.padded_length / least
        return alike * (1 + row.mates_again)

    able = [at for at, row in enumerate(rows) if min_randomness is None or row.randomness >= min_randomness]
    if not able:
        best = max(rows, key=lambda row: row.randomness)
        return StreamRecommendation(
            None,
            None,
            f"no way is as random as --min-randomness {min_randomness:g} asks; the most random is {best.name}, with "
            f"{best.randomness:.3g}",
        )
    if proven := [at for at in able if not rows[at].unproven]:
        able = proven

    def best_of(some: Sequence[int]) -> int:
        near = min(cost(rows[at]) for at in some) * (1 + TOLERANCE)
        return min((at for at in some if cost(rows[at]) <= near), key=lambda at: (rows[at].buffer_size, burden(at), at))

    chosen = best_of(able)
    row, others = rows[chosen], [at for at in able if rows[at].algorithm == "speechbrain"]
    same = [at for at in others if rows[at].buffer_size == row.buffer_size]
    theirs = best_of(same or others) if others else None

    def said(one: StreamRow | Row) -> str:
        seconds = one.estimated_epoch_seconds
        batches = f"{format_number(one.batches)} batches"
        return f"{format_seconds(seconds)} an epoch ({batches})" if timed and seconds is not None else batches

    def against(one: StreamRow | Row) -> str:
        if not cost(one):
            return "as much"
        part = cost(row) / cost(one) - 1
        less, more = ("less", "more") if timed else ("fewer", "more")
        return f"{format_percent(abs(part))} {less if part < 0 else more}"

    reason = f"{row.name} {'takes an estimated' if timed else 'needs'} {said(row)}"
    if theirs is not None and theirs != chosen:
        reason += f", {against(rows[theirs])} than {rows[theirs].name} at its best ({said(rows[theirs])})"
    if map_style is not None and (not timed or map_style.estimated_epoch_seconds is not None):
        reason += (
            f", and {against(map_style)} than a bucket table over all examples ({said(map_style)}), which needs random "
            "access"
        )
    return StreamRecommendation(chosen, theirs, reason)
