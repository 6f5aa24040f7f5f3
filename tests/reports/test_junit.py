"""The gate's verdicts as JUnit XML."""

from xml.etree import ElementTree

from hypothesis import given
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


def test_the_file_is_what_readers_of_junit_know():
    assert (
        render_junit((HOLDS, FAILS, ERROR), "run")
        == """\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="batchtune report: run" tests="3" failures="1" errors="1" skipped="0" time="0">
  <testsuite name="batchtune report: run" tests="3" failures="1" errors="1" skipped="0" time="0">
    <testcase classname="batchtune.report" name="fails if padding_ratio &gt; 8%" time="0">
      <system-out>padding_ratio is 3%</system-out>
    </testcase>
    <testcase classname="batchtune.report" name="fails if batches &gt; 600" time="0">
      <failure message="batches is 634, which is &gt; 600" type="batchtune.fails">fails if batches &gt; 600
batches is 634, which is &gt; 600</failure>
    </testcase>
    <testcase classname="batchtune.report" name="fails if verify.holds == false" time="0">
      <error message="no verify.json" type="batchtune.error">fails if verify.holds == false
no verify.json</error>
    </testcase>
  </testsuite>
</testsuites>
"""
    )


@given(st.text(max_size=40), st.sampled_from(["holds", "fails", "error"]))
def test_any_text_gives_well_formed_xml(text, outcome):
    verdict = Verdict(
        rule=f"batches > 1 {text}",
        outcome=outcome,
        value=1,
        limit=1.0,
        message=text,
    )
    root = ElementTree.fromstring(render_junit([verdict], text).encode())
    case = root.find("testsuite/testcase")
    assert case.get("name") == f"fails if batches > 1 {clean_xml(text)}"


def test_control_characters_are_replaced():
    assert (
        clean_xml("a\x00b\x1b[31mc\x7f\x9b\ufffe\ud800d\n")
        == "a\ufffdb\ufffd[31mc\ufffd\ufffd\ufffd\ufffdd\n"
    )
