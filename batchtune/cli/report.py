"""`batchtune report` and `export`: show a run, hold it to rules, and write its recommendation for other frameworks."""

from __future__ import annotations

import json as json_format
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import typer

from batchtune.cli import console
from batchtune.cli.app import is_from_environment
from batchtune.cli.options import (
    FULL,
    JSON,
    OUTPUT,
    QUIET,
    RUN_FOLDER,
    ManifestOptions,
    expand,
    option,
)
from batchtune.errors import BatchtuneError, ResultError, UsageError

if TYPE_CHECKING:
    from batchtune.exports import Tuned
    from batchtune.manifests import ReadOptions
    from batchtune.reports import RunResults
    from batchtune.reports.gate import Rule
    from batchtune.results import Drift

EXAMPLES = {
    "report": """
batchtune report
batchtune report --full
batchtune report --format html -o report.html
batchtune report --fail-if 'padding_ratio > 8%' --fail-if 'verify.holds == false' --junit-xml gate.xml
batchtune report new-run --baseline old-run --fail-if 'batches worse 2%'
batchtune report --manifest train-v2.csv --fail-if 'stale > 2%' --fail-if 'beyond > 0'
"""
}

_ENDINGS = {
    ".md": "markdown",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".txt": "terminal",
}
_GATE = "Gate"
_RULES_VARIABLE = "BATCHTUNE_FAIL_IF"
_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
_NONE = cast("list[str]", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLengths(ManifestOptions):
    """New lengths to compare with the run's, and how to read them; `--format` is the report's."""

    manifest: list[str] = option(
        "New lengths: show how far they have drifted from the run's, and what its table costs on them; can be "
        "repeated. Reads them like the run's, except for the options below.",
        "MANIFEST",
        variable=None,
        show_default=False,
        rich_help_panel=_GATE,
        default=_NONE,
    )
    format: Literal["terminal", "markdown", "html", "json"] | None = option(
        "terminal, markdown, html or json (default: by the ending of FILE, else terminal). Environment variable: "
        "BATCHTUNE_REPORT_FORMAT.",
        "FORMAT",
        variable="REPORT_FORMAT",
        rich_help_panel="Options",
    )
    manifest_format: str | None = option(
        "Format of the manifest (default: detected from its content). Environment variable: BATCHTUNE_FORMAT.",
        "FORMAT",
        variable="FORMAT",
    )

    def read_options(self) -> ReadOptions:
        """Return the options for reading that the user gave. Raises UsageError if one is invalid."""
        from msgspec import structs

        options = ManifestOptions.read_options(self)
        return structs.replace(options, format=self.manifest_format)


@expand
def report(
    ctx: typer.Context,
    new: NewLengths,
    run: Path = RUN_FOLDER,
    output: Path | None = OUTPUT,
    fail_if: list[str] | None = option(
        "Fail if FIELD OP VALUE is true: 'padding_ratio > 8%', 'verify.holds == false', 'stale > 2%'; or, with "
        "--baseline, 'batches worse 2%'. FIELD is a field of the recommended row in sweep.json, current.FIELD, "
        "bound.FIELD, verify.FIELD, stream.FIELD or shards.FIELD of stream.json, gpu_idle or loader.FIELD of "
        "loader.json, or with --manifest stale, beyond or changed. In a run with --max-tokens, these judge the "
        "best padded batches, and packed.FIELD judges the packing. Can be repeated; in the environment, separate "
        "rules with ;.",
        "RULE",
        rich_help_panel=_GATE,
    ),
    baseline: Path | None = option(
        "The run folder to compare with in rules with `worse`.",
        "RUN",
        rich_help_panel=_GATE,
    ),
    junit_xml: Path | None = option(
        "Write the outcome of each rule as JUnit XML (- for stdout).",
        "FILE",
        rich_help_panel=_GATE,
    ),
    github: bool = option(
        "Append the report to the GitHub Actions step summary, and annotate rules that fail.",
        rich_help_panel=_GATE,
        default=False,
    ),
    json: bool = JSON,
    full: bool = FULL,
    quiet: bool = QUIET,
) -> None:
    """Show a run: what to set, what it saves. In CI: hold it to rules.

    Reads the run folder; writes nothing unless asked to. With --fail-if, judges and shows all rules. The exit code is 1
    if a rule can't be judged (an unknown field, a missing verify.json), otherwise 3 if one fails.
    """
    from batchtune.reports.gate import exit_code, not_judged, parse_rules, render_junit

    output = console.file_of(output)
    report_format = _format_of(new.format, output, as_json=json)
    rules = parse_rules(_written_rules(ctx, fail_if))
    summary = os.environ.get(_SUMMARY_VARIABLE)
    if github and not summary:
        raise UsageError(
            f"--github needs ${_SUMMARY_VARIABLE}, which is not set: this is not a step of GitHub Actions",
            "Leave --github out here; --format markdown writes the same.",
        )
    new.read_options()  # an invalid one is reported before anything is read
    _check(rules, junit_xml, output)
    inputs = tuple(new.manifest)
    if output is not None:
        console.refuse_overwriting(output, inputs)
    try:
        results = _judged(run, rules, baseline, new, quiet=quiet)
    except BatchtuneError as error:  # an older JUnit file must not stand for this run
        if junit_xml is not None:
            errors = render_junit(
                not_judged(rules, error.message), run.resolve().name or "run"
            )
            console.write_result(errors, junit_xml, inputs=inputs, quiet=quiet)
        raise
    try:
        if junit_xml is not None:
            console.write_result(
                render_junit(results.verdicts, results.name),
                junit_xml,
                inputs=inputs,
                quiet=quiet,
            )
        _show(results, report_format, output, full=full, quiet=quiet)
        if github and summary:
            _publish(results, Path(summary))
    finally:  # an error of writing must not hide a rule that fails
        for verdict in results.verdicts:
            if verdict.outcome != "holds":
                console.note(
                    f"{verdict.outcome.capitalize()}: {verdict.rule}: {verdict.message}"
                )
    if code := exit_code(results.verdicts):
        raise typer.Exit(code)


def _format_of(given: str | None, output: Path | None, *, as_json: bool) -> str:
    """Return the format by option or by the ending of the file. Raises UsageError if that names none."""
    if as_json:
        return "json"
    if given is not None:
        return given
    if output is None:
        return "terminal"
    if output.suffix.lower() not in _ENDINGS:
        endings = ", ".join(_ENDINGS)
        raise UsageError(
            f"the ending of {output} names no report format",
            f"End it in {endings}, or give --format.",
        )
    return _ENDINGS[output.suffix.lower()]


def _written_rules(ctx: typer.Context, given: list[str] | None) -> list[str]:
    """Return the rules as the user wrote them; in the environment, `;` and line ends separate them, not spaces."""
    if is_from_environment(ctx, "fail_if"):
        # An empty rule is an error.
        return re.split(r"[;\n]+", os.environ[_RULES_VARIABLE].strip("; \n"))
    return given or []


def _check(rules: Sequence[Rule], junit: Path | None, output: Path | None) -> None:
    """Raise UsageError for options that contradict each other."""
    if junit is not None and not rules:
        raise UsageError(
            "--junit-xml needs rules: without one there is nothing to test",
            "Add --fail-if RULE.",
        )
    if junit is not None and junit.resolve() == (output or Path("-")).resolve():
        raise UsageError(
            "--junit-xml and the report go to the same place",
            "Give -o or --junit-xml another file.",
        )


def _judged(
    folder: Path,
    rules: Sequence[Rule],
    baseline: Path | None,
    new: NewLengths,
    *,
    quiet: bool,
) -> RunResults:
    """Return the run with its verdicts and drift."""
    from batchtune.reports import load_run
    from batchtune.reports.gate import RuleInputs, judge

    results = load_run(folder)
    _warn_of_configs(folder, results, quiet=quiet)
    if new.manifest:
        results = replace(results, drift=_drift(results, new, quiet=quiet))
    compared = load_run(baseline) if baseline is not None else None
    return replace(
        results, verdicts=judge(rules, RuleInputs(results=results, baseline=compared))
    )


def _drift(results: RunResults, new: NewLengths, *, quiet: bool) -> Drift:
    """Read the new lengths as those of the run, unless options say otherwise, and compare them."""
    from batchtune.buckets.sweep import drift
    from batchtune.epochs.measured_costs import Costs, costs_of

    sweep = results.sweep
    probe = results.probe
    if sweep is None:
        raise ResultError(
            f"{results.folder} has no sweep.json to compare the new lengths with",
            "Run `batchtune sweep-buckets` first.",
        )
    lengths = new.load(quiet=quiet, as_in=results.folder)
    if (
        probe is not None
        and not lengths.has_targets
        and any(point.target_length for point in probe.frontier)
    ):
        raise ResultError(
            "the run was tuned with target lengths, and the manifest was read without them",
            "Name their column with --target-key, or their file with --target-file.",
        )
    return drift(lengths, sweep, costs_of(probe) if probe is not None else Costs())


def _show(
    results: RunResults,
    report_format: str,
    output: Path | None,
    *,
    full: bool,
    quiet: bool,
) -> None:
    if report_format == "terminal" and output is None:
        console.show(results, full=full)
        return
    if report_format == "terminal":
        from batchtune.reports.terminal import render as render_text

        text = render_text(results, full=full)
    elif report_format == "html":
        from batchtune.exports import configs_of
        from batchtune.reports import html

        text = html.render(results, configs_of(tuned_run(results)))
        missing = html.missing_charts(results)
        if missing is not None:
            console.note(f"Warning: {missing}")
    else:
        from batchtune.reports import render

        text = render(report_format, results)
    console.write_result(text, output, quiet=quiet)


def _publish(results: RunResults, summary: Path) -> None:
    """Append the report to the summary of a step of GitHub Actions, and annotate rules that do not hold."""
    from batchtune.reports.markdown import render

    with summary.open("a", encoding="utf-8") as stream:
        stream.write(render(results))
    for verdict in results.verdicts:
        # On stderr, which GitHub reads too: stdout carries the result.
        if verdict.outcome != "holds":
            print(
                console.visible(annotation(f"{verdict.rule}: {verdict.message}")),
                file=sys.stderr,
                flush=True,
            )


def annotation(message: str) -> str:
    """Return a command that makes GitHub Actions show an error, escaped as its toolkit does it.

    Source: https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts
    """
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::error title=batchtune::{escaped}"


EXAMPLES |= {
    "export": """
batchtune export --to espnet
batchtune export my-run --to lightning -o batches.py
batchtune export --to speechbrain
"""
}


@expand
def export(
    run: Path = RUN_FOLDER,
    to: str | None = option("The framework; --list shows all.", "FRAMEWORK"),
    output: Path | None = OUTPUT,
    list_known: bool = option(
        "List the frameworks.", None, "--list", variable=None, default=False
    ),
    quiet: bool = QUIET,
    json: bool = JSON,
) -> None:
    """Write the recommendation as a config for another framework."""
    from batchtune.exports import FRAMEWORKS, export_of
    from batchtune.reports import load_run
    from batchtune.results import Exported, meta_of

    if list_known:
        console.write_result(_listed(as_json=json), None)
        return
    if to is None:
        raise UsageError(
            "no framework to export to",
            f"Name it with --to. Known frameworks: {', '.join(FRAMEWORKS)}.",
        )
    framework = export_of(to)
    results = load_run(run)
    tuned = tuned_run(results)
    _warn_of_configs(run, results, quiet=quiet)
    if (
        tuned.sweep is not None
        and tuned.sweep.proof is not None
        and not tuned.sweep.proof.holds
    ):
        console.note(
            f"Warning: the recommended batches are not proven: {tuned.sweep.proof.reason}.",
            quiet=quiet,
        )
    text = framework.render(tuned)
    output = console.file_of(output)
    if output is not None or not json:
        console.write_result(text, output, quiet=quiet)
    if json:
        # Perhaps not UTF-8.
        file = str(output or framework.file).encode(errors="backslashreplace").decode()
        exported = Exported(
            meta=meta_of(Exported),
            framework=framework.name,
            title=framework.title,
            file=file,
            content=text,
        )
        console.write_json(exported)


def _warn_of_configs(folder: Path, results: RunResults, *, quiet: bool) -> None:
    """Warn of a recommended config that is missing or damaged, which samplers would refuse."""
    from batchtune.configs import read_any_sampler_yaml, read_stream_yaml

    readers = (
        (results.sweep, read_any_sampler_yaml, "sampler.yaml"),
        (results.stream, read_stream_yaml, "stream.yaml"),
    )
    for swept, read, name in readers:
        if swept is None or swept.recommends_nothing:
            continue
        try:
            read(folder / name)
        except ResultError as error:
            console.note(f"Warning: {error.message}. {error.hint}", quiet=quiet)


def tuned_run(results: RunResults) -> Tuned:
    """Return a run as exports need it; paths are relative to the working folder if the run is in it."""
    from batchtune.exports import Tuned

    here = Path.cwd()
    folder = results.folder
    if folder.is_relative_to(here):
        folder = folder.relative_to(here)
    return Tuned(
        sweep=results.sweep,
        stream=results.stream,
        probe=results.probe,
        loader=results.loader,
        config=(folder / "sampler.yaml").as_posix(),
        stream_config=(folder / "stream.yaml").as_posix(),
    )


def _listed(*, as_json: bool) -> str:
    from batchtune.exports import FRAMEWORKS, export_of

    known = [export_of(name) for name in FRAMEWORKS]
    if as_json:
        listed = [
            {
                "framework": framework.name,
                "title": framework.title,
                "file": framework.file,
            }
            for framework in known
        ]
        return json_format.dumps(listed, indent=2, ensure_ascii=False)
    return "\n".join(f"{framework.name:<20}{framework.title}" for framework in known)
