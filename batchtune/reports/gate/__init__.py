"""The CI gate: rules that a run is held to. Pure functions over the records; nothing here reads, writes or prints."""

from __future__ import annotations

from batchtune.reports.gate.evidence import Evidence
from batchtune.reports.gate.grammar import DRIFT_FIELDS, Rule, parse_rules
from batchtune.reports.gate.judging import exit_code, judge, not_judged
from batchtune.reports.gate.verdict import Verdict

__all__ = ["DRIFT_FIELDS", "Evidence", "Rule", "Verdict", "exit_code", "judge", "not_judged", "parse_rules"]
