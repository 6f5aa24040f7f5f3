"""A report's content, in the words and numbers that a reader sees, before any format.

The formats for people (terminal, Markdown, HTML) all render a `Page`, so they say the same. Each kind of result has a
`Section`; this module knows only their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchtune.reports.loaders import LoaderSection
from batchtune.reports.probes import ProbeSection, describe_device
from batchtune.reports.run import RunResults
from batchtune.reports.section import Section
from batchtune.reports.streams import StreamSection
from batchtune.reports.sweeps import SweepSection
from batchtune.reports.table import Fact, Table, clean, make_table
from batchtune.reports.verification import (
    verification_facts,
    verification_sentences,
    verification_tables,
    verification_warnings,
)
from batchtune.results import Drift, LengthsSummary, Row, Verdict
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

# Field of `RunResults` → the section on it, in the order of sentences and tables. To add one: a subclass, and a line.
SECTIONS: dict[str, type[Section[Any]]] = {
    "sweep": SweepSection,
    "stream": StreamSection,
    "probe": ProbeSection,
    "loader": LoaderSection,
}
_WORST_FIRST = {"error": 0, "fails": 1, "holds": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content; all strings are cleaned: one line, no control characters.

    Attributes:
        facts: Name and value of what was measured, where and how.
        summary: Sentences, most important first.
        warnings: Each with its remedy.
        verdicts: The verdict on each rule, before all else; None without rules.
        next_steps: A command or a file, and its purpose; only a brief page has some.
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


def sections(results: RunResults, *, brief: bool = False) -> list[Section[Any]]:
    """Return the sections on a run's results, the main one first."""
    found = ((kind, getattr(results, name)) for name, kind in SECTIONS.items())
    return [kind(results, result, brief=brief) for kind, result in found if result is not None]


def build_page(results: RunResults, *, brief: bool = False) -> Page:
    """Lay out a run's results; brief: only what to set, what it saves, and what to do next."""
    return Page(
        title=f"batchtune report: {results.name}",
        facts=() if brief else list(_facts(results)),
        summary=summary_sentences(results, brief=brief),
        tables=report_tables(results, brief=brief),
        warnings=warning_sentences(results, brief=brief),
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
    tables = report_tables(results, brief=True) if page.tables else ()
    return replace(page, facts=(), tables=tables, next_steps=list(next_steps(results)))


def summary_sentences(results: RunResults, *, brief: bool = False) -> list[str]:
    """Say what to set and what it saves, most important first; the same in every format.

    The first is a headline: short, and enough if there is room for only one sentence.
    """
    found, failed = sections(results, brief=brief), results.failed_verification
    said = [verdict_sentence(results.verdicts)] if results.verdicts else []
    if failed is not None:
        said += verification_sentences(failed)
    if not (brief and failed):  # then the recommended batches, and what they save, are no news
        said += filter(None, (section.headline() for section in found))
    if results.drift is not None:
        said += drift_sentences(results.drift, results.sweep.recommended_row if results.sweep else None)
    for section in found[: 0 if failed else 1] if brief else found:
        title = f"{section.title}: " if section.title and not section.is_main else ""
        said += [f"{title}{sentence}" for sentence in section.sentences()]
    return said


def report_tables(results: RunResults, *, brief: bool = False) -> list[Table]:
    """Lay out all that a run's results hold.

    Brief: what the recommended rows save; nothing where the verification does not hold.
    """
    if brief and results.failed_verification is not None:
        return []
    shown = sections(results, brief=brief)
    if brief:
        return [table for section in shown for table in section.comparison()]
    tables = [table for section in shown for table in section.tables()]
    return tables if results.verification is None else [*tables, *verification_tables(results.verification)]


def warning_sentences(results: RunResults, *, brief: bool = False) -> list[str]:
    """Return all warnings, each once.

    Those on the recommended batches come first, those on tables that nobody has to use last.
    """
    found, warnings = sections(results, brief=brief), list(verification_warnings(results))
    for section in found:
        warnings += section.urgent_warnings()
    for section in reversed(found):
        warnings += section.warnings()
    return list(dict.fromkeys(warnings))


def next_steps(results: RunResults) -> Iterator[Fact]:
    """Pair each command, or file, with its purpose, in the order to take them."""
    for section in sections(results):
        yield from section.steps()
    yield f"batchtune report{results.as_argument} --full", "all tables (-o report.html: charts)"


def verdict_table(verdicts: Sequence[Verdict]) -> Table | None:
    """Lay out one row for each rule, the worst first; its first column holds the outcome. None without rules."""
    ordered = sorted(verdicts, key=lambda verdict: _WORST_FIRST[verdict.outcome])
    rows = [{"verdict": one.outcome, "fails if": one.rule, "found": one.message} for one in ordered]
    return make_table("Rules", rows) if rows else None


def verdict_sentence(verdicts: Sequence[Verdict]) -> str:
    """Say how the run stands up to all rules, in one sentence."""
    fails = sum(verdict.outcome == "fails" for verdict in verdicts)
    errors = sum(verdict.outcome == "error" for verdict in verdicts)
    if not fails and not errors:
        return "The rule holds." if len(verdicts) == 1 else f"All {len(verdicts)} rules hold."
    if len(verdicts) == 1:
        return "The rule fails." if fails else "The rule can't be judged."
    parts = [f"{fails} {'fails' if fails == 1 else 'fail'}"] if fails else []
    parts += [f"{errors} can't be judged"] if errors else []
    return f"Of {counted(len(verdicts), 'rule')}, {' and '.join(parts)}."


def drift_sentences(drift: Drift, row: Row | None = None) -> list[str]:
    """Say how far the other lengths are from those of the run, and what that costs with the recommended row."""
    examples = counted(drift.lengths.count, "example")
    if not drift.changed:
        return [f"The manifest has the same lengths as the run: {examples}."]
    beyond = f"{counted(drift.beyond, 'example')} {'is' if drift.beyond == 1 else 'are'}" if drift.beyond else "none is"
    times, tuned, anew = "", "the table costs", "a newly tuned one"
    if row is not None and row.pool_size is not None:
        tuned, anew = "the pools cost", "newly tuned ones of that size"
    if drift.epoch_seconds is not None and drift.retuned_epoch_seconds is not None:
        ours, retuned = format_seconds(drift.epoch_seconds), format_seconds(drift.retuned_epoch_seconds)
        times = f"{ours} against {retuned} an epoch, "
    return [
        f"The lengths of the manifest ({examples}) differ from those of the run: {beyond} beyond the last boundary.",
        f"On them {tuned} {format_percent(drift.stale)} more than {anew}: {times}"
        f"{drift.batches:,} batches against {drift.retuned_batches:,}.",
    ]


def _facts(results: RunResults) -> Iterator[Fact]:
    if results.lengths is not None:
        yield "Data", _describe_data(results.lengths)
    for section in reversed(sections(results)):  # what was measured before what was made of it
        yield from section.facts()
    if results.verification is not None:
        yield from verification_facts(results.verification)


def _describe_data(lengths: LengthsSummary) -> str:
    unit = lengths.unit
    examples = "1 example" if lengths.count == 1 else f"{format_number(lengths.count)} examples"
    spread = f"{format_length(lengths.min, unit)} to {format_length(lengths.max, unit)}"
    total = format_length(lengths.total, unit)
    truncated = f"; {format_number(lengths.truncated)} truncated (--truncate)" if lengths.truncated else ""
    if unit == "s" and lengths.total >= 60:
        total += f" ({format_seconds(lengths.total)})"
    return f"{examples} of {spread}, {total} in all{'' if unit else '; the unit is unknown'}{truncated}"
