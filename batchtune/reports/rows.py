"""How a report calls the rows of a sweep, and what it compares the recommended one with."""

from __future__ import annotations

from batchtune.batching.strategies import STRATEGIES
from batchtune.results import Baseline, LowerBound, Row, StreamSweep, Sweep
from batchtune.units import format_number

FIXED_BASELINE = "fixed-random"
CURRENT = "your current config"
DOES_NOT_FIT = "does not fit"


def series_name(row: Row) -> str:
    """Return what tables and charts call a row's strategy and sizing: `optimal (frontier)`."""
    return row.strategy if row.sizing == "length" else f"{row.strategy} ({row.sizing})"


def current_name(sweep: Sweep | StreamSweep) -> str:
    """Return what tables and charts call the user's own config; it says so where its batches can't fit."""
    return f"current ({DOES_NOT_FIT})" if sweep.current_fits is False else "current"


def current_words(sweep: Sweep | StreamSweep) -> list[str]:
    """Return what was read as the user's own config, and where."""
    settings = sweep.current_settings or {}
    described = settings.get("describe")
    if not isinstance(described, str):
        return []
    place = [str(settings[name]) for name in ("source", "key_path") if settings.get(name)]
    return [f"{described} ({', '.join(place)})" if place else described]


def swept_kinds(sweep: Sweep) -> str:
    """Return what was swept: `tables`, `pools`, or `tables and pools`."""
    has_pools = any(row.pool_size is not None for row in sweep.rows)
    if all(row.pool_size is not None for row in sweep.rows):
        return "pools" if has_pools else "tables"
    return "tables and pools" if has_pools else "tables"


def best_table(sweep: Sweep) -> Row | None:
    """Return the best bucket table, which frameworks get that can't make pools; None where no table is recommended."""
    return None if sweep.recommended_table is None else sweep.rows[sweep.recommended_table]


def knows_mates(sweep: Sweep) -> bool:
    """Whether rows are compared by how often batch mates meet again; in older files, by their effective buckets."""
    return bool(sweep.rows) and all(row.mates_again is not None for row in sweep.rows)


def mates_again(sweep: Sweep, one: Row | Baseline | LowerBound) -> float | None:
    """Return the probability that two examples of one batch are mates again in the next epoch; None if not known."""
    if not knows_mates(sweep) or isinstance(one, LowerBound):
        return None
    if isinstance(one, Row):
        return one.mates_again
    count = sweep.lengths.count
    # Drawn at random, any other example is as likely a mate.
    return (min(one.batch_size, count) - 1) / max(1, count - 1) if one.name == FIXED_BASELINE else None


def format_share(share: float) -> str:
    """Return a share, which may be small, as per cent with 3 significant digits: `12.9%`, `0.0946%`."""
    return "less than 0.001%" if 0 < share < 1e-5 else f"{100 * share:.3g}%"


def compared(sweep: Sweep) -> list[tuple[str, Row | Baseline]]:
    """Name what the recommended row is compared with: the user's own config or today's practice, a fixed batch size."""
    others: list[tuple[str, Row | Baseline]] = []
    if sweep.current is not None and sweep.current_fits is not False:
        others.append((CURRENT, sweep.current))
    elif (today := today_row(sweep)) is not None and today[1] is not sweep.recommended_row:
        others.append(today)
    if (fixed := fixed_baseline(sweep)) is not None:
        others.append((f"a fixed batch size of {format_number(fixed.batch_size)}", fixed))
    return others


def today_row(sweep: Sweep) -> tuple[str, Row] | None:
    """Return name and row of today's practice, with the most buckets that were swept; None if none was."""
    known = [
        (STRATEGIES[row.strategy].practice(row.num_buckets), row) for row in sweep.rows if row.strategy in STRATEGIES
    ]
    named = [(name, row) for name, row in known if name is not None]
    return max(named, key=lambda one: one[1].num_buckets, default=None)


def fixed_baseline(sweep: Sweep) -> Baseline | None:
    """Return the largest fixed batch size, its batches drawn at random; None where it was not computed."""
    return next((baseline for baseline in sweep.baselines if baseline.name == FIXED_BASELINE), None)
