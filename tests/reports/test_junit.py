"""The gate's verdicts as JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.reports.gate import clean_xml, render_junit
from batchtune.results import Verdict

HOLDS = Verdict(
    rule="padding_ratio > 8%",
    outcome="holds",
    value=0.03,
    limit=0.08,
    message="padding_ratio is 3%",
)
FAILS = Verdict(
    rule="batches > 600",
    outcome="fails",
    value=634,
    limit=600.0,
    message="batches is 634, which is > 600",
)
ERROR = Verdict(
    rule="verify.holds == false",
    outcome="error",
    value=None,
    limit=False,
    message="no verify.json",
)


def parsed(*verdicts: Verdict, name: str = "run") -> ElementTree.Element:
    return ElementTree.fromstring(render_junit(verdicts, name).encode())


def test_counts_agree_with_the_cases() -> None:
    root = parsed(HOLDS, FAILS, ERROR)
    (suite,) = root
    for element in (root, suite):
        counts = {
            name: element.get(name)
            for name in ("tests", "failures", "errors", "skipped", "time")
        }
        assert counts == {
            "tests": "3",
            "failures": "1",
            "errors": "1",
            "skipped": "0",
            "time": "0",
        }
    assert [[child.tag for child in case] for case in suite] == [
        ["system-out"],
        ["failure"],
        ["error"],
    ]


def test_only_what_readers_of_junit_know_is_written() -> None:
    known = {
        "testsuites": {"name", "tests", "failures", "errors", "skipped", "time"},
        "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
        "testcase": {"classname", "name", "time"},
        "failure": {"message", "type"},
        "error": {"message", "type"},
        "system-out": set(),
    }
    for element in parsed(HOLDS, FAILS, ERROR).iter():
        assert set(element.attrib) == known[element.tag]


def test_a_failure_has_the_value_and_the_limit() -> None:
    failure = parsed(FAILS).find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.get("message") == "batches is 634, which is > 600"
    assert failure.text == "fails if batches > 600\nbatches is 634, which is > 600"


def test_cases_are_named_by_their_rules() -> None:
    names = [case.get("name") for case in parsed(HOLDS, FAILS).iter("testcase")]
    assert names == ["fails if padding_ratio > 8%", "fails if batches > 600"]


@given(st.text(max_size=40), st.sampled_from(["holds", "fails", "error"]))
@settings(deadline=None, max_examples=50)
def test_any_text_gives_well_formed_xml(text: str, outcome: str) -> None:
    verdict = Verdict(
        rule=f"batches > 1 {text}",
        outcome=outcome,
        value=1,
        limit=1.0,
        message=text,
    )  # type: ignore[arg-type]
    case = parsed(verdict, name=text).find("testsuite/testcase")
    assert case is not None
    assert case.get("name") == f"fails if batches > 1 {clean_xml(text)}"


def test_control_characters_are_replaced() -> None:
    assert (
        clean_xml("a\x00b\x1b[31mc\x7f\x9b\ufffe\ud800d\n")
        == "a\ufffdb\ufffd[31mc\ufffd\ufffd\ufffd\ufffdd\n"
    )
