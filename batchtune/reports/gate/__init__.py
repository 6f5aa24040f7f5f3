"""The CI gate: rules that a run is held to, and what becomes of them."""

from batchtune.reports.gate.judging import RuleInputs, exit_code, judge, not_judged
from batchtune.reports.gate.rules import Rule, parse_rules

__all__ = ["Rule", "RuleInputs", "exit_code", "judge", "not_judged", "parse_rules"]
