"""`batchtune report`: shows a run, and holds it to rules."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    Full,
    Json,
    ManifestOptions,
    Output,
    Quiet,
    RunFolder,
    expand,
    option,
)
from batchtune.errors import BatchtuneError, ResultError, UsageError, shortened

if TYPE_CHECKING:
    from batchtune.manifests import ReadOptions
    from batchtune.reports import RunResults
    from batchtune.reports.gate import Rule
    from batchtune.results import Drift

EXAMPLES = """
batchtune report
batchtune report --full
batchtune report --format html -o report.html
batchtune report --fail-if 'padding_ratio > 8%' --fail-if 'verify.holds == false' --junit-xml gate.xml
batchtune report new-run --baseline old-run --fail-if 'batches worse 2%'
batchtune report --manifest train-v2.csv --fail-if 'stale > 2%' --fail-if 'beyond > 0'
"""

_ENDINGS = {".md": "markdown", ".html": "html", ".htm": "html", ".json": "json"}
_GATE = "Gate"
_RULES_VARIABLE = "BATCHTUNE_FAIL_IF"
_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# GitHub shows no more annotations of one kind for a step.
_MOST_ANNOTATIONS = 10
_NONE = cast("list[str]", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLengths(ManifestOptions):
    """New lengths to compare with the run's, and how to read them; `--format` is the report's."""

    manifest: Annotated[
        list[str],
        option(
            "New lengths: show how far they have drifted from the run's, and what its table costs on them; can be "
            "repeated. They are read like the run's, except for the options below.",
            "MANIFEST",
            variable=None,
            show_default=False,
            rich_help_panel=_GATE,
        ),
    ] = _NONE
    format: Annotated[
        str | None,
        option(
            "terminal, markdown, html or json (default: by the ending of FILE, else terminal).",
            "FORMAT",
            variable="REPORT_FORMAT",
            values="batchtune.reports:FORMATS",
            rich_help_panel="Options",
        ),
    ] = None
    manifest_format: Annotated[
        str | None,
        option("Format of the manifest (default: detected from its content).", "FORMAT", variable="FORMAT"),
    ] = None

    def read_options(self) -> ReadOptions:
        """Return the options for reading that the user gave. Raises UsageError if one is invalid."""
        return replace(ManifestOptions.read_options(self), format=self.manifest_format)


@expand
def report(
    ctx: typer.Context,
    new: NewLengths,
    run: RunFolder = DEFAULT_RUN_FOLDER,
    output: Output = None,
    fail_if: Annotated[
        list[str] | None,
        option(
            "Fail if FIELD OP VALUE is true: 'padding_ratio > 8%', 'verify.holds == false', 'stale > 2%'; or, with "
            "--baseline, 'batches worse 2%'. FIELD is one of the recommended row in sweep.json, current.FIELD, "
            "bound.FIELD, verify.FIELD, stream.FIELD or shards.FIELD of stream.json, gpu_idle or loader.FIELD of "
            "loader.json, or with --manifest stale, beyond or changed. Can be repeated; in the environment, "
            "separate rules with ;.",
            "RULE",
            rich_help_panel=_GATE,
        ),
    ] = None,
    baseline: Annotated[
        Path | None, option("The run folder to compare with in rules with `worse`.", "RUN", rich_help_panel=_GATE)
    ] = None,
    junit_xml: Annotated[
        Path | None,
        option("Write the outcome of each rule as JUnit XML (- for stdout).", "FILE", rich_help_panel=_GATE),
    ] = None,
    github: Annotated[
        bool,
        option(
            "Append the report to the GitHub Actions step summary, and annotate rules that fail.",
            rich_help_panel=_GATE,
        ),
    ] = False,
    json: Json = False,
    full: Full = False,
    quiet: Quiet = False,
) -> None:
    """Show a run: what to set, what it saves. In CI: hold it to rules.

    Reads the run folder; writes nothing unless asked to. With --fail-if, judges and shows all rules. The exit code is 1
    if a rule can't be judged (an unknown field, a missing verify.json), otherwise 3 if one fails.
    """
    from batchtune.reports.gate import exit_code, not_judged, parse_rules
    from batchtune.reports.junit import render_junit

    report_format = _format_of(new.format, output, as_json=json)
    rules = parse_rules(_written_rules(ctx, fail_if))
    _check(rules, baseline, junit_xml, output, github=github, quiet=quiet)
    new.read_options()  # an invalid one is reported before anything is read
    inputs = tuple(new.manifest or ())
    if output is not None and str(output) != "-":
        console.refuse_overwriting(output, inputs)
    try:
        results = _judged(run, rules, baseline, new, quiet=quiet)
    except BatchtuneError as error:  # an older JUnit file must not stand for this run
        if github:
            _annotate([workflow_command("error", "batchtune: the run can't be read", error.message)])
        if junit_xml is not None:
            errors = render_junit(not_judged(rules, error.message), run.resolve().name or "run")
            console.write_result(errors, junit_xml, inputs=inputs)
        raise
    try:
        if junit_xml is not None:
            console.write_result(render_junit(results.verdicts, results.name), junit_xml, inputs=inputs)
        _show(results, report_format, output, full=full)
        if not quiet:
            console.warn_of_edited_configs(results)
        if github:
            _publish(results, Path(os.environ[_SUMMARY_VARIABLE]))
    finally:  # an error of writing must not hide a rule that fails
        for verdict in results.verdicts:
            if verdict.outcome != "holds":
                console.note(f"{verdict.outcome.capitalize()}: {verdict.rule}: {verdict.message}")
    if code := exit_code(results.verdicts):
        raise typer.Exit(code)


def _format_of(given: str | None, output: Path | None, *, as_json: bool) -> str:
    from batchtune.reports import FORMATS

    if as_json and given not in (None, "json"):
        raise UsageError(f"--json and --format {given} are two formats", "Give one of them.")
    if given is not None and given not in FORMATS:
        raise UsageError(f"unknown report format {shortened(given)}", f"Known formats: {', '.join(FORMATS)}.")
    if as_json:
        return "json"
    if given is None and output is not None:
        return _ENDINGS.get(output.suffix.lower(), "terminal")
    return given or "terminal"


def _written_rules(ctx: typer.Context, given: list[str] | None) -> list[str]:
    """Return the rules as the user wrote them; in the environment, `;` and line ends separate them, not spaces."""
    if getattr(ctx.get_parameter_source("fail_if"), "name", None) != "ENVIRONMENT":
        return given or []
    written = os.environ.get(_RULES_VARIABLE, "").replace("\n", ";").split(";")
    rules = [rule for rule in written if rule.strip()]
    if not rules:  # two empty variables put together would otherwise be an open gate
        raise UsageError(f"{_RULES_VARIABLE} is set, but holds no rule", "Unset it, or give it rules.")
    return rules


def _check(
    rules: Sequence[Rule], baseline: Path | None, junit: Path | None, output: Path | None, *, github: bool, quiet: bool
) -> None:
    """Warn of an option that does nothing. Raises UsageError for options that contradict each other."""
    if baseline is not None and all(rule.needs != "baseline" for rule in rules):
        unused = "Warning: no rule compares with --baseline. Add one, such as --fail-if 'batches worse 2%'."
        console.note(unused, quiet=quiet)
    if junit is not None and not rules:
        raise UsageError("--junit-xml needs rules: without one there is nothing to test", "Add --fail-if RULE.")
    same = junit is not None and output is not None and output.resolve() == junit.resolve()
    if same or (str(junit) == "-" and output is None):
        raise UsageError("--junit-xml and the report go to the same place", "Give -o or --junit-xml another file.")
    if github and not os.environ.get(_SUMMARY_VARIABLE):
        raise UsageError(
            f"--github needs ${_SUMMARY_VARIABLE}, which is not set: this is not a step of GitHub Actions",
            "Leave --github out here; --format markdown writes the same.",
        )


def _judged(
    folder: Path, rules: tuple[Rule, ...], baseline: Path | None, new: NewLengths, *, quiet: bool
) -> RunResults:
    """Return the run with its verdicts and drift; rules on a baseline or lengths that can't be read can't be judged."""
    from batchtune.reports import load_run
    from batchtune.reports.gate import judge
    from batchtune.reports.rule_fields import RuleInputs

    results = load_run(folder)
    needed = {rule.needs for rule in rules}
    missing: dict[str, str] = {}
    baseline_results = None
    drift = None
    try:
        if baseline is not None:
            baseline_results = _baseline(baseline)
    except BatchtuneError as error:
        if "baseline" not in needed:
            raise
        missing["baseline"] = error.message
    try:
        if new.manifest:
            drift = _drift(results, new, quiet=quiet)
    except BatchtuneError as error:
        if isinstance(error, UsageError) or "drift" not in needed:
            raise
        missing["drift"] = error.message
    inputs = RuleInputs(results=replace(results, drift=drift), baseline=baseline_results, missing=missing)
    return replace(inputs.results, verdicts=judge(rules, inputs))


def _baseline(folder: Path) -> RunResults:
    """Return the run to compare with; raise ResultError if it holds no result."""
    from batchtune.reports import load_run

    results = load_run(folder)
    if not any((results.sweep, results.stream, results.loader)):
        raise ResultError(
            f"the baseline {folder} has neither sweep.json nor stream.json nor loader.json",
            "Run `batchtune sweep-buckets`, `batchtune sweep-stream` or `batchtune tune-loader` there.",
        )
    return results


def _drift(results: RunResults, new: NewLengths, *, quiet: bool) -> Drift:
    """Read the new lengths as those of the run were, print what was read differently, and compare them."""
    from batchtune.buckets.drift import drift
    from batchtune.epochs.measured_costs import Costs, costs_of
    from batchtune.run_folder import lengths_of, read_differently

    sweep = results.sweep
    probe = results.probe
    folder = results.folder
    if sweep is None:
        alone = "" if results.stream is None else ": stream.json holds no distribution of lengths"
        raise ResultError(
            f"{folder} has no sweep.json to compare the new lengths with{alone}",
            "Run `batchtune sweep-buckets` first.",
        )
    lengths = new.load(quiet=quiet, as_in=folder)
    run_lengths = lengths_of(folder)
    console.describe(lengths, quiet=quiet)
    if lengths.reading is not None and run_lengths is not None and run_lengths.reading is not None:
        for _, text in read_differently(lengths.reading, run_lengths.reading):
            console.note(f"Warning: {text}.", quiet=quiet)
    if probe is not None and lengths.targets is None and any(point.target_length for point in probe.frontier):
        raise ResultError(
            "the run was tuned with target lengths, and the manifest was read without them",
            "Name their column with --target-key, or their file with --target-file.",
        )
    return drift(lengths, sweep, costs_of(probe) if probe is not None else Costs())


def _show(results: RunResults, report_format: str, output: Path | None, *, full: bool) -> None:
    if report_format == "terminal":
        if output is None or str(output) == "-":
            console.show(results, full=full)
            return
        from batchtune.reports.terminal import render as render_text

        text = render_text(results, full=full)
    elif report_format == "html":
        from batchtune.cli.export import tuned_run
        from batchtune.exports import configs_of
        from batchtune.reports import html

        text = html.render(results, configs_of(tuned_run(results)))
    else:
        from batchtune.reports import render

        text = render(report_format, results)
    console.write_result(text, output)


def _publish(results: RunResults, summary: Path) -> None:
    """Append the report to the summary of a step of GitHub Actions, and annotate rules that fail, and warnings."""
    from batchtune.files import unwritable
    from batchtune.reports.markdown import render
    from batchtune.reports.page import build_page

    try:
        with summary.open("a", encoding="utf-8") as stream:
            stream.write(render(results))
    except OSError as error:
        raise unwritable(summary, error) from error
    titles = {"fails": "batchtune: a rule fails", "error": "batchtune: a rule can't be judged"}
    failures = [
        workflow_command("error", titles[one.outcome], f"fails if {one.rule}: {one.message}")
        for one in results.verdicts
        if one.outcome in titles
    ]
    warnings = [workflow_command("warning", "batchtune", text) for text in build_page(results).warnings]
    _annotate(failures[:_MOST_ANNOTATIONS] + warnings[:_MOST_ANNOTATIONS])


def _annotate(commands: Sequence[str]) -> None:
    """Print commands to stderr, which GitHub reads too: stdout carries the result."""
    for command in commands:
        print(console.visible(command), file=sys.stderr, flush=True)


def workflow_command(kind: str, title: str, message: str) -> str:
    """Return a command to GitHub Actions, escaped as its toolkit does it.

    Source: https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts
    """

    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    title = escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{escaped(message)}"
