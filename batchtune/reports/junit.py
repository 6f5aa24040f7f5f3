"""The gate's verdicts as JUnit XML, which GitLab, Jenkins and GitHub's actions read as test results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from batchtune.errors import without_commands
from batchtune.results import Verdict

# Characters that XML 1.0 can't hold even escaped (https://www.w3.org/TR/xml/#charsets), and all control characters.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(verdicts: Sequence[Verdict], name: str) -> str:
    """Return one test suite, one test case a rule: a failure where it fails, an error where it can't be judged.

    `time` is 0 throughout: rules take none, and the same verdicts give the same bytes. Their rules differ.
    """
    found = Counter(verdict.outcome for verdict in verdicts)
    counts = {"tests": len(verdicts), "failures": found["fails"], "errors": found["error"], "skipped": 0, "time": 0}
    shared = {"name": clean_xml(f"batchtune report: {name}"), **{key: str(count) for key, count in counts.items()}}
    root = Element("testsuites", shared)
    suite = SubElement(root, "testsuite", shared)
    for verdict in verdicts:
        title = clean_xml(f"fails if {verdict.rule}")
        message = clean_xml(verdict.message)
        case = SubElement(suite, "testcase", {"classname": "batchtune.report", "name": title, "time": "0"})
        if verdict.outcome == "holds":
            SubElement(case, "system-out").text = message
        else:
            kind = "failure" if verdict.outcome == "fails" else "error"
            about = {"message": message, "type": f"batchtune.{verdict.outcome}"}
            SubElement(case, kind, about).text = f"{title}\n{message}"
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def clean_xml(text: str) -> str:
    """Return text without what XML can't hold, which becomes U+FFFD, or what GitHub would take for a command."""
    return _FORBIDDEN.sub("\ufffd", without_commands(text))
