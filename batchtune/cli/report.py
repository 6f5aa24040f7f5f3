"""`batchtune report`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from batchtune.cli.options import DEFAULT_RUN_FOLDER, Full, Json, ManifestOptions, expand, option

if TYPE_CHECKING:
    from batchtune.cli import gating
    from batchtune.lengths import Lengths
    from batchtune.manifests import ReadOptions
    from batchtune.reports import RunResults

EXAMPLE = """Examples:
batchtune report
batchtune report --full
batchtune report --format html -o report.html
batchtune report --fail-if 'padding_ratio > 8%' --fail-if 'verify.holds == false' --junit-xml gate.xml
batchtune report new-run --baseline old-run --fail-if 'batches worse 2%'
batchtune report --manifest train-v2.csv --fail-if 'stale > 2%' --fail-if 'beyond > 0'
"""

_ENDINGS = {".md": "markdown", ".html": "html", ".htm": "html", ".json": "json"}
_GATE = "Gate"
_NONE = cast("list[str]", ())
_OWN = "Options"


def _report_formats() -> list[str]:
    from batchtune.reports import FORMATS

    return list(FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLengths(ManifestOptions):
    """Other lengths to hold the run to, and how to read them; `--format` is the report's, as it always was."""

    manifest: Annotated[
        list[str],
        typer.Option(
            "--manifest",
            metavar="MANIFEST",
            help="New lengths: how far they have drifted from the run's, and what its table costs on them; can be "
            "repeated. Read as the run's were, but for the options below.",
            show_default=False,
            rich_help_panel=_GATE,
        ),
    ] = _NONE
    format: Annotated[
        str | None,
        option(
            "terminal, markdown, html or json; told from the ending of FILE unless given.",
            flag="--format",
            name="REPORT_FORMAT",
            metavar="FORMAT",
            values=_report_formats,
            panel=_OWN,
        ),
    ] = None
    manifest_format: Annotated[
        str | None,
        option("Format of the manifest; told from its content unless given.", name="FORMAT", metavar="FORMAT"),
    ] = None

    def read_options(self) -> ReadOptions:
        """What the user said. Raises UsageError where it has no meaning."""
        return replace(ManifestOptions.read_options(self), format=self.manifest_format)

    def load_and_tell(self, run: Path) -> Lengths:
        """Reads the lengths as those of the run were, and tells what was read and what was read otherwise."""
        from batchtune.cli import console
        from batchtune.tuning.run_folder import lengths_of, read_differently

        lengths, theirs = self.load_as_in(run, quiet=False), lengths_of(run)
        console.notes(console.describe(lengths), quiet=False)
        if lengths.reading is not None and theirs is not None and theirs.reading is not None:
            for _, text in read_differently(lengths.reading, theirs.reading):
                console.note(f"Warning: {text}.")
        return lengths


@expand
def report(
    ctx: typer.Context,
    new: NewLengths,
    run: Annotated[
        Path, typer.Argument(metavar="RUN", envvar="BATCHTUNE_RUN", show_envvar=False, help="The run folder.")
    ] = DEFAULT_RUN_FOLDER,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - is stdout.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        option(
            "What fails, as FIELD OP VALUE: 'padding_ratio > 8%', 'verify.holds == false', 'stale > 2%'; or, with "
            "--baseline, 'batches worse 2%'. A field is one of the recommended row in sweep.json, current.FIELD, "
            "bound.FIELD, verify.FIELD, or with --manifest drift, stale, beyond or changed. Can be repeated; in the "
            "environment, ; parts rules.",
            flag="--fail-if",
            name="FAIL_IF",
            metavar="RULE",
            panel=_GATE,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        option("The run folder that `worse` compares with.", name="BASELINE", metavar="RUN", panel=_GATE),
    ] = None,
    junit_xml: Annotated[
        Path | None,
        option(
            "Write what became of the rules as JUnit XML; - is stdout.", name="JUNIT_XML", metavar="FILE", panel=_GATE
        ),
    ] = None,
    github: Annotated[
        bool,
        option(
            "Append the report to the summary of a step of GitHub Actions, and annotate what fails.",
            flag="--github",
            name="GITHUB",
            panel=_GATE,
        ),
    ] = False,
    json: Json = False,
    full: Full = False,
) -> None:
    """Show a run: what to set, what it saves. In CI: hold it to rules.

    Reads the run folder; writes nothing unless told. With --fail-if, all rules are judged and shown; the exit code is 3
    where one fails, and 1 where one can't be told (a field that is not known, a missing verify.json), which goes first.
    """
    from batchtune.cli import console, gating
    from batchtune.reports.gate import exit_code, parse_rules

    report_format = _format_of(new.format, output, as_json=json)
    gate = gating.Gate(
        rules=parse_rules(gating.rules_from(ctx, "fail_if", fail_if)),
        baseline=baseline,
        load_lengths=(lambda: new.load_and_tell(run)) if new.manifest else None,
        junit=junit_xml,
        inputs=tuple(new.manifest or ()),
        github=github,
    )
    _check(gate, output)
    summary = gating.summary_file() if github else None
    new.read_options()  # a wrong one is told before anything is read
    if output is not None and str(output) != "-":
        console.refuse_overwriting(output, gate.inputs)
    results = gate.results_of(run)
    try:
        gate.write_junit(results.verdicts, results.name)
        _show(results, report_format, output, full=full)
        if summary is not None:
            gating.tell_github(results, summary)
    finally:  # what can't be written must not hide what fails
        gating.tell(results.verdicts)
    code = exit_code(results.verdicts)
    if code:
        raise typer.Exit(code)


def _format_of(given: str | None, output: Path | None, *, as_json: bool) -> str:
    from batchtune.errors import UsageError, shortened
    from batchtune.reports import FORMATS

    if as_json:
        if given not in (None, "json"):
            raise UsageError(f"--json and --format {given} are two formats", "Give one of them.")
        return "json"
    if given is None:
        given = _ENDINGS.get(output.suffix.lower(), "terminal") if output else "terminal"
    if given not in FORMATS:
        raise UsageError(f"{shortened(given)} is no report format", f"Known ones: {', '.join(FORMATS)}.")
    return given


def _check(gate: gating.Gate, output: Path | None) -> None:
    """Raises UsageError for options that contradict each other; warns of one that does nothing."""
    from batchtune.cli import console
    from batchtune.errors import UsageError

    if gate.baseline is not None and not any(rule.needs_baseline for rule in gate.rules):
        console.note("Warning: no rule compares with --baseline. Add one, such as --fail-if 'batches worse 2%'.")
    if gate.junit is None:
        return
    if not gate.rules:
        raise UsageError("--junit-xml needs rules: without one there is nothing to test", "Add --fail-if RULE.")
    same = output is not None and output.resolve() == gate.junit.resolve()
    if same or (str(gate.junit) == "-" and output is None):
        raise UsageError("--junit-xml and the report go to the same place", "Give -o or --junit-xml another file.")


def _show(results: RunResults, report_format: str, output: Path | None, *, full: bool) -> None:
    from batchtune.cli import console

    if report_format == "terminal":
        from batchtune.reports.terminal import render, render_terminal

        if output is None or str(output) == "-":
            render_terminal(results, console.result_console(), full=full)
        else:
            console.write_result(render(results, full=full), output)
    elif report_format == "html":
        from batchtune.reports.html import render as render_html

        console.write_result(render_html(results, _configs(results)), output)
    else:
        from batchtune.reports import render as render_other

        console.write_result(render_other(report_format, results), output)


def _configs(results: RunResults) -> dict[str, str]:
    """The recommendation in each framework's words; without those that can't express it."""
    from contextlib import suppress

    from batchtune.cli.export import tuned_run
    from batchtune.errors import ResultError
    from batchtune.exports import FRAMEWORKS, export_of
    from batchtune.exports.sampler import render_sampler_yaml, sampler_config
    from batchtune.results import SAMPLER_FILE

    configs: dict[str, str] = {}
    if results.sweep is None or results.sweep.recommended_row is None:
        return configs
    tuned = tuned_run(results.sweep, results.probe, results.folder)
    with suppress(ResultError):
        configs[SAMPLER_FILE] = render_sampler_yaml(sampler_config(results.sweep, results.probe))
    for name in FRAMEWORKS:
        framework = export_of(name)
        with suppress(ResultError):
            configs[framework.title] = framework.render(tuned)
    return configs
