"""Speed against randomness: the rows that nothing beats in both, and where the curve through them bends."""

from __future__ import annotations

from collections.abc import Sequence

# A bend of less than this part of both axes is rounding.
_LEAST_BEND = 1e-9


def trade_off(costs: Sequence[float], effective_buckets: Sequence[float]) -> list[int]:
    """The rows that no other row beats: none costs as little with fewer effective buckets, or less with as few.

    O(n log n). Of rows that are equal in both, only the first is on the curve.

    Args:
        costs: Of each row, such as the seconds of an epoch.
        effective_buckets: Of each row; fewer are more random.

    Returns:
        Indices of rows, the cheapest first: costs rise strictly and effective buckets fall strictly.

    Raises:
        ValueError: The two differ in length.
    """
    if len(costs) != len(effective_buckets):
        raise ValueError(f"{len(effective_buckets)} effective buckets for {len(costs)} costs")
    curve: list[int] = []
    for index in sorted(range(len(costs)), key=lambda row: (costs[row], effective_buckets[row], row)):
        if not curve or effective_buckets[index] < effective_buckets[curve[-1]]:
            curve.append(index)
    return curve


def knee(costs: Sequence[float], effective_buckets: Sequence[float], curve: Sequence[int]) -> int | None:
    """Where the curve bends most: before it a little time buys much randomness, behind it much time buys little.

    The point farthest from the chord between the curve's ends, on the side of less of both, with both axes
    normalised to [0, 1]: Kneedle (Satopää, Albrecht, Irwin and Raghavan 2011, "Finding a 'Kneedle' in a Haystack"),
    whose smoothing is left out, as the points are few and exact.

    Args:
        costs: Of each row.
        effective_buckets: Of each row.
        curve: As `trade_off` gives it.

    Returns:
        The index of a row, the cheaper one of equals; None for fewer than three points, or where none lies below the
        chord.
    """
    if len(curve) < 3:
        return None
    first, last = curve[0], curve[-1]
    cost_range = costs[last] - costs[first]
    bucket_range = effective_buckets[first] - effective_buckets[last]

    def below_chord(row: int) -> float:
        # The chord runs from (0, 1) to (1, 0); distances from it are this over √2.
        return (
            1
            - (costs[row] - costs[first]) / cost_range
            - (effective_buckets[row] - effective_buckets[last]) / bucket_range
        )

    best = max(curve[1:-1], key=below_chord)
    return best if below_chord(best) > _LEAST_BEND else None
