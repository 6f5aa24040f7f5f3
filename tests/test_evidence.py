"""The harness that measures on a GPU works on the day: what it runs is there, and it goes on where it ended."""

import json

import pytest
from gpu import evidence
from gpu.conftest import passed_in
from gpu.evidence import PARTS, ROOT, Part

FOLDER = ROOT / "tests" / "gpu"


def test_the_first_parts_take_15_minutes_and_all_files_exist():
    first = ["calibration", "truth", "speech", "recipes"]
    assert list(PARTS)[:4] == first
    assert sum(PARTS[name].minutes for name in first) <= 15
    assert max(part.minutes for part in PARTS.values()) <= 7
    scripts = {
        word
        for part in PARTS.values()
        for word in part.command
        if word.startswith("tests/")
    }
    assert all((ROOT / script).is_file() for script in scripts)
    files = {f"tests/gpu/{path.name}" for path in FOLDER.glob("test_*.py")}
    assert files <= scripts


@pytest.mark.process
def test_the_next_call_runs_what_is_not_complete(tmp_path, monkeypatch, capsys):
    """The first part ends well, the second in its second call, and the third never in time."""
    in_second = (
        "import pathlib, sys; path = pathlib.Path(sys.argv[1])\n"
        "if path.exists(): sys.exit()\n"
        "path.touch(); sys.exit(3)"
    )
    marker = str(tmp_path / "called")
    parts = {
        "first": Part(("-c", "print('two', 'words')"), 1.0),
        "second": Part(("-c", in_second, marker), 1.0),
        "third": Part(("-c", "import time; time.sleep(1000)"), 0.0),
    }
    monkeypatch.setattr(evidence, "PARTS", parts)
    monkeypatch.setattr(evidence, "machine", lambda: "A GPU")
    out = ["--out", str(tmp_path / "out")]
    for expected in ("exit code 3", "complete"):
        assert evidence.main(out) == 1
        told = capsys.readouterr().out.splitlines()
        ends = ["first: complete", f"second: {expected}", "third: out of time"]
        assert [line for line in told if "at most" not in line][:3] == ends
    assert (tmp_path / "out" / "first.txt").read_text().count("two words") == 1
    assert evidence.main(["first", "second", *out]) == 0
    monkeypatch.setattr(evidence, "machine", lambda: "Another GPU")
    with pytest.raises(SystemExit, match="is of A GPU; this is Another GPU"):
        evidence.main(out)


def test_of_tests_those_are_left_that_have_not_passed(tmp_path):
    report = tmp_path / "report.jsonl"
    assert passed_in(report) == set()
    lines = [{"test": "passed", "failed": False}, {"test": "failed", "failed": True}]
    report.write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "cut')
    assert passed_in(report) == {"passed"}
