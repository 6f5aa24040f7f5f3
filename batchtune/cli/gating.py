"""The gate of `batchtune report`: gathers what rules need, and tells what became of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchtune.cli import console
from batchtune.errors import BatchtuneError, UsageError

if TYPE_CHECKING:
    from batchtune.lengths import Lengths
    from batchtune.reports import RunResults
    from batchtune.reports.gate import Rule
    from batchtune.results import Drift, Sweep, Verdict

RULES_VARIABLE = "BATCHTUNE_FAIL_IF"
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# GitHub shows no more annotations of one kind for a step.
_MOST_ANNOTATIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What to hold a run to.

    Attributes:
        rules: All of them count.
        baseline: The folder of the run that `worse` compares with.
        load_lengths: Reads the lengths that drift is measured on; None where none are given.
        junit: Where the verdicts go as JUnit XML; `-` is stdout.
        inputs: Files that are read, and must not be overwritten.
        github: Whether to annotate what does not hold.
    """

    rules: tuple[Rule, ...]
    baseline: Path | None
    load_lengths: Callable[[], Lengths] | None
    junit: Path | None
    inputs: tuple[str, ...] = ()
    github: bool = False

    def results_of(self, folder: Path) -> RunResults:
        """Reads a run and judges it.

        Where the run itself can't be read, JUnit still tells that of each rule: an older file must not stand for it.

        Raises:
            BatchtuneError: The run can't be read; or the baseline or the lengths can't, and no rule needs them.
        """
        from batchtune.reports import load_run
        from batchtune.reports.gate import not_judged

        try:
            return _judged(load_run(folder), folder, self)
        except BatchtuneError as error:
            verdicts = not_judged(self.rules, error.message)
            if self.github:
                annotate([workflow_command("error", "batchtune: the run can't be read", error.message)])
            self.write_junit(verdicts, folder.resolve().name or "run")
            raise

    def write_junit(self, verdicts: Sequence[Verdict], name: str) -> None:
        """Writes the verdicts where that was asked for. Raises ResultError where the file can't be written."""
        from batchtune.reports.junit import render_junit

        if self.junit is not None:
            console.write_result(render_junit(verdicts, name), self.junit, inputs=self.inputs)


def rules_from(ctx: typer.Context, name: str, given: list[str] | None) -> list[str]:
    """The rules as the user wrote them; in the environment, `;` and line ends part them, not spaces."""
    if getattr(ctx.get_parameter_source(name), "name", None) != "ENVIRONMENT":
        return given or []
    written = os.environ.get(RULES_VARIABLE, "").replace("\n", ";").split(";")
    rules = [rule for rule in written if rule.strip()]
    if not rules:  # two empty variables put together would else be a gate that is open
        raise UsageError(f"{RULES_VARIABLE} is set, but holds no rule", "Unset it, or give it rules.")
    return rules


def tell(verdicts: Sequence[Verdict]) -> None:
    """What does not hold, on stderr, a line each."""
    words = {"fails": "Fails", "error": "Error"}
    for verdict in verdicts:
        if verdict.outcome in words:
            console.note(f"{words[verdict.outcome]}: {verdict.rule}: {verdict.message}")


def summary_file() -> Path:
    """Where GitHub takes a step's summary from. Raises UsageError where it does not say."""
    name = os.environ.get(SUMMARY_VARIABLE)
    if not name:
        raise UsageError(
            f"--github needs ${SUMMARY_VARIABLE}, which is not set: this is no step of GitHub Actions",
            "Leave --github out here; --format markdown writes the same.",
        )
    return Path(name)


def tell_github(results: RunResults, summary: Path) -> None:
    """Appends the report to the step's summary, and has GitHub annotate what does not hold, and warnings.

    The commands go to stderr, where GitHub reads them too: stdout carries the result.

    Raises:
        ResultError: The summary can't be written.
    """
    from batchtune.files import unwritable
    from batchtune.reports.markdown import render
    from batchtune.reports.page import build_page

    try:
        with summary.open("a", encoding="utf-8") as stream:
            stream.write(render(results))
    except OSError as error:
        raise unwritable(summary, error) from error
    titles = {"fails": "batchtune: a rule fails", "error": "batchtune: a rule can't be told"}
    commands = [
        workflow_command("error", titles[verdict.outcome], f"fails if {verdict.rule}: {verdict.message}")
        for verdict in results.verdicts
        if verdict.outcome in titles
    ]
    warnings = [workflow_command("warning", "batchtune", text) for text in build_page(results).warnings]
    annotate(commands[:_MOST_ANNOTATIONS] + warnings[:_MOST_ANNOTATIONS])


def annotate(commands: Sequence[str]) -> None:
    """Has GitHub annotate; it reads stderr too."""
    for command in commands:
        print(console.visible(command), file=sys.stderr, flush=True)


def workflow_command(kind: str, title: str, message: str) -> str:
    """A command to GitHub Actions, escaped as its toolkit does it.

    Source: https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts
    """
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    escaped = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    escaped = escaped.replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={escaped}::{text}"


def _judged(results: RunResults, folder: Path, gate: Gate) -> RunResults:
    """The run with its verdicts and drift."""
    from batchtune.reports.gate import RuleInputs, judge

    missing: dict[str, str] = {}
    baseline = drift = None
    try:
        baseline = _baseline(gate.baseline)
    except BatchtuneError as error:
        if not any(rule.needs_baseline for rule in gate.rules):
            raise
        missing["baseline"] = error.message
    try:
        drift = _drift(results, folder, gate.load_lengths)
    except UsageError:
        raise
    except BatchtuneError as error:
        if not any(rule.needs_drift for rule in gate.rules):
            raise
        missing["drift"] = error.message
    inputs = RuleInputs(
        sweep=results.sweep, verification=results.verification, baseline=baseline, drift=drift, missing=missing
    )
    return replace(results, verdicts=judge(gate.rules, inputs), drift=drift)


def _baseline(folder: Path | None) -> Sweep | None:
    from batchtune.errors import ResultError
    from batchtune.reports import load_run

    if folder is None:
        return None
    sweep = load_run(folder).sweep
    if sweep is None:
        raise ResultError(f"the baseline {folder} has no sweep.json", "Run `batchtune sweep-buckets` there.")
    return sweep


def _drift(results: RunResults, folder: Path, load_lengths: Callable[[], Lengths] | None) -> Drift | None:
    from batchtune.errors import ResultError

    if load_lengths is None:
        return None
    if results.sweep is None:
        raise ResultError(
            f"{folder} has no sweep.json that other lengths could be held to", "Run `batchtune sweep-buckets` first."
        )
    lengths = load_lengths()
    from batchtune.tuning.costs import Costs, costs_of
    from batchtune.tuning.drift import drift

    probe = results.probe
    if probe is not None and lengths.targets is None and any(point.target_length for point in probe.frontier):
        raise ResultError(
            "the run was tuned with target lengths, and the manifest is read without",
            "Name their column with --target-key, or their file with --target-file.",
        )
    return drift(lengths, results.sweep, costs_of(probe) if probe is not None else Costs())
