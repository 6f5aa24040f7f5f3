"""The table of a sweep's rows: few enough to read, among them every row that matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from batchtune.reports.summary import CURRENT, compared, fixed_baseline, today_row
from batchtune.reports.table import UNKNOWN, Column, Table
from batchtune.reports.words import format_percent, format_times
from batchtune.results import Baseline, LowerBound, Row, Sweep, epoch_costs
from batchtune.units import format_number, format_seconds

# Of tables whose batch sizes are not all proven.
_MARK = "*"
_DOES_NOT_FIT = "does not fit"

_Costed = Row | Baseline | LowerBound


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line of the table: a string for each of its columns, in their order."""

    strategy: str
    buckets: str = UNKNOWN
    batches: str
    padding: str = UNKNOWN
    mean_batch: str = UNKNOWN
    effective_buckets: str = UNKNOWN
    epoch_time: str
    against_fixed: str


_COLUMNS = {
    "strategy": Column("strategy", numeric=False),
    "buckets": Column("buckets"),
    "batches": Column("batches", leaves=2),
    "padding": Column("padding", leaves=3),
    "mean_batch": Column("mean batch", leaves=4),
    "effective_buckets": Column("effective buckets", leaves=5),
    "epoch_time": Column("estimated epoch", leaves=1),
    "against_fixed": Column("against fixed", leaves=2),
}


def rows_table(sweep: Sweep) -> Table:
    """The rows worth a look, then the baselines and the bound.

    The time column is left out where no row has a time; what is left unshown is said in a note.
    """
    chosen = chosen_rows(sweep)
    timed = has_times(sweep)
    fixed = fixed_baseline(sweep)
    lines = [_row_line(sweep.rows[index], fixed, timed) for index in chosen]
    if sweep.current is not None:
        lines.append(replace(_row_line(sweep.current, fixed, timed), strategy=current_name(sweep)))
    lines += [_baseline_line(baseline, fixed, timed, sweep.lengths.count) for baseline in sweep.baselines]
    lines.append(_bound_line(sweep.lower_bound, fixed, timed))
    names = [field.name for field in fields(_Line) if timed or field.name != "epoch_time"]
    if fixed is None:
        names.remove("against_fixed")
    return Table(
        title="Bucket tables compared",
        columns=tuple(_COLUMNS[name] for name in names),
        rows=tuple(tuple(getattr(line, name) for name in names) for line in lines),
        notes=tuple(_notes(sweep, chosen, timed)),
        marked=None if sweep.recommended is None else chosen.index(sweep.recommended),
        break_before=len(chosen),
    )


def comparison_table(sweep: Sweep, row: Row) -> Table:
    """Lays the recommended row beside what it is compared with, and the user's own config even if it can't fit.

    Args:
        sweep: What was swept.
        row: What it recommends.
    """
    timed = has_times(sweep)
    lines: list[tuple[str, _Costed]] = [("recommended", row)]
    lines += [(name.removeprefix("a "), other) for name, other in compared(sweep)]
    if sweep.current is not None and sweep.current_fits is False:
        lines.append((f"{CURRENT} ({_DOES_NOT_FIT})", sweep.current))
    lines.append(("lower bound", sweep.lower_bound))
    columns = [Column("", numeric=False), Column("batches", leaves=1), Column("padding", leaves=2)]
    if timed:
        columns.append(Column("estimated epoch", leaves=1))
    columns.append(Column("relative", leaves=1 if timed else 3))
    return Table(
        title="",
        columns=tuple(columns),
        rows=tuple(
            (
                name,
                format_number(other.batches),
                UNKNOWN if isinstance(other, LowerBound) else format_percent(other.padding_ratio),
                *([_time(other.estimated_epoch_seconds)] if timed else []),
                _against(other, row, timed),
            )
            for name, other in lines
        ),
        marked=0,
    )


def current_name(sweep: Sweep) -> str:
    """What tables and charts call the user's own config; it says so where its batches can't fit."""
    return f"current ({_DOES_NOT_FIT})" if sweep.current_fits is False else "current"


def has_times(sweep: Sweep) -> bool:
    """Whether every row has an estimated time, so that rows are compared by it."""
    return bool(sweep.rows) and all(row.estimated_epoch_seconds is not None for row in sweep.rows)


def chosen_rows(sweep: Sweep) -> list[int]:
    """Indices of the rows worth a look, in the sweep's order.

    Of each strategy and sizing: the fewest and the most buckets, and the best; of the recommended one
    also its neighbours; and today's practice.
    """
    costs = epoch_costs(sweep.rows)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(sweep.rows):
        groups.setdefault((row.strategy, row.sizing), []).append(index)
    chosen: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda index: sweep.rows[index].num_buckets)
        chosen |= {members[0], members[-1]}
        chosen.add(min(members, key=lambda index: (costs[index], sweep.rows[index].num_buckets)))
        if sweep.recommended in members:
            place = members.index(sweep.recommended)
            chosen |= set(members[max(0, place - 1) : place + 2])
    today = today_row(sweep)
    if today is not None:
        chosen.add(next(index for index, row in enumerate(sweep.rows) if row is today))
    return sorted(chosen)


def _row_line(row: Row, fixed: Baseline | None, timed: bool) -> _Line:
    return _Line(
        strategy=row.strategy if row.sizing == "length" else f"{row.strategy} ({row.sizing})",
        buckets=f"{_buckets(row)}{_MARK if row.unproven else ''}",
        batches=format_number(row.batches),
        padding=format_percent(row.padding_ratio),
        mean_batch=f"{row.mean_batch_size:.1f}",
        effective_buckets=f"{row.effective_buckets:.1f}",
        epoch_time=_time(row.estimated_epoch_seconds),
        against_fixed=_against(fixed, row, timed),
    )


def _buckets(row: Row) -> str:
    """As asked for; where the data have fewer distinct lengths, how many there are of them."""
    if len(row.boundaries) < row.num_buckets:
        return f"{format_number(len(row.boundaries))} of {format_number(row.num_buckets)}"
    return format_number(row.num_buckets)


def _baseline_line(baseline: Baseline, fixed: Baseline | None, timed: bool, count: int) -> _Line:
    return _Line(
        strategy=baseline.name,
        batches=format_number(baseline.batches),
        padding=format_percent(baseline.padding_ratio),
        mean_batch=f"{count / baseline.batches:.1f}" if baseline.batches else UNKNOWN,
        epoch_time=_time(baseline.estimated_epoch_seconds),
        against_fixed=_against(fixed, baseline, timed),
    )


def _bound_line(bound: LowerBound, fixed: Baseline | None, timed: bool) -> _Line:
    return _Line(
        strategy="lower bound",
        batches=format_number(bound.batches),
        epoch_time=_time(bound.estimated_epoch_seconds),
        against_fixed=_against(fixed, bound, timed),
    )


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)


def _against(one: _Costed | None, other: _Costed, timed: bool) -> str:
    """The cost of one as a multiple of the other's."""
    if one is None:
        return UNKNOWN
    if timed:
        return format_times(one.estimated_epoch_seconds, other.estimated_epoch_seconds) or UNKNOWN
    return format_times(one.batches, other.batches) or UNKNOWN


def _fewer_buckets(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Why tables have fewer buckets than were asked for, with the first of them as the example."""
    fewer = [row for row in rows if len(row.boundaries) < row.num_buckets]
    cheapest = [row for row in fewer if row.strategy == "optimal"]
    merged = [row for row in fewer if row.strategy != "optimal"]
    notes = []
    if cheapest:
        cost = "take longer" if has_times(sweep) else "need as many batches or more"
        notes.append(f"“{_buckets(cheapest[0])}” buckets (optimal): more were allowed, but would {cost}.")
    if merged:
        why = "rounding to multiples" if sweep.settings.get("multiple_of") else "few different lengths"
        notes.append(f"“{_buckets(merged[0])}” buckets ({merged[0].strategy}): the others fell together, by {why}.")
    return notes


def _notes(sweep: Sweep, chosen: list[int], timed: bool) -> list[str]:
    notes = []
    if len(chosen) < len(sweep.rows):
        notes.append(f"{len(chosen)} of {len(sweep.rows)} rows shown; all are in sweep.json.")
    if sweep.recommended is not None:
        notes.append("▶ marks the recommended row.")
    if any(row.unproven for row in (*(sweep.rows[index] for index in chosen), sweep.current) if row is not None):
        notes.append(f"{_MARK} marks tables with batch sizes that are not proven to fit.")
    if sweep.current_fits is False:
        notes.append(
            "The current config does not fit: its batches are larger than what was measured to fit, or than "
            "max_batch_length where nothing was, and its time is extrapolated."
        )
    notes += _fewer_buckets(sweep, [sweep.rows[index] for index in chosen])
    fixed = fixed_baseline(sweep)
    if fixed is not None:
        size = format_number(fixed.batch_size)
        what = "time" if timed else "batches"
        notes.append(f"“Against fixed” is a fixed batch size of {size}'s {what} divided by the row's.")
    notes.append("1 effective bucket is full randomness; more means that fewer examples can meet in a batch.")
    return notes
