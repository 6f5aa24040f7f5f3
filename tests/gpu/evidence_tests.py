"""The parts of the evidence harness that run tests/gpu, one part a file; the next call runs the tests that are left."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gpu.conftest import DONE, REPORT
from gpu.evidence_bench import ROOT, Bench
from gpu.evidence_record import Missing

NOTHING_LEFT = 5  # pytest's exit code if it collected no test


def run_tests(bench: Bench, file: Path) -> None:
    """Runs a file of tests; a failure is named with where it was raised."""
    report = bench.out / f"{bench.part}.jsonl"
    earlier = read_report(report)
    pytest = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider"]
    options = [f"--rootdir={ROOT}", f"-c={ROOT / 'pyproject.toml'}"]
    environment = {REPORT: str(report.absolute()), DONE: "\n".join(earlier)}
    try:
        bench.run([*pytest, *options], {0, 1, NOTHING_LEFT}, **environment)
    except Missing as missing:
        bench.record.miss(str(missing))
    tests = read_report(report)
    bench.record.data["tests"] = tests
    counts = Counter(test["outcome"] for test in tests.values())
    shown = {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}
    bench.record.figure(
        f"tests that need a GPU, {file.name}",
        ", ".join(f"{count} {outcome}" for outcome, count in shown.items()),
        **shown,
        seconds=round(sum(test["seconds"] for test in tests.values()), 1),
    )
    for name, test in tests.items():
        if test["outcome"] == "failed":
            bench.record.miss(
                f"{name} failed in {test['raised_in']}: {test['message']}"
            )
    if not counts["passed"]:
        bench.record.miss("no test passed")


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """The tests that have run, by name; the last outcome counts. A line that a kill cut short is left out."""
    tests: dict[str, dict[str, Any]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            test = json.loads(line)
        except json.JSONDecodeError:
            continue
        tests[test["test"]] = test
    return tests
