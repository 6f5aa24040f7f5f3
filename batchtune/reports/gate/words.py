"""Verdicts and drift in words and a table, the same in every format."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.reports.gate.verdict import Verdict
from batchtune.reports.table import Column, Table
from batchtune.reports.words import format_percent
from batchtune.results import Drift
from batchtune.units import counted, format_seconds

_COLUMNS = (
    Column("verdict", numeric=False),
    Column("fails if", numeric=False, wraps=True),
    Column("found", numeric=False, wraps=True),
)
_WORST_FIRST = {"error": 0, "fails": 1, "holds": 2}


def verdict_sentence(verdicts: Sequence[Verdict]) -> str:
    """How the run stands up to all rules, in one sentence."""
    fails = sum(verdict.outcome == "fails" for verdict in verdicts)
    errors = sum(verdict.outcome == "error" for verdict in verdicts)
    if not fails and not errors:
        return "The rule holds." if len(verdicts) == 1 else f"All {len(verdicts)} rules hold."
    if len(verdicts) == 1:
        return "The rule fails." if fails else "The rule can't be told."
    parts = [f"{fails} {'fails' if fails == 1 else 'fail'}"] if fails else []
    parts += [f"{errors} can't be told"] if errors else []
    return f"Of {counted(len(verdicts), 'rule')}, {' and '.join(parts)}."


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """One row for each rule, what went wrong first; its first column holds the outcome's word."""
    ordered = sorted(verdicts, key=lambda verdict: _WORST_FIRST[verdict.outcome])
    return Table(
        title="Rules",
        columns=_COLUMNS,
        rows=tuple((verdict.outcome, verdict.rule, verdict.message) for verdict in ordered),
    )


def drift_sentences(drift: Drift) -> list[str]:
    """How far the other lengths are from those of the run, and what that costs."""
    if not drift.changed:
        return [f"The lengths of the manifest are those of the run: {counted(drift.lengths.count, 'example')}."]
    beyond = (
        f"{counted(drift.beyond, 'example')} {'is' if drift.beyond == 1 else 'are'} beyond the last boundary"
        if drift.beyond
        else "none is beyond the last boundary"
    )
    return [
        f"The lengths of the manifest ({counted(drift.lengths.count, 'example')}) are others than those of the run: "
        f"their distributions differ by {drift.distance:.3f} (Kolmogorov-Smirnov, to within 0.001), and {beyond}.",
        f"On them the table costs {format_percent(drift.stale)} more than one tuned anew: {_costs(drift)}.",
    ]


def _costs(drift: Drift) -> str:
    batches = f"{drift.batches:,} batches against {drift.retuned_batches:,}"
    if drift.epoch_seconds is None or drift.retuned_epoch_seconds is None:
        return batches
    times = f"{format_seconds(drift.epoch_seconds)} against {format_seconds(drift.retuned_epoch_seconds)} an epoch"
    return f"{times}, {batches}"
