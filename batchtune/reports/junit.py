"""The gate's verdicts as JUnit XML, which GitLab, Jenkins and what GitHub's actions offer read as test results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from batchtune.errors import without_commands
from batchtune.results import Verdict

_CLASS = "batchtune.report"
# What XML 1.0 can't hold, not even escaped (https://www.w3.org/TR/xml/#charsets), and control characters that it can.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(verdicts: Sequence[Verdict], name: str) -> str:
    """Return one test suite, one test case a rule: a failure where it fails, an error where it can't be judged.

    `time` is 0 throughout: rules take none, and the same verdicts give the same bytes.

    Args:
        verdicts: In the order to show them; their rules differ.
        name: Of the run.
    """
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(sum(verdict.outcome == "fails" for verdict in verdicts)),
        "errors": str(sum(verdict.outcome == "error" for verdict in verdicts)),
        "skipped": "0",
        "time": "0",
    }
    title = clean_xml(f"batchtune report: {name}")
    root = ElementTree.Element("testsuites", {"name": title, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": title, **counts})
    for verdict in verdicts:
        case = {"classname": _CLASS, "name": clean_xml(f"fails if {verdict.rule}"), "time": "0"}
        _fill(ElementTree.SubElement(suite, "testcase", case), verdict)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def clean_xml(text: str) -> str:
    """Return text without what XML can't hold, which becomes U+FFFD, or what GitHub would take for a command."""
    return _FORBIDDEN.sub("\ufffd", without_commands(text))


def _fill(case: ElementTree.Element, verdict: Verdict) -> None:
    message = clean_xml(verdict.message)
    if verdict.outcome == "holds":
        ElementTree.SubElement(case, "system-out").text = message
        return
    kind = "failure" if verdict.outcome == "fails" else "error"
    problem = ElementTree.SubElement(case, kind, {"message": message, "type": f"batchtune.{verdict.outcome}"})
    problem.text = clean_xml(f"fails if {verdict.rule}\n{verdict.message}")
