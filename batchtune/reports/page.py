"""What a report contains, in the words and numbers that a reader sees, before any format.

The formats for people (terminal, Markdown, HTML) all render a `Page`, so they say the same.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from batchtune.errors import without_commands
from batchtune.reports.cautions import warning_sentences
from batchtune.reports.gate.words import verdict_table
from batchtune.reports.next_steps import next_steps
from batchtune.reports.rows import comparison_table, rows_table
from batchtune.reports.run import RunResults
from batchtune.reports.summary import brief_sentences, describe_device, summary_sentences
from batchtune.reports.table import TIMES, UNKNOWN, Column, Table
from batchtune.reports.trade_offs import trade_off_tables
from batchtune.reports.verification import (
    proposal_table,
    verification_facts,
    verification_sentences,
    verification_tables,
    verification_warnings,
)
from batchtune.reports.words import format_percent
from batchtune.results import (
    BucketUse,
    CostModel,
    FrontierPoint,
    LengthsSummary,
    Outcome,
    Probe,
    Row,
    Sweep,
    Trial,
)
from batchtune.units import format_length, format_number, format_seconds, format_size

_MAX_TEXT = 400
_MAX_FRONTIER_POINTS = 24
_MAX_FAILURES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content. All strings are clean: one line, no control characters.

    Attributes:
        title: What this is a report of.
        facts: Name and value of what was measured, where and how.
        summary: Sentences, most important first.
        tables: In the order to show them.
        warnings: What the reader should look after, each with its remedy.
        verdicts: What became of each rule, before all else; None where there was none.
        next_steps: A command or a file, and what it is for; only in the brief page.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    summary: tuple[str, ...]
    tables: tuple[Table, ...]
    warnings: tuple[str, ...]
    verdicts: Table | None = None
    next_steps: tuple[tuple[str, str], ...] = ()


def build_brief_page(results: RunResults) -> Page:
    """Lays out what matters most: what to set, what it saves, and what to do next."""
    failed = _failures(results.probe) if results.probe is not None else []
    warnings = warning_sentences(results)
    if failed:
        trials = "1 trial" if len(failed) == 1 else f"{len(failed)} trials"
        warnings.insert(
            0, f"{trials} failed, but not for lack of memory: {failed[0].outcome}. --full shows the messages."
        )
    page = _page(
        f"batchtune report: {results.name}",
        (),
        brief_sentences(results),
        _brief_tables(results),
        warnings,
    )
    return replace(page, verdicts=_verdicts(results), next_steps=_clean_facts(next_steps(results)))


def build_page(results: RunResults) -> Page:
    """Lays out a run's results for people."""
    probe, sweep = results.probe, results.sweep
    tables: list[Table] = []
    if sweep is not None:
        tables.append(rows_table(sweep))
        if sweep.recommended_row is not None:
            tables.append(_bucket_table(sweep, sweep.recommended_row, probe))
        tables += trade_off_tables(sweep)
    if probe is not None:
        tables.append(_frontier_table(probe))
        tables += _failures_table(probe)
    if results.verification is not None:
        tables += verification_tables(results.verification)
    page = _page(
        f"batchtune report: {results.name}",
        _facts(results),
        summary_sentences(results),
        tables,
        warning_sentences(results),
    )
    return replace(page, verdicts=_verdicts(results))


def build_verification_page(results: RunResults) -> Page:
    """Lays out a run's verification alone.

    Raises:
        ValueError: There is none.
    """
    verification = results.verification
    if verification is None:
        raise ValueError("this run has not been verified")
    options = "".join(f" {key}={value}" for key, value in verification.workload.options.items())
    facts = [
        ("Data", _describe_data(verification.lengths)),
        ("Device", describe_device(verification.device)),
        ("Workload", verification.workload.spec + options),
        *verification_facts(verification),
    ]
    return _page(
        f"batchtune verify: {results.name}",
        facts,
        verification_sentences(verification),
        verification_tables(verification),
        verification_warnings(results),
    )


def build_brief_verification_page(results: RunResults) -> Page:
    """Lays out whether a run's verification holds, and what to do next.

    Raises:
        ValueError: There is none.
    """
    whole = build_verification_page(results)
    tables = tuple(_clean_table(table) for table in _brief_tables(results)) if whole.tables else ()
    return replace(whole, facts=(), tables=tables, next_steps=_clean_facts(next_steps(results)))


def clean(text: str) -> str:
    """One line of text that can do nothing to the place where it is shown.

    Result files may come from anywhere: white space of any kind becomes one space, control and formatting
    characters (terminal escapes, changes of writing direction) become U+FFFD, what GitHub would take for a command is
    parted, and what is longer than 400 characters is cut with an ellipsis.
    """
    line = without_commands(" ".join(text.split()))
    line = "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in line)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def _page(
    title: str,
    facts: Iterable[tuple[str, str]],
    summary: Iterable[str],
    tables: Iterable[Table],
    warnings: Iterable[str],
) -> Page:
    return Page(
        title=clean(title),
        facts=_clean_facts(facts),
        summary=tuple(clean(sentence) for sentence in summary),
        tables=tuple(_clean_table(table) for table in tables),
        warnings=tuple(clean(sentence) for sentence in warnings),
    )


def _brief_tables(results: RunResults) -> list[Table]:
    """What the recommended row saves; or, where its verification does not hold, the sizes that are safe instead."""
    sweep, verification = results.sweep, results.verification
    if verification is not None and not verification.holds:
        return list(proposal_table(verification))
    row = sweep.recommended_row if sweep is not None else None
    if sweep is None or row is None:
        return []
    read = tuple(f"Your current config is {value}." for _, value in _current_fact(sweep))
    return [replace(comparison_table(sweep, row), notes=read)]


def _verdicts(results: RunResults) -> Table | None:
    return _clean_table(verdict_table(results.verdicts)) if results.verdicts else None


def _clean_facts(facts: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((clean(name), clean(value)) for name, value in facts)


def _clean_table(table: Table) -> Table:
    return Table(
        title=clean(table.title),
        columns=table.columns,
        rows=tuple(tuple(clean(cell) for cell in row) for row in table.rows),
        notes=tuple(clean(note) for note in table.notes),
        marked=table.marked,
        break_before=table.break_before,
    )


def _facts(results: RunResults) -> list[tuple[str, str]]:
    probe, sweep = results.probe, results.sweep
    facts = [("Data", _describe_data(results.lengths))]
    if probe is not None:
        facts.append(("Device", describe_device(probe.device)))
        driver = f", driver {probe.device.driver}" if probe.device.driver else ""
        facts.append(("Software", f"torch {probe.device.torch}{driver}, allocator {probe.device.allocator}"))
        options = "".join(f" {key}={value}" for key, value in probe.workload.options.items())
        facts.append(("Workload", probe.workload.spec + options))
        facts.append(("Trials", _describe_trials(probe)))
        models = [f"{name} to within {_describe_error(model)}" for name, model in _models(probe) if model is not None]
        if models:
            facts.append(("Models", f"fit the trials: {', '.join(models)}"))
    elif sweep is not None and sweep.device_name is not None:
        facts.append(("Device", sweep.device_name))
    limit = f"max_batch_length = {format_length(results.max_batch_length, results.lengths.unit)}"
    row = sweep.recommended_row if sweep is not None else None
    sized_by = ", for samplers that know no batch size per bucket" if row and row.sizing == "frontier" else ""
    facts.append(("Limit", f"{limit}{sized_by}"))
    facts += _current_fact(sweep)
    return facts + (verification_facts(results.verification) if results.verification is not None else [])


def _current_fact(sweep: Sweep | None) -> list[tuple[str, str]]:
    """What was read as the user's own config, and where."""
    settings = (sweep.current_settings or {}) if sweep is not None else {}
    described = settings.get("describe")
    if not isinstance(described, str):
        return []
    place = [str(settings[name]) for name in ("source", "key_path") if settings.get(name)]
    return [("Current", f"{described} ({', '.join(place)})" if place else described)]


def _models(probe: Probe) -> tuple[tuple[str, CostModel | None], ...]:
    return (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds))


def _describe_error(model: CostModel) -> str:
    """`0.4%`, or `0.4% (1.2% at most)`."""
    most = "" if model.largest_error is None else f" ({format_percent(model.largest_error)} at most)"
    return format_percent(model.relative_error) + most


def _describe_data(lengths: LengthsSummary) -> str:
    unit = lengths.unit
    total = format_length(lengths.total, unit)
    if unit == "s" and lengths.total >= 60:
        total += f" ({format_seconds(lengths.total)})"
    examples = "1 example" if lengths.count == 1 else f"{format_number(lengths.count)} examples"
    unknown = "" if unit else "; the unit is unknown"
    return (
        f"{examples} of {format_length(lengths.min, unit)} to {format_length(lengths.max, unit)}, "
        f"{total} in all{unknown}"
    )


def _describe_trials(probe: Probe) -> str:
    counts = Counter(trial.outcome for trial in probe.trials)
    outcomes = [f"{counts[name]} {name}" for name in get_args(Outcome) if counts[name]]
    return f"{len(probe.trials)}: {', '.join(outcomes)}" if outcomes else "0"


def _bucket_table(sweep: Sweep, row: Row, probe: Probe | None) -> Table:
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
    """`trial 17: 165 × 10.5 s`: that batch ran, and those of the bucket are no larger."""
    if bucket.proven_by is None:
        return "not proven" if bucket.examples else UNKNOWN
    trial = trials.get(bucket.proven_by)
    shape = f": {format_number(trial.batch_size)} {TIMES} {format_length(trial.length, unit)}" if trial else ""
    return f"trial {bucket.proven_by}{shape}"


def _frontier_table(probe: Probe) -> Table:
    shown = _spread(probe.frontier, _MAX_FRONTIER_POINTS)
    has_targets = any(point.target_length is not None for point in shown)
    has_trials = any(point.trial is not None for point in shown)
    columns = [Column("length"), Column("batch size"), Column("closed by", numeric=False, leaves=1)]
    columns += [Column("peak memory", leaves=2), Column("step time", leaves=3)]
    if has_targets:
        columns.insert(1, Column("target length"))
    if has_trials:
        columns.append(Column("trial", leaves=4))
    notes = []
    if len(shown) < len(probe.frontier):
        notes.append(f"{len(shown)} of {len(probe.frontier)} lengths shown; all are in probe.json.")
    if any(point.closed_by == "data" for point in shown):
        notes.append(
            "“Data, not memory”: no more examples are this short, or --max-batch-size allows no more. More may fit."
        )
    return Table(
        title="Frontier: the largest batch, by length",
        columns=tuple(columns),
        rows=tuple(_frontier_row(point, probe.lengths.unit, has_targets, has_trials) for point in shown),
        notes=tuple(notes),
    )


def _frontier_row(point: FrontierPoint, unit: str | None, has_targets: bool, has_trials: bool) -> tuple[str, ...]:
    closed_by = "data, not memory" if point.closed_by == "data" else str(point.closed_by)
    if point.oom_batch_size is not None:
        closed_by = f"{closed_by} at {format_number(point.oom_batch_size)}"
    target = UNKNOWN if point.target_length is None else format_number(point.target_length)
    return (
        format_length(point.length, unit),
        *([target] if has_targets else []),
        format_number(point.batch_size),
        closed_by,
        UNKNOWN if point.peak_bytes is None else format_size(point.peak_bytes),
        UNKNOWN if point.step_seconds is None else format_seconds(point.step_seconds),
        *([UNKNOWN if point.trial is None else str(point.trial)] if has_trials else []),
    )


def _spread(points: list[FrontierPoint], most: int) -> list[FrontierPoint]:
    """At most so many of the points, evenly spaced, both ends in."""
    if len(points) <= most:
        return points
    return [points[round(step * (len(points) - 1) / (most - 1))] for step in range(most)]


def _failures(probe: Probe) -> list[Trial]:
    return [trial for trial in probe.trials if trial.outcome not in ("ok", "oom")]


def _failures_table(probe: Probe) -> list[Table]:
    """The trials that failed, but not for lack of memory; none where there were none."""
    failed = _failures(probe)
    if not failed:
        return []
    rows = tuple(
        (
            f"{format_number(trial.batch_size)} {TIMES} {format_length(trial.length, probe.lengths.unit)}",
            trial.outcome,
            trial.error or UNKNOWN,
        )
        for trial in failed[:_MAX_FAILURES]
    )
    notes = []
    if len(rows) < len(failed):
        notes.append(f"{len(rows)} of {len(failed)} shown; all are in probe.json.")
    columns = (
        Column("batch shape", numeric=False),
        Column("outcome", numeric=False),
        Column("message", numeric=False, wraps=True),
    )
    return [
        Table(
            title="Trials that failed, but not for lack of memory",
            columns=columns,
            rows=rows,
            notes=tuple(notes),
        )
    ]
