"""The tables on a sweep: its rows compared, the recommended buckets, the trade-offs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchtune.batching.strategies import STRATEGIES
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
# Strategies that take fewer buckets than they may where more would cost more.
_BY_COST = {name for name, strategy in STRATEGIES.items() if strategy.depends_on_sizes}


def sweep_tables(sweep: Sweep, probe: Probe | None) -> Iterator[Table]:
    """Lay out all that a sweep holds; the probe's trials prove batch sizes."""
    yield rows_table(sweep)
    if sweep.recommended_row is not None:
        yield _bucket_table(sweep, sweep.recommended_row, probe)
    yield from trade_off_tables(sweep)


def rows_table(sweep: Sweep) -> Table:
    """Lay out the chosen rows, then the user's config, the baselines and the bound.

    A note says how many rows are not shown.
    """
    timed, fixed, chosen = sweep.has_times, fixed_baseline(sweep), chosen_rows(sweep)
    lines: list[tuple[str, Row | Baseline | LowerBound]] = [
        (series_name(sweep.rows[index]), sweep.rows[index]) for index in chosen
    ]
    if sweep.current is not None:
        lines.append((current_name(sweep), sweep.current))
    lines += [(baseline.name, baseline) for baseline in sweep.baselines]
    lines.append(("lower bound", sweep.lower_bound))
    rows, of_pools = [], swept_kinds(sweep) != "tables"
    for name, one in lines:
        row = one if isinstance(one, Row) else None
        mean = row.mean_batch_size if row else sweep.lengths.count / one.batches
        rows.append(
            {
                "strategy": name,
                "size" if of_pools else "buckets": known(row, _size),
                "batches": format_number(one.batches),
                "padding": None if isinstance(one, LowerBound) else format_percent(one.padding_ratio),
                "mean batch": None if isinstance(one, LowerBound) else f"{mean:.1f}",
                "meet again": known(mates_again(sweep, one), format_share),
                "effective buckets": f"{row.effective_buckets:.1f}" if row else None,
                "estimated epoch": known(one.estimated_epoch_seconds, format_seconds) if timed else None,
                "against fixed": None if fixed is None else _against(fixed, one, timed),
            }
        )
    marked = None if sweep.recommended is None else chosen.index(sweep.recommended)
    title = "Bucket tables compared with pools" if of_pools else "Bucket tables compared"
    return make_table(title, rows, _notes(sweep, chosen), marked, len(chosen))


def sweep_comparison(sweep: Sweep, row: Row) -> Table:
    """Compare the recommended row with its alternatives, and with the user's own config even if it can't fit."""
    timed, in_pools = sweep.has_times, row.pool_size is not None
    brief = timed and in_pools  # one line has no room for more
    lines: list[tuple[str, Row | Baseline | LowerBound]] = [("recommended", row)]
    lines += [(name.removeprefix("a "), other) for name, other in compared(sweep)]
    if sweep.current is not None and sweep.current_fits is False:
        lines.append((current_name(sweep, CURRENT), sweep.current))
    if (table := best_table(sweep)) is not None and table is not row:
        lines.append((f"best table ({counted(len(table.boundaries), 'bucket')})", table))
    lines.append(("lower bound", sweep.lower_bound))
    rows = [
        {
            "": name,
            "batches": format_number(other.batches),
            "padding": None if isinstance(other, LowerBound) or brief else format_percent(other.padding_ratio),
            "meet again": known(mates_again(sweep, other), format_share) if in_pools else None,
            "estimated epoch": known(other.estimated_epoch_seconds, format_seconds) if timed else None,
            "relative": _against(other, row, timed),
        }
        for name, other in lines
    ]
    notes = [f"Your current config is {words}." for words in current_words(sweep)]
    return make_table("", rows, notes, marked=0)


def chosen_rows(sweep: Sweep) -> list[int]:
    """Choose the rows to show; return their indices, in the sweep's order.

    From each strategy and sizing: the fewest and the most buckets, or the smallest and the largest pools, and the best
    row; the recommended row's neighbours; today's practice and the best table.
    """
    timed, today = sweep.has_times, today_row(sweep)
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(sweep.rows):
        groups.setdefault(series_name(row), []).append(index)
    chosen = {index for index, row in enumerate(sweep.rows) if today is not None and row is today[1]}
    chosen |= {index for index in (sweep.recommended_table,) if index is not None}
    for members in groups.values():
        members.sort(key=lambda index: sweep.rows[index].pool_size or sweep.rows[index].num_buckets)
        # Sorted by size: the first of equals has the fewest buckets, or the smallest pools.
        best = min(members, key=lambda index: cost_of(sweep.rows[index], timed=timed) or 0.0)
        chosen |= {members[0], members[-1], best}
        if sweep.recommended in members:
            place = members.index(sweep.recommended)
            chosen |= set(members[max(0, place - 1) : place + 2])
    return sorted(chosen)


def _size(row: Row) -> str:
    """Return the size of pools, or the buckets as asked for, `12 of 20` where the table has fewer; `*`: unproven."""
    mark = UNPROVEN if row.unproven else ""
    return f"{format_number(row.pool_size) if row.pool_size is not None else _buckets(row)}{mark}"


def _buckets(row: Row) -> str:
    fewer = f"{format_number(len(row.boundaries))} of " if len(row.boundaries) < row.num_buckets else ""
    return f"{fewer}{format_number(row.num_buckets)}"


def _against(one: Row | Baseline | LowerBound, other: Row | Baseline | LowerBound, timed: bool) -> str | None:
    """Return the cost of one as a multiple of the other's."""
    return format_times(cost_of(one, timed=timed), cost_of(other, timed=timed))


def _notes(sweep: Sweep, chosen: list[int]) -> list[str]:
    rows, fixed = [sweep.rows[index] for index in chosen], fixed_baseline(sweep)
    notes = [*shown_of(len(chosen), len(sweep.rows), " rows", "sweep.json")]
    if sweep.recommended is not None:
        notes.append("▶ marks the recommended row.")
    if any(row.unproven for row in (*rows, sweep.current) if row is not None):
        notes.append(f"{UNPROVEN} marks tables with batch sizes that are not proven to fit.")
    if sweep.current_fits is False:
        notes.append(
            "The current config does not fit: its batches are larger than what was measured to fit, or than "
            "max_batch_length where nothing was, and its time is extrapolated."
        )
    cost = "take longer" if sweep.has_times else "need as many batches or more"
    why = "lengths are rounded to multiples" if sweep.settings.get("multiple_of") else "few lengths differ"
    fewer = [row for row in rows if len(row.boundaries) < row.num_buckets]
    for by_cost, reason in (
        (True, f"more were allowed, but would {cost}"),
        (False, f"the others coincided, because {why}"),
    ):
        examples = (row for row in fewer if (row.strategy in _BY_COST) == by_cost)
        if (example := next(examples, None)) is not None:
            notes.append(f"“{_buckets(example)}” buckets ({example.strategy}): {reason}.")
    if fixed is not None:
        what = "time" if sweep.has_times else "batches"
        size = format_number(fixed.batch_size)
        notes.append(f"“Against fixed” is a fixed batch size of {size}'s {what} divided by the row's.")
    notes.append(
        "“Meet again” is the share of batch mates that are mates again in the next epoch: less is more random."
    )
    notes.append("1 effective bucket is full randomness; more means that fewer examples can meet in a batch.")
    pools = [row for row in rows if row.simulated_epochs]
    if pools:
        most = max(row.batches_deviation or 0.0 for row in pools)
        varied = f"; their numbers of batches vary by {most:.2g} at most (standard deviation)" if most else ""
        notes.append(
            "Size is the number of buckets, or of examples in a pool. The figures of pools are means over "
            f"{pools[0].simulated_epochs} simulated epochs{varied}."
        )
    return notes


def _bucket_table(sweep: Sweep, row: Row, probe: Probe | None) -> Table:
    """Lay out the recommended buckets, each with the trial that proves its batch size, if one is known."""
    unit, uses = sweep.lengths.unit, sweep.buckets
    if row.pool_size is not None:
        notes = []
        if row.batch_overhead is not None:
            notes.append(
                "Pools are cut where the sum of padded lengths is least, with an overhead of "
                f"{format_length(row.batch_overhead, unit)} a batch: batches may hold fewer examples."
            )
        return limits_table("Largest batch size, by longest example", row, unit, "sampler.yaml", notes)
    trials = {trial.index: trial for trial in probe.trials} if probe else {}
    proven = [use.proven_by for use in uses] if len(uses) == len(row.boundaries) else [None] * len(row.boundaries)
    rows = []
    for index, (boundary, size, number) in enumerate(zip(row.boundaries, row.batch_sizes, proven, strict=True)):
        proof = "not proven" if uses and uses[index].examples else UNKNOWN
        if number is not None:
            # That batch ran, and those of the bucket are no larger.
            trial = trials.get(number)
            proof = f"trial {number}{f': {format_shape(trial.batch_size, trial.length, unit)}' if trial else ''}"
        rows.append(
            {
                "up to": format_length(boundary, unit),
                "batch size": format_number(size),
                "largest batch": format_length(boundary * size, unit),
                "proven by": proof if any(one is not None for one in proven) else None,
            }
        )
    notes = ["Boundaries are rounded here; sampler.yaml and sweep.json hold them in full."]
    if any(use.proven_by is not None and use.examples < use.batch_size for use in uses):
        notes.append("A bucket with fewer examples than its batch size was proven for as many as it holds.")
    return make_table(f"Recommended buckets ({row.strategy})", rows, notes)


def trade_off_tables(sweep: Sweep) -> Iterator[Table]:
    """Lay out the curve of speed against randomness, and tables over two lengths."""
    if len(sweep.trade_off) > 1:
        yield _curve_table(sweep)
    if sweep.two_dimensional:
        yield _two_dimensional_table(sweep)


def _curve_table(sweep: Sweep) -> Table:
    indices, timed = sweep.trade_off, sweep.has_times
    kept = [indices.index(sweep.recommended)] if sweep.recommended in indices else []
    shown = spread(indices, _MAX_CURVE_POINTS, kept)
    fastest = cost_of(sweep.rows[indices[0]], timed=timed)
    rows = []
    kinds = swept_kinds(sweep)
    for index in shown:
        row = sweep.rows[index]
        sizing = "" if row.sizing == "length" else " (frontier)"
        size = format_number(row.pool_size or len(row.boundaries))
        randomness = math.floor(1e4 * row.randomness) / 1e4  # rounded down, as --min-randomness is to be given
        rows.append(
            {
                "table" if kinds == "tables" else "strategy": f"{row.strategy} {size}{sizing}",
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
    return make_table("Speed against randomness", rows, notes, marked)


def _two_dimensional_table(sweep: Sweep) -> Table:
    timed = all(row.estimated_epoch_seconds is not None for row in sweep.two_dimensional)
    rows = [
        {
            "buckets": format_number(row.num_buckets),
            "batches": format_number(row.batches),
            "over length alone": format_number(row.one_dimensional_batches),
            "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if timed else None,
            "gain": f"{gain:.2f}{TIMES}",
        }
        for row, gain in zip(sweep.two_dimensional, two_dimensional_gains(sweep), strict=True)
    ]
    note = "Gain is by time where it is known, else by batches; from the same simulated shuffles, on one rank."
    return make_table("Buckets over both lengths", rows, [note])
