"""A report's content, in the words and numbers that a reader sees, before any format.

The formats for people (terminal, Markdown, HTML) all render a `Page`, so they say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from batchtune.reports.loaders import loader_facts
from batchtune.reports.rows import current_words
from batchtune.reports.run import RunResults
from batchtune.reports.streams import stream_facts
from batchtune.reports.summary import brief_sentences, describe_device, next_steps, summary_sentences, warning_sentences
from batchtune.reports.table import Table, clean
from batchtune.reports.tables import brief_tables, failed_trials, full_tables, verdict_table
from batchtune.reports.verification import (
    verification_facts,
    verification_sentences,
    verification_tables,
    verification_warnings,
)
from batchtune.results import LengthsSummary, LoaderTuning, Outcome, Probe
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content; all strings are cleaned: one line, no control characters.

    Attributes:
        facts: Name and value of what was measured, where and how.
        summary: Sentences, most important first.
        tables: In the order to show them.
        warnings: Each with its remedy.
        verdicts: The verdict on each rule, before all else; None without rules.
        next_steps: A command or a file, and what it is for; a brief page has some.
    """

    title: str
    facts: Sequence[Fact] = ()
    summary: Sequence[str]
    tables: Sequence[Table]
    warnings: Sequence[str]
    verdicts: Table | None = None
    next_steps: Sequence[Fact] = ()

    def __post_init__(self) -> None:
        cleaned = {
            "title": clean(self.title),
            "facts": clean_facts(self.facts),
            "summary": tuple(map(clean, self.summary)),
            "warnings": tuple(map(clean, self.warnings)),
            "next_steps": clean_facts(self.next_steps),
        }
        for name, value in cleaned.items():
            object.__setattr__(self, name, value)


def clean_facts(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Clean each name and value."""
    return tuple((clean(name), clean(value)) for name, value in facts)


def build_page(results: RunResults, *, brief: bool = False) -> Page:
    """Lay out a run's results; brief: what matters most, that is what to set, what it saves, and what to do next."""
    warnings = warning_sentences(results, brief=brief)
    if brief and (failed := failed_trials(results.probe)):
        trials, shown = counted(len(failed), "trial"), "--full shows the messages."
        warnings.insert(0, f"{trials} failed, but not for lack of memory: {failed[0].outcome}. {shown}")
    return Page(
        title=f"batchtune report: {results.name}",
        facts=() if brief else list(_facts(results)),
        summary=brief_sentences(results) if brief else summary_sentences(results),
        tables=brief_tables(results) if brief else list(full_tables(results)),
        warnings=warnings,
        verdicts=verdict_table(results.verdicts),
        next_steps=list(next_steps(results)) if brief else (),
    )


def build_verification_page(results: RunResults, *, brief: bool = False) -> Page:
    """Lay out a run's verification alone; brief: whether it holds, and what to do next.

    Raises:
        ValueError: The run has not been verified.
    """
    verification = results.verification
    if verification is None:
        raise ValueError("this run has not been verified")
    page = Page(
        title=f"batchtune verify: {results.name}",
        facts=[
            ("Data", _describe_data(verification.lengths)),
            ("Device", describe_device(verification.device)),
            ("Workload", verification.workload.words),
            *verification_facts(verification),
        ],
        summary=verification_sentences(verification),
        tables=verification_tables(verification),
        warnings=list(verification_warnings(results)),
    )
    if not brief:
        return page
    tables = brief_tables(results) if page.tables else ()
    return replace(page, facts=(), tables=tables, next_steps=list(next_steps(results)))


def _facts(results: RunResults) -> Iterator[Fact]:
    probe, sweep, stream, verification = results.probe, results.sweep, results.stream, results.verification
    main = results.main
    if results.lengths is not None:
        yield "Data", _describe_data(results.lengths)
    if probe is not None:
        device, count = probe.device, Counter(trial.outcome for trial in probe.trials)
        driver = f", driver {device.driver}" if device.driver else ""
        outcomes = ", ".join(f"{count[name]} {name}" for name in get_args(Outcome) if count[name])
        yield "Device", describe_device(device)
        yield "Software", f"torch {device.torch}{driver}, allocator {device.allocator}"
        yield "Workload", probe.workload.words
        yield "Trials", f"{len(probe.trials)}: {outcomes}" if outcomes else "0"
        fits = []
        for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
            if model is not None:
                most = "" if model.largest_error is None else f" ({format_percent(model.largest_error)} at most)"
                fits.append(f"{name} to within {format_percent(model.relative_error)}{most}")
        if fits:
            yield "Models", f"fit the trials: {', '.join(fits)}"
    elif not isinstance(main, (Probe, LoaderTuning)) and main.device_name is not None:
        yield "Device", main.device_name
    row = sweep.recommended_row if sweep is not None else None
    if not isinstance(main, LoaderTuning):
        limit = format_length(main.max_batch_length, main.lengths.unit)
        sized_by = ", for samplers without a batch size per bucket" if row and row.sizing == "frontier" else ""
        yield "Limit", f"max_batch_length = {limit}{sized_by}"
    if sweep is not None:
        yield from (("Current", text) for text in current_words(sweep))
    if stream is not None:
        yield from stream_facts(stream)
        yield from (("Current stream", text) for text in current_words(stream))
    if results.loader is not None:
        yield from loader_facts(results.loader)
    if verification is not None:
        yield from verification_facts(verification)


def _describe_data(lengths: LengthsSummary) -> str:
    unit = lengths.unit
    examples = "1 example" if lengths.count == 1 else f"{format_number(lengths.count)} examples"
    spread = f"{format_length(lengths.min, unit)} to {format_length(lengths.max, unit)}"
    total = format_length(lengths.total, unit)
    if unit == "s" and lengths.total >= 60:
        total += f" ({format_seconds(lengths.total)})"
    return f"{examples} of {spread}, {total} in all{'' if unit else '; the unit is unknown'}"
