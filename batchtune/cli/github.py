"""A report on GitHub Actions: the summary of a step, and annotations."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.cli import console
from batchtune.errors import UsageError

if TYPE_CHECKING:
    from batchtune.reports import RunResults

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# GitHub shows no more annotations of one kind for a step.
_MOST_ANNOTATIONS = 10


def summary_file() -> Path:
    """Return the file from which GitHub takes a step's summary. Raises UsageError outside of GitHub Actions."""
    name = os.environ.get(SUMMARY_VARIABLE)
    if not name:
        raise UsageError(
            f"--github needs ${SUMMARY_VARIABLE}, which is not set: this is not a step of GitHub Actions",
            "Leave --github out here; --format markdown writes the same.",
        )
    return Path(name)


def publish(results: RunResults, summary: Path) -> None:
    """Append the report to the step's summary, and annotate rules that fail, and warnings.

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
    titles = {"fails": "batchtune: a rule fails", "error": "batchtune: a rule can't be judged"}
    failures = [
        workflow_command("error", titles[one.outcome], f"fails if {one.rule}: {one.message}")
        for one in results.verdicts
        if one.outcome in titles
    ]
    warnings = [workflow_command("warning", "batchtune", text) for text in build_page(results).warnings]
    annotate(failures[:_MOST_ANNOTATIONS] + warnings[:_MOST_ANNOTATIONS])


def annotate(commands: Sequence[str]) -> None:
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
