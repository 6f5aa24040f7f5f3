"""The tables on a sweep: its rows compared, the recommended buckets, the trade-offs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from batchtune.buckets.strategies import STRATEGIES
from batchtune.reports.rows import (
    CURRENT,
    UNPROVEN,
    best_table,
    compared,
    current_name,
    current_words,
    fixed_baseline,
    format_correlation,
    format_share,
    mates_again,
    series_name,
    swept_kinds,
    today_row,
)
from batchtune.reports.table import (
    TIMES,
    UNKNOWN,
    Table,
    format_shape,
    format_times,
    known,
    limits_table,
    make_table,
    shown_of,
    spread,
)
from batchtune.reports.trade_offs import two_dimensional_gains
from batchtune.results import Baseline, LowerBound, Probe, Row, Sweep, cost_of
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

_MAX_CURVE_POINTS = 12
Line = tuple[str, Row | Baseline | LowerBound]
"""A name, and what it costs."""


def sweep_tables(sweep: Sweep, probe: Probe | None) -> Iterator[Table]:
    """Lay out all that a sweep holds; the probe's trials prove batch sizes."""
    yield rows_table(sweep)
    row = sweep.recommended_row
    if row is not None and row.pool_size is not None:
        yield _pools_table(sweep, row)
    elif row is not None:
        yield _bucket_table(sweep, row, probe)
    if len(sweep.trade_off) > 1:
        yield curve_table(sweep)
    if sweep.two_dimensional:
        yield _two_dimensional_table(sweep)


def comparison_table(sweep: Sweep, row: Row, *, timed: bool) -> Table:
    """Compare the recommended row with its alternatives, and with the user's own config even if it can't fit."""
    lines: list[Line] = [("recommended", row)]
    lines += [(name.removeprefix("a "), alternative) for name, alternative in compared(sweep)]
    if sweep.current is not None and sweep.current_fits is False:
        lines.append((current_name(sweep, CURRENT), sweep.current))
    table = best_table(sweep)
    if table is not None and table is not row:
        lines.append((f"best table ({counted(len(table.boundaries), 'bucket')})", table))
    lines.append(("lower bound", sweep.lower_bound))
    rows = []
    for name, other in lines:
        cells = {"": name, "batches": format_number(other.batches), "padding": _padding(other)}
        if row.pool_size is not None:
            cells["meet again"] = known(mates_again(sweep, other), format_share)
        if timed:
            cells["estimated epoch"] = known(other.estimated_epoch_seconds, format_seconds)
        cells["relative"] = format_times(cost_of(other, timed=timed), cost_of(row, timed=timed))
        rows.append(cells)
    notes = [f"Your current config is {words}." for words in current_words(sweep)]
    return make_table("What it saves", rows, notes, marked=0, names=[""], brief=True)


def rows_table(sweep: Sweep) -> Table:
    """Lay out the chosen rows, then the user's config, the baselines and the bound.

    A note says how many rows are not shown.
    """
    timed = sweep.has_times
    fixed = fixed_baseline(sweep)
    chosen = chosen_rows(sweep)
    has_pools = swept_kinds(sweep) != "tables"
    lines: list[Line] = [(series_name(sweep.rows[index]), sweep.rows[index]) for index in chosen]
    if sweep.current is not None:
        lines.append((current_name(sweep), sweep.current))
    lines += [(baseline.name, baseline) for baseline in sweep.baselines]
    lines.append(("lower bound", sweep.lower_bound))
    rows = []
    for name, costed in lines:
        row = costed if isinstance(costed, Row) else None
        cells = {
            "strategy": name,
            "size" if has_pools else "buckets": known(row, _size),
            "batches": format_number(costed.batches),
            "padding": _padding(costed),
            "mean batch": f"{sweep.lengths.count / costed.batches:.1f}",
            "meet again": known(mates_again(sweep, costed), format_share),
        }
        if timed:
            cells["estimated epoch"] = known(costed.estimated_epoch_seconds, format_seconds)
        if fixed is not None:
            cells["against fixed"] = format_times(cost_of(fixed, timed=timed), cost_of(costed, timed=timed))
        rows.append(cells)
    marked = None if sweep.recommended is None else chosen.index(sweep.recommended)
    title = "Bucket tables compared with pools" if has_pools else "Bucket tables compared"
    return make_table(title, rows, _notes(sweep, chosen), marked, len(chosen), names=["strategy"])


def chosen_rows(sweep: Sweep) -> list[int]:
    """Choose the rows to show; return their indices, in the sweep's order.

    From each strategy and sizing: the fewest and the most buckets, or the smallest and the largest pools, and the best
    row; the recommended row's neighbours; today's practice and the best table.
    """
    timed = sweep.has_times
    today = today_row(sweep)
    chosen = set()
    if sweep.recommended_table is not None:
        chosen.add(sweep.recommended_table)
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(sweep.rows):
        groups.setdefault(series_name(row), []).append(index)
        if today is not None and row is today[1]:
            chosen.add(index)
    for members in groups.values():
        members.sort(key=lambda index: sweep.rows[index].pool_size or sweep.rows[index].num_buckets)
        # Sorted by size: the first of equals has the fewest buckets, or the smallest pools.
        best = min(members, key=lambda index: cost_of(sweep.rows[index], timed=timed) or 0.0)
        chosen.update((members[0], members[-1], best))
        if sweep.recommended in members:
            place = members.index(sweep.recommended)
            chosen.update(members[max(0, place - 1) : place + 2])
    return sorted(chosen)


def _size(row: Row) -> str:
    """Return the size of pools, or the buckets as asked for, `12 of 20` where the table has fewer; `*`: unproven."""
    mark = UNPROVEN if row.unproven else ""
    return f"{_buckets(row) if row.pool_size is None else format_number(row.pool_size)}{mark}"


def _buckets(row: Row) -> str:
    if len(row.boundaries) < row.num_buckets:
        return f"{format_number(len(row.boundaries))} of {format_number(row.num_buckets)}"
    return format_number(row.num_buckets)


def _padding(costed: Row | Baseline | LowerBound) -> str | None:
    return None if isinstance(costed, LowerBound) else format_percent(costed.padding_ratio)


def _notes(sweep: Sweep, chosen: Sequence[int]) -> Iterator[str]:
    rows = [sweep.rows[index] for index in chosen]
    fixed = fixed_baseline(sweep)
    yield from shown_of(len(chosen), len(sweep.rows), " rows", "sweep.json")
    if sweep.recommended is not None:
        yield "▶ marks the recommended row."
    if any(row.unproven for row in rows) or (sweep.current is not None and sweep.current.unproven):
        yield f"{UNPROVEN} marks tables with batch sizes that are not proven to fit."
    if sweep.current_fits is False:
        yield (
            "The current config does not fit: its batches are larger than what was measured to fit, or than "
            "max_batch_length where nothing was, and its time is extrapolated."
        )
    yield from _fewer_buckets(sweep, rows)
    if fixed is not None:
        cost = "time" if sweep.has_times else "batches"
        size = format_number(fixed.batch_size)
        yield f"“Against fixed” is a fixed batch size of {size}'s {cost} divided by the row's."
    yield "“Meet again” is the share of batch mates that are mates again in the next epoch: less is more random."
    pools = [row for row in rows if row.simulated_epochs]
    if pools:
        deviation = max(row.batches_deviation or 0.0 for row in pools)
        varied = f"; their numbers of batches vary by {deviation:.2g} at most (standard deviation)" if deviation else ""
        yield (
            "Size is the number of buckets, or of examples in a pool. The figures of pools are means over "
            f"{pools[0].simulated_epochs} simulated epochs{varied}."
        )


def _fewer_buckets(sweep: Sweep, rows: Sequence[Row]) -> Iterator[str]:
    """Say why tables have fewer buckets than they may: more would cost more, or boundaries coincided."""
    cost = "take longer" if sweep.has_times else "need as many batches or more"
    coincided = "lengths are rounded to multiples" if sweep.settings.get("multiple_of") else "few lengths differ"
    reasons = {True: f"more were allowed, but would {cost}", False: f"the others coincided, because {coincided}"}
    for row in rows:
        if len(row.boundaries) < row.num_buckets:
            by_cost = row.strategy in STRATEGIES and STRATEGIES[row.strategy].depends_on_sizes
            reason = reasons.pop(by_cost, None)
            if reason is not None:
                yield f"“{_buckets(row)}” buckets ({row.strategy}): {reason}."


def _pools_table(sweep: Sweep, row: Row) -> Table:
    unit = sweep.lengths.unit
    notes = []
    if row.batch_overhead is not None:
        notes.append(
            "Pools are cut where the sum of padded lengths is least, with an overhead of "
            f"{format_length(row.batch_overhead, unit)} a batch: batches may hold fewer examples."
        )
    return limits_table("Largest batch size, by longest example", row, unit, "sampler.yaml", notes)


def _bucket_table(sweep: Sweep, row: Row, probe: Probe | None) -> Table:
    """Lay out the recommended buckets, each with the trial that proves its batch size, if one is known."""
    unit = sweep.lengths.unit
    uses = sweep.buckets if len(sweep.buckets) == len(row.boundaries) else []
    has_proofs = any(use.proven_by is not None for use in uses)
    rows = []
    for index, boundary in enumerate(row.boundaries):
        size = row.batch_sizes[index]
        rows.append(
            {
                "up to": format_length(boundary, unit),
                "batch size": format_number(size),
                "largest batch": format_length(boundary * size, unit),
                "proven by": _proof(sweep, index, probe) if has_proofs else None,
            }
        )
    notes = ["Boundaries are rounded here; sampler.yaml and sweep.json hold them in full."]
    if any(use.proven_by is not None and use.examples < use.batch_size for use in uses):
        notes.append("A bucket with fewer examples than its batch size was proven for as many as it holds.")
    return make_table(f"Recommended buckets ({row.strategy})", rows, notes, names=["proven by"])


def _proof(sweep: Sweep, bucket: int, probe: Probe | None) -> str:
    """Return the trial that proves a bucket's batch size: that batch ran, and those of the bucket are no larger."""
    use = sweep.buckets[bucket]
    if use.proven_by is None:
        return "not proven" if use.examples else UNKNOWN
    for trial in probe.trials if probe else ():
        if trial.index == use.proven_by:
            return f"trial {trial.index}: {format_shape(trial.batch_size, trial.length, sweep.lengths.unit)}"
    return f"trial {use.proven_by}"


def curve_table(sweep: Sweep) -> Table:
    """Lay out the curve of speed against randomness, the fastest row first."""
    indices = sweep.trade_off
    timed = sweep.has_times
    kinds = swept_kinds(sweep)
    kept = [indices.index(sweep.recommended)] if sweep.recommended in indices else []
    shown = spread(indices, _MAX_CURVE_POINTS, kept)
    fastest = cost_of(sweep.rows[indices[0]], timed=timed)
    title = "table" if kinds == "tables" else "strategy"
    rows = []
    for index in shown:
        row = sweep.rows[index]
        size = format_number(row.pool_size or len(row.boundaries))
        sizing = "" if row.sizing == "length" else " (frontier)"
        randomness = math.floor(1e4 * row.randomness) / 1e4  # rounded down, as --min-randomness is to be given
        rows.append(
            {
                title: f"{row.strategy} {size}{sizing}",
                "randomness": f"{randomness:.4f}",
                "length correlation": known(row.length_correlation, format_correlation),
                "mean batch": format_number(row.mean_batch_size),
                "variation": f"{row.batch_size_variation:.2f}",
                "cost": format_times(cost_of(row, timed=timed), fastest),
            }
        )
    notes = [
        f"Cost is a multiple ({TIMES}) of the fastest's. Nothing swept is cheaper and more random than one of these.",
        *shown_of(len(shown), len(indices), f" {kinds} on the curve", "sweep.json"),
        "Randomness is the share of batch mates that are not mates again in the next epoch.",
    ]
    marked = shown.index(sweep.recommended) if sweep.recommended in shown else None
    return make_table("Speed against randomness", rows, notes, marked, names=[title])


def _two_dimensional_table(sweep: Sweep) -> Table:
    rows = []
    for row, gain in zip(sweep.two_dimensional, two_dimensional_gains(sweep), strict=True):
        rows.append(
            {
                "buckets": format_number(row.num_buckets),
                "batches": format_number(row.batches),
                "over length alone": format_number(row.one_dimensional_batches),
                "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if sweep.has_times else None,
                "gain": f"{gain:.2f}{TIMES}",
            }
        )
    note = "Gain is by time where it is known, else by batches; from the same simulated shuffles, on one rank."
    return make_table("Buckets over both lengths", rows, [note])
