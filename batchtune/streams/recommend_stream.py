"""Recommends one way to batch a stream, and says why."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.buckets.recommend import Recommendation
from batchtune.results import Row, StreamRow, cost_of, have_times
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
    allowed = list(rows)
    if min_randomness is not None:
        allowed = [row for row in rows if row.randomness >= min_randomness]
    if not allowed:
        most_random = max(rows, key=lambda row: row.randomness)
        reason = (
            f"no way is as random as --min-randomness {min_randomness:g} asks; the most random is {most_random.name}, "
            f"with {most_random.randomness:.3g}"
        )
        return Recommendation(None, reason, None)
    proven = [row for row in allowed if not row.unproven]
    if proven:
        allowed = proven
    random_enough = allowed
    if min_randomness is None:
        random_enough = choice.as_random_as_buckets(allowed)
    row = choice.best_of(random_enough)
    speechbrain = choice.best_of_speechbrain(row, random_enough, allowed)

    verb = "takes" if choice.timed else "needs"
    estimated = " an estimated" if choice.timed else ""
    reason = f"{row.name} {verb}{estimated} {choice.describe(row)}"
    if speechbrain is not None and speechbrain is not row:
        difference = choice.difference(row, speechbrain)
        reason += f", {difference} than {speechbrain.name} at its best ({choice.describe(speechbrain)})"
    if map_style is not None and (not choice.timed or map_style.estimated_epoch_seconds is not None):
        reason += (
            f", and {choice.difference(row, map_style)} than a bucket table over all examples "
            f"({choice.describe(map_style)}), which needs random access"
        )
    cheapest = min(allowed, key=choice.cost)
    if choice.cost(cheapest) < choice.cost(row) * (1 - _EQUAL) and cheapest.mates_again > row.mates_again:
        reason += (
            f"; {cheapest.name} {verb} {choice.difference(cheapest, row)}, but batch mates meet again in "
            f"{format_percent(cheapest.mates_again)} of cases, not {format_percent(row.mates_again)} (--min-randomness)"
        )
    return Recommendation(_index(rows, row), reason, None if speechbrain is None else _index(rows, speechbrain))


def _index(rows: Sequence[StreamRow], row: StreamRow) -> int:
    return next(index for index, other in enumerate(rows) if other is row)


class _Choice:
    """The rows to choose from, and what they cost: the time of an epoch, or without step times its batches."""

    def __init__(self, rows: Sequence[StreamRow]) -> None:
        self.timed = have_times(rows)
        self._fewest_batches = min(row.batches for row in rows)
        self._least_padded = min(row.padded_length for row in rows)

    def cost(self, row: StreamRow | Row) -> float:
        """Return the cost of a row."""
        return cost_of(row, timed=self.timed) or 0.0

    def best_of(self, rows: Sequence[StreamRow]) -> StreamRow:
        """Return the best of some rows."""
        cheapest = min(rows, key=self.cost)
        equal = [row for row in rows if self._is_equal(row, cheapest)]
        buffer_size = min(row.buffer_size for row in equal)
        smallest = [row for row in equal if row.buffer_size == buffer_size]
        lowest = min(self._cost_with_mates(row) for row in smallest)
        return next(row for row in smallest if self._cost_with_mates(row) <= lowest * (1 + _EQUAL))

    def as_random_as_buckets(self, rows: Sequence[StreamRow]) -> list[StreamRow]:
        """Return the rows with buckets, and those whose mates meet again no more often than theirs."""
        in_buckets = [row for row in rows if row.algorithm == "bucket"]
        if not in_buckets:
            return list(rows)
        most_again = self.best_of(in_buckets).mates_again * (1 + _EQUAL_AGAIN)
        return [row for row in rows if row.algorithm == "bucket" or row.mates_again <= most_again]

    def best_of_speechbrain(
        self, chosen: StreamRow, random_enough: Sequence[StreamRow], allowed: Sequence[StreamRow]
    ) -> StreamRow | None:
        """Return the best row of SpeechBrain's own: of the chosen buffer and as random, if there are such."""
        same_buffer = [row for row in random_enough if row.buffer_size == chosen.buffer_size]
        for rows in (same_buffer, random_enough, allowed):
            by_speechbrain = [row for row in rows if row.by_speechbrain]
            if by_speechbrain:
                return self.best_of(by_speechbrain)
        return None

    def describe(self, row: StreamRow | Row) -> str:
        """Return the cost of a row in words."""
        batches = f"{format_number(row.batches)} batches"
        if not self.timed:
            return batches
        return f"{format_seconds(self.cost(row))} an epoch ({batches})"

    def difference(self, row: StreamRow, other: StreamRow | Row) -> str:
        """Return by how much a row costs more or less than another: `3.0% fewer`."""
        if not self.cost(other):
            return "as much"
        part = self.cost(row) / self.cost(other) - 1
        if part >= 0:
            return f"{format_percent(part)} more"
        return f"{format_percent(-part)} {'less' if self.timed else 'fewer'}"

    def _is_equal(self, row: StreamRow, cheapest: StreamRow) -> bool:
        if row.equal_to_best:
            return True
        if self.timed:
            spread = (row.epoch_seconds_deviation or 0.0) + (cheapest.epoch_seconds_deviation or 0.0)
        else:
            spread = (row.batches_deviation or 0.0) + (cheapest.batches_deviation or 0.0)
        return self.cost(row) - self.cost(cheapest) <= max(_EQUAL * self.cost(cheapest), spread)

    def _cost_with_mates(self, row: StreamRow) -> float:
        cost = self.cost(row)
        if not self.timed:
            cost = row.batches / self._fewest_batches + row.padded_length / self._least_padded
        return cost * (1 + row.mates_again)
