"""Recommends one way to batch a stream, and says why."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.results import Row, StreamRow, cost_of, have_times
from batchtune.tuning.recommend import Recommendation
from batchtune.units import format_number, format_percent, format_seconds

# Costs within this share of the lowest are equal to it, as are those within the spread of the simulated epochs.
_EQUAL = 0.01
# Mates that meet again more often by less than this share meet as often: simulations differ by as much.
_EQUAL_AGAIN = 0.05


def recommend_stream(
    rows: Sequence[StreamRow], map_style: Row | None, *, min_randomness: float | None = None
) -> Recommendation:
    """Recommend the smallest buffer among the best rows, which are in an order of preference.

    They must have only proven batches (unless no row has) and be as random as asked for, or else as the best row with
    buckets. Rows are equal if they cost at most 1% more than the best of them, or no more than the spread of simulated
    epochs explains. Among rows with as large a buffer, a percent of mates that meet again weighs as much as a percent
    of the cost: the time, or without step times the batches and the padded length alike; of equal ones the first is
    taken.
    """
    choice = _Choice(rows)
    able = [at for at, row in enumerate(rows) if min_randomness is None or row.randomness >= min_randomness]
    if not able:
        best = max(rows, key=lambda row: row.randomness)
        reason = (
            f"no way is as random as --min-randomness {min_randomness:g} asks; the most random is {best.name}, with "
            f"{best.randomness:.3g}"
        )
        return Recommendation(None, reason, None)
    if proven := [at for at in able if not rows[at].unproven]:
        able = proven
    random = able if min_randomness is not None else choice.as_random_as_buckets(able)
    chosen = choice.best_of(random)
    row = rows[chosen]
    # SpeechBrain's own, of the same buffer and as random where there are such.
    theirs: int | None = None
    for some in ([at for at in random if rows[at].buffer_size == row.buffer_size], random, able):
        if theirs is None and (by_speechbrain := [at for at in some if rows[at].by_speechbrain]):
            theirs = choice.best_of(by_speechbrain)
    reason = f"{row.name} {'takes an estimated' if choice.timed else 'needs'} {choice.said(row)}"
    if theirs is not None and theirs != chosen:
        other = rows[theirs]
        reason += f", {choice.against(row, other)} than {other.name} at its best ({choice.said(other)})"
    if map_style is not None and (not choice.timed or map_style.estimated_epoch_seconds is not None):
        reason += (
            f", and {choice.against(row, map_style)} than a bucket table over all examples ({choice.said(map_style)}), "
            "which needs random access"
        )
    cheapest = rows[min(able, key=lambda at: choice.cost(rows[at]))]
    if choice.cost(cheapest) < choice.cost(row) * (1 - _EQUAL) and cheapest.mates_again > row.mates_again:
        verb = "takes" if choice.timed else "needs"
        again = [format_percent(cheapest.mates_again), format_percent(row.mates_again)]
        reason += (
            f"; {cheapest.name} {verb} {choice.against(cheapest, row)}, but batch mates meet again in {again[0]} of "
            f"cases, not {again[1]} (--min-randomness)"
        )
    return Recommendation(chosen, reason, theirs)


class _Choice:
    """The rows to choose from, and what they cost: the time of an epoch, or without step times its batches."""

    def __init__(self, rows: Sequence[StreamRow]) -> None:
        self._rows = rows
        self.timed = have_times(rows)
        self._fewest = min(row.batches for row in rows)
        self._least = min(row.padded_length for row in rows)

    def cost(self, row: StreamRow | Row) -> float:
        """Return the cost of a row."""
        return cost_of(row, timed=self.timed) or 0.0

    def best_of(self, places: Sequence[int]) -> int:
        """Return the place of the best of some rows."""
        best = min((self._rows[at] for at in places), key=self.cost)
        near = [at for at in places if self._is_equal(self._rows[at], best)]
        smallest = min(self._rows[at].buffer_size for at in near)
        near = [at for at in near if self._rows[at].buffer_size == smallest]
        lightest = min(self._burden(self._rows[at]) for at in near)
        return next(at for at in near if self._burden(self._rows[at]) <= lightest * (1 + _EQUAL))

    def as_random_as_buckets(self, places: Sequence[int]) -> list[int]:
        """Return the places of rows with buckets, and of those whose mates meet again no more often than theirs."""
        in_buckets = [at for at in places if self._rows[at].algorithm == "bucket"]
        if not in_buckets:
            return list(places)
        most = self._rows[self.best_of(in_buckets)].mates_again * (1 + _EQUAL_AGAIN)
        return [at for at in places if at in in_buckets or self._rows[at].mates_again <= most]

    def said(self, row: StreamRow | Row) -> str:
        """Return the cost of a row in words."""
        batches = f"{format_number(row.batches)} batches"
        return f"{format_seconds(self.cost(row))} an epoch ({batches})" if self.timed else batches

    def against(self, row: StreamRow, other: StreamRow | Row) -> str:
        """Return by how much a row costs more or less than another: `3.0% fewer`."""
        if not self.cost(other):
            return "as much"
        part = self.cost(row) / self.cost(other) - 1
        less = "less" if self.timed else "fewer"
        return f"{format_percent(abs(part))} {less if part < 0 else 'more'}"

    def _is_equal(self, row: StreamRow, best: StreamRow) -> bool:
        above = self.cost(row) - self.cost(best)
        if above <= _EQUAL * self.cost(best) or row.equal_to_best:
            return True
        if self.timed:
            return above <= (row.epoch_seconds_deviation or 0.0) + (best.epoch_seconds_deviation or 0.0)
        return above <= (row.batches_deviation or 0.0) + (best.batches_deviation or 0.0)

    def _burden(self, row: StreamRow) -> float:
        alike = self.cost(row) if self.timed else row.batches / self._fewest + row.padded_length / self._least
        return alike * (1 + row.mates_again)
