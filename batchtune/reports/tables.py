"""The tables of a report: what was compared, what to set, what fits, what failed, what the gate says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchtune.reports.summary import CURRENT, compared, fixed_baseline, today_row
from batchtune.reports.table import UNKNOWN, Column, Table, cell, format_shape, format_times, shown_of, spread
from batchtune.results import (
    Baseline,
    BucketUse,
    FrontierPoint,
    LowerBound,
    Probe,
    Row,
    Sweep,
    Trial,
    Verdict,
    cost_of,
)
from batchtune.units import format_length, format_number, format_percent, format_seconds, format_size

# Of tables whose batch sizes are not all proven.
_MARK = "*"
_DOES_NOT_FIT = "does not fit"
_MAX_FRONTIER_POINTS = 24
_MAX_FAILURES = 10
_WORST_FIRST = {"error": 0, "fails": 1, "holds": 2}


def rows_table(sweep: Sweep) -> Table:
    """Lay out the rows worth a look, then the user's config, the baselines and the bound.

    The time column is left out where no row has a time; a note says how many rows are not shown.
    """
    timed, fixed = sweep.has_times, fixed_baseline(sweep)
    chosen = chosen_rows(sweep)
    lines = [(series_name(sweep.rows[index]), sweep.rows[index]) for index in chosen]
    if sweep.current is not None:
        lines.append((current_name(sweep), sweep.current))
    others = [(baseline.name, baseline) for baseline in sweep.baselines]
    columns = [
        Column("strategy", numeric=False),
        Column("buckets"),
        Column("batches", leaves=2),
        Column("padding", leaves=3),
        Column("mean batch", leaves=4),
        Column("effective buckets", leaves=5),
        *([Column("estimated epoch", leaves=1)] if timed else []),
        *([Column("against fixed", leaves=2)] if fixed is not None else []),
    ]

    def costs(costed: Row | Baseline | LowerBound) -> list[str]:
        return [
            *([cell(costed.estimated_epoch_seconds, format_seconds)] if timed else []),
            *([_against(fixed, costed, timed)] if fixed is not None else []),
        ]

    rows = [
        (
            name,
            f"{_buckets(row)}{_MARK if row.unproven else ''}",
            format_number(row.batches),
            format_percent(row.padding_ratio),
            f"{row.mean_batch_size:.1f}",
            f"{row.effective_buckets:.1f}",
            *costs(row),
        )
        for name, row in lines
    ]
    rows += [
        (
            name,
            UNKNOWN,
            format_number(baseline.batches),
            format_percent(baseline.padding_ratio),
            f"{sweep.lengths.count / baseline.batches:.1f}",
            UNKNOWN,
            *costs(baseline),
        )
        for name, baseline in others
    ]
    bound = sweep.lower_bound
    rows.append(("lower bound", UNKNOWN, format_number(bound.batches), UNKNOWN, UNKNOWN, UNKNOWN, *costs(bound)))
    return Table(
        title="Bucket tables compared",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(_notes(sweep, chosen)),
        marked=None if sweep.recommended is None else chosen.index(sweep.recommended),
        break_before=len(chosen),
    )


def comparison_table(sweep: Sweep, row: Row) -> Table:
    """Lay the recommended row next to what it is compared with, and the user's own config even if it can't fit."""
    timed = sweep.has_times
    lines: list[tuple[str, Row | Baseline | LowerBound]] = [("recommended", row)]
    lines += [(name.removeprefix("a "), other) for name, other in compared(sweep)]
    if sweep.current is not None and sweep.current_fits is False:
        lines.append((f"{CURRENT} ({_DOES_NOT_FIT})", sweep.current))
    lines.append(("lower bound", sweep.lower_bound))
    columns = [Column("", numeric=False), Column("batches", leaves=1), Column("padding", leaves=2)]
    columns += [Column("estimated epoch", leaves=1)] if timed else []
    columns.append(Column("relative", leaves=1 if timed else 3))
    rows = tuple(
        (
            name,
            format_number(other.batches),
            UNKNOWN if isinstance(other, LowerBound) else format_percent(other.padding_ratio),
            *([cell(other.estimated_epoch_seconds, format_seconds)] if timed else []),
            _against(other, row, timed),
        )
        for name, other in lines
    )
    return Table(title="", columns=tuple(columns), rows=rows, marked=0)


def current_name(sweep: Sweep) -> str:
    """Return what tables and charts call the user's own config; it says so where its batches can't fit."""
    return f"current ({_DOES_NOT_FIT})" if sweep.current_fits is False else "current"


def series_name(row: Row) -> str:
    """Return what tables and charts call a row's strategy and sizing: `optimal (frontier)`."""
    return row.strategy if row.sizing == "length" else f"{row.strategy} ({row.sizing})"


def chosen_rows(sweep: Sweep) -> list[int]:
    """Choose the rows worth a look; return their indices, in the sweep's order.

    Of each strategy and sizing: the fewest and the most buckets, and the best; of the recommended one
    also its neighbours; and today's practice.
    """
    timed = sweep.has_times
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(sweep.rows):
        groups.setdefault(series_name(row), []).append(index)
    chosen: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda index: sweep.rows[index].num_buckets)
        chosen |= {members[0], members[-1]}
        # Sorted by buckets: the first of equals has the fewest.
        chosen.add(min(members, key=lambda index: cost_of(sweep.rows[index], timed=timed) or 0.0))
        if sweep.recommended in members:
            place = members.index(sweep.recommended)
            chosen |= set(members[max(0, place - 1) : place + 2])
    today = today_row(sweep)
    chosen |= {index for index, row in enumerate(sweep.rows) if row is today}
    return sorted(chosen)


def _buckets(row: Row) -> str:
    """Return the buckets as asked for; `12 of 20` where the table has fewer."""
    if len(row.boundaries) < row.num_buckets:
        return f"{format_number(len(row.boundaries))} of {format_number(row.num_buckets)}"
    return format_number(row.num_buckets)


def _against(one: Row | Baseline | LowerBound, other: Row | Baseline | LowerBound, timed: bool) -> str:
    """Return the cost of one as a multiple of the other's."""
    return format_times(cost_of(one, timed=timed), cost_of(other, timed=timed)) or UNKNOWN


def _fewer_buckets(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Say why tables have fewer buckets than were asked for, with the first of them as the example."""
    fewer = [row for row in rows if len(row.boundaries) < row.num_buckets]
    cheapest = [row for row in fewer if row.strategy == "optimal"]
    merged = [row for row in fewer if row.strategy != "optimal"]
    notes = []
    if cheapest:
        cost = "take longer" if sweep.has_times else "need as many batches or more"
        notes.append(f"“{_buckets(cheapest[0])}” buckets (optimal): more were allowed, but would {cost}.")
    if merged:
        why = "lengths are rounded to multiples" if sweep.settings.get("multiple_of") else "few lengths differ"
        notes.append(f"“{_buckets(merged[0])}” buckets ({merged[0].strategy}): the others coincided, because {why}.")
    return notes


def _notes(sweep: Sweep, chosen: list[int]) -> list[str]:
    rows = [sweep.rows[index] for index in chosen]
    notes = [*shown_of(len(chosen), len(sweep.rows), " rows", "sweep.json")]
    if sweep.recommended is not None:
        notes.append("▶ marks the recommended row.")
    if any(row.unproven for row in (*rows, sweep.current) if row is not None):
        notes.append(f"{_MARK} marks tables with batch sizes that are not proven to fit.")
    if sweep.current_fits is False:
        notes.append(
            "The current config does not fit: its batches are larger than what was measured to fit, or than "
            "max_batch_length where nothing was, and its time is extrapolated."
        )
    notes += _fewer_buckets(sweep, rows)
    fixed = fixed_baseline(sweep)
    if fixed is not None:
        what = "time" if sweep.has_times else "batches"
        size = format_number(fixed.batch_size)
        notes.append(f"“Against fixed” is a fixed batch size of {size}'s {what} divided by the row's.")
    notes.append("1 effective bucket is full randomness; more means that fewer examples can meet in a batch.")
    return notes


def bucket_table(sweep: Sweep, row: Row, probe: Probe | None) -> Table:
    """Lay out the recommended buckets, each with the trial that proves its batch size, where one is known."""
    unit = sweep.lengths.unit
    rows: list[tuple[str, ...]] = [
        (format_length(boundary, unit), format_number(size), format_length(boundary * size, unit))
        for boundary, size in zip(row.boundaries, row.batch_sizes, strict=True)
    ]
    columns = [Column("up to"), Column("batch size"), Column("largest batch", leaves=1)]
    if len(sweep.buckets) == len(rows) and any(bucket.proven_by is not None for bucket in sweep.buckets):
        columns.append(Column("proven by", numeric=False, leaves=2))
        trials = {trial.index: trial for trial in probe.trials} if probe else {}
        rows = [(*cells, _proof(use, trials, unit)) for cells, use in zip(rows, sweep.buckets, strict=True)]
    notes = ["Boundaries are rounded here; sampler.yaml and sweep.json hold them in full."]
    if any(use.proven_by is not None and use.examples < use.batch_size for use in sweep.buckets):
        notes.append("A bucket with fewer examples than its batch size was proven for as many as it holds.")
    title = f"Recommended buckets ({row.strategy})"
    return Table(title=title, columns=tuple(columns), rows=tuple(rows), notes=tuple(notes))


def _proof(bucket: BucketUse, trials: Mapping[int, Trial], unit: str | None) -> str:
    """Return `trial 17: 165 × 10.5 s`: that batch ran, and those of the bucket are no larger."""
    if bucket.proven_by is None:
        return "not proven" if bucket.examples else UNKNOWN
    trial = trials.get(bucket.proven_by)
    shape = f": {format_shape(trial.batch_size, trial.length, unit)}" if trial else ""
    return f"trial {bucket.proven_by}{shape}"


def frontier_table(probe: Probe) -> Table:
    """Lay out the largest batch that fits at each length."""
    shown, unit = spread(probe.frontier, _MAX_FRONTIER_POINTS), probe.lengths.unit
    has_targets = any(point.target_length is not None for point in shown)
    has_trials = any(point.trial is not None for point in shown)
    columns = (
        Column("length"),
        *([Column("target length")] if has_targets else []),
        Column("batch size"),
        Column("closed by", numeric=False, leaves=1),
        Column("peak memory", leaves=2),
        Column("step time", leaves=3),
        *([Column("trial", leaves=4)] if has_trials else []),
    )
    rows = tuple(
        (
            format_length(point.length, unit),
            *([cell(point.target_length, format_number)] if has_targets else []),
            format_number(point.batch_size),
            _closed_by(point),
            cell(point.peak_bytes, format_size),
            cell(point.step_seconds, format_seconds),
            *([cell(point.trial, str)] if has_trials else []),
        )
        for point in shown
    )
    notes = [*shown_of(len(shown), len(probe.frontier), " lengths", "probe.json")]
    if any(point.closed_by == "data" for point in shown):
        notes.append(
            "“Data, not memory”: no more examples are this short, or --max-batch-size allows no more. More may fit."
        )
    return Table(title="Frontier: the largest batch, by length", columns=columns, rows=rows, notes=tuple(notes))


def _closed_by(point: FrontierPoint) -> str:
    closed_by = "data, not memory" if point.closed_by == "data" else point.closed_by
    return closed_by if point.oom_batch_size is None else f"{closed_by} at {format_number(point.oom_batch_size)}"


def failed_trials(probe: Probe | None) -> list[Trial]:
    """Return the trials that failed, but not for lack of memory."""
    return [trial for trial in probe.trials if trial.outcome not in ("ok", "oom")] if probe is not None else []


def failures_table(probe: Probe) -> Table | None:
    """Lay out the trials that failed, but not for lack of memory; None without any."""
    failed = failed_trials(probe)
    rows = tuple(
        (format_shape(trial.batch_size, trial.length, probe.lengths.unit), trial.outcome, trial.error or UNKNOWN)
        for trial in failed[:_MAX_FAILURES]
    )
    if not failed:
        return None
    return Table(
        title="Trials that failed, but not for lack of memory",
        columns=(
            Column("batch shape", numeric=False),
            Column("outcome", numeric=False),
            Column("message", numeric=False, wraps=True),
        ),
        rows=rows,
        notes=shown_of(len(rows), len(failed), "", "probe.json"),
    )


def verdict_table(verdicts: Sequence[Verdict]) -> Table | None:
    """Lay out one row for each rule, the worst first; its first column holds the outcome. None without rules."""
    ordered = sorted(verdicts, key=lambda verdict: _WORST_FIRST[verdict.outcome])
    if not verdicts:
        return None
    return Table(
        title="Rules",
        columns=(
            Column("verdict", numeric=False),
            Column("fails if", numeric=False, wraps=True),
            Column("found", numeric=False, wraps=True),
        ),
        rows=tuple((verdict.outcome, verdict.rule, verdict.message) for verdict in ordered),
    )
