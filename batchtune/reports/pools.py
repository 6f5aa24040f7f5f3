"""What a report says of pools: what they can't do, how they vary, and when they are faster than the best table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchtune.reports.rows import best_table, compared, format_share, mates_again
from batchtune.results import Row, Sweep, cost_of
from batchtune.units import format_number, format_percent, format_seconds

# The recommendation's own rule: pools that cost this part less than the best table are faster.
_FASTER = 0.01
_RANDOMNESS_DIGITS = 1e3


def pool_sentences(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say what recommended pools are not made for, and how they vary from epoch to epoch."""
    yield _sampler(sweep, row)
    yield (
        "Pools make batches of many shapes: if you compile a model for each shape, sweep with --multiple-of, which "
        "recommends a table of few shapes."
    )
    if row.simulated_epochs is None or row.batches_deviation is None:
        return
    batches = f"{format_number(row.batches)} in each of {row.simulated_epochs} simulated epochs"
    if row.batches_deviation:
        spread = f"{format_number(row.batches)} ± {row.batches_deviation:.2g}"
        batches = f"{spread} in {row.simulated_epochs} simulated epochs (mean and standard deviation)"
    time = ""
    if row.epoch_seconds_deviation is not None and row.estimated_epoch_seconds:
        time = f" The time varies by {format_share(row.epoch_seconds_deviation / row.estimated_epoch_seconds)}."
    yield f"How many batches pools give depends on the shuffle: {batches}; the sampler's len() is exact.{time}"


def _sampler(sweep: Sweep, row: Row) -> str:
    """Say what runs recommended pools, and what all else gets instead."""
    own, table = "Pools need batchtune's own sampler", best_table(sweep)
    if table is None:
        return f"{own}: no bucket table is recommended for frameworks that can't take it."
    return (
        f"{own}: frameworks that can't take it get the best table, {table.name} ({_cost(sweep, table)}, "
        f"{_compared_cost(sweep, table, row)})."
    )


def format_correlation(correlation: float) -> str:
    """Return a correlation with 3 digits, without a minus before 0."""
    return f"{round(correlation, 3) + 0.0:.3f}"


def randomness_sentence(sweep: Sweep, row: Row) -> str | None:
    """Say how often the recommended row's batch mates meet again, and how alike their lengths are."""
    again = mates_again(sweep, row)
    if again is None:
        return None
    others = [(name, mates_again(sweep, other)) for name, other in compared(sweep)]
    against = " and ".join(f"{format_share(share)} with {name}" for name, share in others if share is not None)
    alike = ""
    if row.length_correlation is not None:
        alike = f"; the lengths of mates correlate by {format_correlation(row.length_correlation)}"
    return (
        f"{format_share(again)} of batch mates are mates again in the next epoch"
        f"{f', against {against}' if against else ''}{alike}."
    )


def faster_pools_sentence(sweep: Sweep, row: Row) -> str | None:
    """Say which pools are faster than the recommended table, by how much and at what randomness; None without any."""
    timed, again = sweep.has_times, mates_again(sweep, row)
    cost, fewest = cost_of(row, timed=timed), min((one.batches for one in sweep.baselines), default=math.inf)
    if row.pool_size is not None or cost is None or again is None:
        return None
    faster = [
        other
        for other in sweep.rows
        if other.pool_size is not None
        and not other.unproven
        and other.batches < fewest
        and (cost_of(other, timed=timed) or 0.0) < cost * (1 - _FASTER)
    ]
    if not faster:
        return None
    pools = min(faster, key=lambda other: (other.mates_again or 0.0, cost_of(other, timed=timed)))
    verb = "take" if timed else "need"
    less = f"{pools.name.capitalize()} would {verb} {_cost(sweep, pools)}, {_compared_cost(sweep, pools, row)}"
    if sweep.settings.get("multiple_of") is not None:
        return f"{less}, but make batches of more shapes than --multiple-of leaves."
    least = math.floor((pools.randomness or 0.0) * _RANDOMNESS_DIGITS) / _RANDOMNESS_DIGITS
    return (
        f"{less}, but {format_share(pools.mates_again or 0.0)} of their batch mates are mates again in the next epoch "
        f"instead of {format_share(again)}; --min-randomness {least:g} allows that."
    )


def _cost(sweep: Sweep, row: Row) -> str:
    """Return a row's cost: `627 batches`, or `an estimated 12.3 s an epoch`."""
    seconds = row.estimated_epoch_seconds
    if sweep.has_times and seconds is not None:
        return f"an estimated {format_seconds(seconds)} an epoch"
    return f"{format_number(row.batches)} batches"


def _compared_cost(sweep: Sweep, row: Row, other: Row) -> str:
    """Return how much more or less a row costs than another: `1.5% more`."""
    ours, theirs = (cost_of(one, timed=sweep.has_times) or 0.0 for one in (row, other))
    change = ours / theirs - 1 if theirs else 0.0
    return f"{format_percent(abs(change))} {'more' if change >= 0 else 'less'}"
