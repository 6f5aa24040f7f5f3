"""A report's content, in the words and numbers that a reader sees, before any format.

The formats for people (terminal, Markdown, HTML) all render a `Page`, so they say the same.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

from batchtune.errors import without_commands
from batchtune.reports.cautions import warning_sentences
from batchtune.reports.run import RunResults
from batchtune.reports.summary import brief_sentences, describe_device, next_steps, summary_sentences
from batchtune.reports.table import Table
from batchtune.reports.tables import (
    bucket_table,
    comparison_table,
    failed_trials,
    failures_table,
    frontier_table,
    rows_table,
    verdict_table,
)
from batchtune.reports.trade_offs import trade_off_tables
from batchtune.reports.verification import (
    proposal_table,
    verification_facts,
    verification_sentences,
    verification_tables,
    verification_warnings,
)
from batchtune.results import LengthsSummary, Outcome, Probe, Sweep
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

_MAX_TEXT = 400

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content; all strings are cleaned here: one line, no control characters.

    Attributes:
        title: What this is a report of.
        facts: Name and value of what was measured, where and how.
        summary: Sentences, most important first.
        tables: In the order to show them.
        warnings: What the reader should look after, each with its remedy.
        verdicts: What became of each rule, before all else; None without rules.
        next_steps: A command or a file, and what it is for; only in the brief page.
    """

    title: str
    facts: Facts = ()
    summary: tuple[str, ...]
    tables: tuple[Table, ...]
    warnings: tuple[str, ...]
    verdicts: Table | None = None
    next_steps: Facts = ()

    def __post_init__(self) -> None:
        cleaned = {
            "title": clean(self.title),
            "facts": clean_facts(self.facts),
            "summary": tuple(map(clean, self.summary)),
            "tables": tuple(map(clean_table, self.tables)),
            "warnings": tuple(map(clean, self.warnings)),
            "verdicts": None if self.verdicts is None else clean_table(self.verdicts),
            "next_steps": clean_facts(self.next_steps),
        }
        for name, value in cleaned.items():
            object.__setattr__(self, name, value)


def build_brief_page(results: RunResults) -> Page:
    """Lay out what matters most: what to set, what it saves, and what to do next."""
    warnings = warning_sentences(results)
    if failed := failed_trials(results.probe):
        trials = counted(len(failed), "trial")
        warnings.insert(
            0, f"{trials} failed, but not for lack of memory: {failed[0].outcome}. --full shows the messages."
        )
    return Page(
        title=f"batchtune report: {results.name}",
        summary=tuple(brief_sentences(results)),
        tables=tuple(_brief_tables(results)),
        warnings=tuple(warnings),
        verdicts=verdict_table(results.verdicts),
        next_steps=tuple(next_steps(results)),
    )


def build_page(results: RunResults) -> Page:
    """Lay out a run's results for people."""
    probe, sweep = results.probe, results.sweep
    tables: list[Table | None] = []
    if sweep is not None:
        tables.append(rows_table(sweep))
        if sweep.recommended_row is not None:
            tables.append(bucket_table(sweep, sweep.recommended_row, probe))
        tables += trade_off_tables(sweep)
    if probe is not None:
        tables += [frontier_table(probe), failures_table(probe)]
    if results.verification is not None:
        tables += verification_tables(results.verification)
    return Page(
        title=f"batchtune report: {results.name}",
        facts=tuple(_facts(results)),
        summary=tuple(summary_sentences(results)),
        tables=tuple(table for table in tables if table is not None),
        warnings=tuple(warning_sentences(results)),
        verdicts=verdict_table(results.verdicts),
    )


def build_verification_page(results: RunResults) -> Page:
    """Lay out a run's verification alone.

    Raises:
        ValueError: The run has not been verified.
    """
    verification = results.verification
    if verification is None:
        raise ValueError("this run has not been verified")
    return Page(
        title=f"batchtune verify: {results.name}",
        facts=(
            ("Data", _describe_data(verification.lengths)),
            ("Device", describe_device(verification.device)),
            ("Workload", verification.workload.words),
            *verification_facts(verification),
        ),
        summary=tuple(verification_sentences(verification)),
        tables=tuple(verification_tables(verification)),
        warnings=tuple(verification_warnings(results)),
    )


def build_brief_verification_page(results: RunResults) -> Page:
    """Lay out whether a run's verification holds, and what to do next.

    Raises:
        ValueError: The run has not been verified.
    """
    whole = build_verification_page(results)
    tables = tuple(_brief_tables(results)) if whole.tables else ()
    return replace(whole, facts=(), tables=tables, next_steps=tuple(next_steps(results)))


def clean(text: str) -> str:
    """Return one line of text that can do nothing to the place where it is shown.

    Result files may come from anywhere: white space of any kind becomes one space, control and formatting
    characters (terminal escapes, changes of writing direction) become U+FFFD, what GitHub would take for a command is
    parted, and what is longer than 400 characters is cut with an ellipsis.
    """
    line = without_commands(" ".join(text.split()))
    line = "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in line)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def clean_facts(facts: Iterable[tuple[str, str]]) -> Facts:
    """Clean each name and value."""
    return tuple((clean(name), clean(value)) for name, value in facts)


def clean_table(table: Table) -> Table:
    """Clean each cell and note."""
    rows = tuple(tuple(map(clean, row)) for row in table.rows)
    return replace(table, title=clean(table.title), rows=rows, notes=tuple(map(clean, table.notes)))


def _brief_tables(results: RunResults) -> list[Table]:
    """Lay out what the recommended row saves; or, where its verification does not hold, the sizes that are safe."""
    sweep, verification = results.sweep, results.verification
    if verification is not None and not verification.holds:
        safe = proposal_table(verification)
        return [] if safe is None else [safe]
    row = sweep.recommended_row if sweep is not None else None
    if sweep is None or row is None:
        return []
    read = tuple(f"Your current config is {value}." for _, value in _current_fact(sweep))
    return [replace(comparison_table(sweep, row), notes=read)]


def _facts(results: RunResults) -> list[tuple[str, str]]:
    probe, sweep, verification = results.probe, results.sweep, results.verification
    facts = [("Data", _describe_data(results.lengths))]
    if probe is not None:
        facts += _probe_facts(probe)
    elif sweep is not None and sweep.device_name is not None:
        facts.append(("Device", sweep.device_name))
    limit = f"max_batch_length = {format_length(results.main.max_batch_length, results.lengths.unit)}"
    row = sweep.recommended_row if sweep is not None else None
    sized_by = ", for samplers without a batch size per bucket" if row and row.sizing == "frontier" else ""
    facts.append(("Limit", f"{limit}{sized_by}"))
    if sweep is not None:
        facts += _current_fact(sweep)
    return facts + (verification_facts(verification) if verification is not None else [])


def _probe_facts(probe: Probe) -> list[tuple[str, str]]:
    driver = f", driver {probe.device.driver}" if probe.device.driver else ""
    counts = Counter(trial.outcome for trial in probe.trials)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in get_args(Outcome) if counts[name])
    facts = [
        ("Device", describe_device(probe.device)),
        ("Software", f"torch {probe.device.torch}{driver}, allocator {probe.device.allocator}"),
        ("Workload", probe.workload.words),
        ("Trials", f"{len(probe.trials)}: {outcomes}" if outcomes else "0"),
    ]
    fits = []
    for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
        if model is not None:
            most = "" if model.largest_error is None else f" ({format_percent(model.largest_error)} at most)"
            fits.append(f"{name} to within {format_percent(model.relative_error)}{most}")
    return [*facts, ("Models", f"fit the trials: {', '.join(fits)}")] if fits else facts


def _current_fact(sweep: Sweep) -> list[tuple[str, str]]:
    """Return what was read as the user's own config, and where."""
    settings = sweep.current_settings or {}
    described = settings.get("describe")
    if not isinstance(described, str):
        return []
    place = [str(settings[name]) for name in ("source", "key_path") if settings.get(name)]
    return [("Current", f"{described} ({', '.join(place)})" if place else described)]


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
