"""A run's report as one JSON document: the summary, the warnings and the result files, whole."""

from __future__ import annotations

from typing import ClassVar

from batchtune.reports.page import build_page
from batchtune.reports.run import RunResults
from batchtune.results import (
    Drift,
    LoaderTuning,
    Probe,
    Result,
    StreamSweep,
    Sweep,
    Verdict,
    Verification,
    encode,
    meta_of,
)


class Report(Result, frozen=True, kw_only=True):
    """The document that `batchtune report --format json` writes."""

    FORMAT: ClassVar[str] = "batchtune/report"

    summary: list[str]
    warnings: tuple[str, ...] = ()
    probe: Probe | None
    sweep: Sweep | None
    verification: Verification | None = None
    verdicts: tuple[Verdict, ...] = ()
    drift: Drift | None = None
    stream: StreamSweep | None = None
    loader: LoaderTuning | None = None


def render(results: RunResults) -> str:
    """Return the report as JSON; the same results give the same bytes, wherever the run folder lies."""
    page = build_page(results)
    report = Report(
        meta=meta_of(Report),
        summary=page.summary,
        warnings=tuple(page.warnings),
        probe=results.probe,
        sweep=results.sweep,
        verification=results.verification,
        verdicts=results.verdicts,
        drift=results.drift,
        stream=results.stream,
        loader=results.loader,
    )
    return encode(report).decode()
