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
_WORST_FIRST = ("error", "fails", "holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content; all strings are cleaned: one line, no control characters.

    Attributes:
        verdicts: The verdict on each rule, before all else; None without rules.
        lead: The first sentences, all that a brief report shows. The first of them is the title of everything.
        details: All other sentences.
        facts: Name and value of what was measured, where and how.
        tables: A brief report shows those that are `brief`.
        warnings: Each with its remedy.
        next_steps: A command or a file, and its purpose; only a brief report shows them.
    """

    title: str
    verdicts: Table | None = None
    lead: Sequence[str]
    details: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = ()
    next_steps: Sequence[Fact] = ()

    @property
    def summary(self) -> list[str]:
        """All sentences, most important first."""
        return [*self.lead, *self.details]


def clean_facts(facts: Iterable[Fact]) -> list[Fact]:
    """Clean each name and value."""
    return [(clean(name), clean(value)) for name, value in facts]


def sections(results: RunResults) -> list[Section[Any]]:
    """Return the sections on a run's results, the main one first."""
    made = []
    for name, section in SECTIONS.items():
        result = getattr(results, name)
        if result is not None:
            made.append(section(results, result))
    return made


def build_page(results: RunResults) -> Page:
    """Lay out a run's results."""
    lead, details = _sentences(results)
    return Page(
        title=clean(f"batchtune report: {results.name}"),
        verdicts=verdict_table(results.verdicts),
        lead=_cleaned(lead),
        details=_cleaned(details),
        facts=clean_facts(_facts(results)),
        tables=report_tables(results),
        warnings=_cleaned(warning_sentences(results)),
        next_steps=clean_facts(next_steps(results)),
    )


def build_verification_page(results: RunResults) -> Page:
    """Lay out a run's verification alone.

    Raises:
        ValueError: The run has not been verified.
    """
    verification = results.verification
    if verification is None:
        raise ValueError("this run has not been verified")
    facts = [
        ("Data", _describe_data(verification.lengths)),
        ("Device", describe_device(verification.device)),
        ("Workload", verification.workload.words),
        *verification_facts(verification),
    ]
    return Page(
        title=clean(f"batchtune verify: {results.name}"),
        lead=_cleaned(verification_sentences(verification)),
        facts=clean_facts(facts),
        tables=verification_tables(verification),
        warnings=_cleaned(verification_warnings(results)),
        next_steps=clean_facts(next_steps(results)),
    )


def summary_sentences(results: RunResults) -> list[str]:
    """Say what to set and what it saves, most important first; the same in every format.

    The first is a headline: short, and enough if there is room for only one sentence.
    """
    lead, details = _sentences(results)
    return lead + details


def _sentences(results: RunResults) -> tuple[list[str], list[str]]:
    """Return the sentences that a brief report shows, and all others.

    A section's first sentence says what to set: those of all sections precede what supports them.
    """
    headlines: list[str] = []
    support: list[str] = []
    details: list[str] = []
    for section in sections(results):
        sentences = list(section.sentences())
        count = section.leading_sentences
        headlines += sentences[: min(1, count)]
        rest = sentences[min(1, count) :]
        if section.title and not section.is_main:
            rest = [f"{section.title}: {sentence}" for sentence in rest]
        support += rest[: max(0, count - 1)]
        details += rest[max(0, count - 1) :]
    if results.drift is not None:
        headlines += drift_sentences(results.drift, results.sweep.recommended_row if results.sweep else None)
    verdicts = [verdict_sentence(results.verdicts)] if results.verdicts else []
    if results.verification is None:
        return verdicts + headlines + support, details
    verified = verification_sentences(results.verification)
    if results.verification.holds:
        return verdicts + headlines + verified + support, details
    return verdicts + verified, headlines + support + details


def report_tables(results: RunResults) -> list[Table]:
    """Lay out all that a run's results hold."""
    tables: list[Table] = []
    for section in sections(results):
        tables += section.tables()
    if results.verification is None:
        return tables
    if not results.verification.holds:  # what the recommended batches save is no news then
        tables = [replace(table, brief=False) for table in tables]
    return tables + verification_tables(results.verification)


def warning_sentences(results: RunResults) -> list[str]:
    """Return all warnings, each once: what was measured before what was made of it."""
    warnings = list(verification_warnings(results))
    for section in reversed(sections(results)):
        warnings += section.warnings()
    return list(dict.fromkeys(warnings))


def next_steps(results: RunResults) -> Iterator[Fact]:
    """Pair each command, or file, with its purpose, in the order to take them."""
    for section in sections(results):
        yield from section.steps()
    yield f"batchtune report{results.as_argument} --full", "all tables (-o report.html: charts)"


def verdict_table(verdicts: Sequence[Verdict]) -> Table | None:
    """Lay out one row for each rule, the worst first; its first column holds the outcome. None without rules."""
    ordered = sorted(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.outcome))
    rows = [{"verdict": verdict.outcome, "fails if": verdict.rule, "found": verdict.message} for verdict in ordered]
    return make_table("Rules", rows, names=["verdict"], texts=["fails if", "found"]) if rows else None


def verdict_sentence(verdicts: Sequence[Verdict]) -> str:
    """Say how the run stands up to all rules, in one sentence."""
    outcomes = [verdict.outcome for verdict in verdicts]
    fails = outcomes.count("fails")
    errors = outcomes.count("error")
    if len(verdicts) == 1:
        words = {"holds": "The rule holds.", "fails": "The rule fails.", "error": "The rule can't be judged."}
        return words[outcomes[0]]
    parts = []
    if fails:
        parts.append(f"{fails} {'fails' if fails == 1 else 'fail'}")
    if errors:
        parts.append(f"{errors} can't be judged")
    if not parts:
        return f"All {len(verdicts)} rules hold."
    return f"Of {counted(len(verdicts), 'rule')}, {' and '.join(parts)}."


def drift_sentences(drift: Drift, row: Row | None = None) -> list[str]:
    """Say how the other lengths differ from those of the run, and what that costs with the recommended row."""
    examples = counted(drift.lengths.count, "example")
    if not drift.changed:
        return [f"The manifest has the same lengths as the run: {examples}."]
    beyond = "none is"
    if drift.beyond:
        beyond = f"{counted(drift.beyond, 'example')} {'is' if drift.beyond == 1 else 'are'}"
    costs = "the table costs"
    retuned = "a newly tuned one"
    if row is not None and row.pool_size is not None:
        costs = "the pools cost"
        retuned = "newly tuned ones of that size"
    times = ""
    if drift.epoch_seconds is not None and drift.retuned_epoch_seconds is not None:
        times = (
            f"{format_seconds(drift.epoch_seconds)} against {format_seconds(drift.retuned_epoch_seconds)} an epoch, "
        )
    return [
        f"The lengths of the manifest ({examples}) differ from those of the run: {beyond} beyond the last boundary.",
        f"On them {costs} {format_percent(drift.stale)} more than {retuned}: {times}"
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
    total = format_length(lengths.total, unit)
    if unit == "s" and lengths.total >= 60:
        total += f" ({format_seconds(lengths.total)})"
    described = (
        f"{examples} of {format_length(lengths.min, unit)} to {format_length(lengths.max, unit)}, {total} in all"
    )
    if not unit:
        described += "; the unit is unknown"
    if lengths.truncated:
        described += f"; {format_number(lengths.truncated)} truncated (--truncate)"
    return described


def _cleaned(sentences: Iterable[str]) -> list[str]:
    return [clean(sentence) for sentence in sentences]
