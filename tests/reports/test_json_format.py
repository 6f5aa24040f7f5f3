"""The report as JSON."""

import json
from dataclasses import replace

from report_records import made_probe, made_sweep, made_verification, rule_inputs

from batchtune.reports import RunResults
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import Report, build_page, render
from batchtune.results import read_result

RESULTS = RunResults(
    name="run",
    probe=made_probe(),
    sweep=made_sweep(),
    verification=made_verification(),
    verdicts=judge(
        parse_rules(["batches > 1", "padding_ratio > 8%", "batchs > 1"]),
        rule_inputs(sweep=made_sweep()),
    ),
)


def test_the_document_is_read_back_as_the_same_records(tmp_path):
    (tmp_path / "report.json").write_text(render(RESULTS), encoding="utf-8")
    report = read_result(tmp_path / "report.json", Report)
    for name in ("probe", "sweep", "verification", "verdicts"):
        assert getattr(report, name) == getattr(RESULTS, name)


def test_meta_comes_first_then_the_summary_of_the_other_formats():
    (_, meta), summary, warnings, *_ = json.loads(render(RESULTS)).items()
    assert (meta["format"], meta["version"]) == ("batchtune/report", 1)
    page = build_page(RESULTS)
    assert summary == ("summary", page.summary)
    assert warnings == ("warnings", page.warnings)


def test_the_bytes_do_not_depend_on_where_the_run_lies():
    assert render(replace(RESULTS, name="elsewhere")) == render(RESULTS)
