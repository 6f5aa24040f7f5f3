"""`batchtune report` as the gate of a CI."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from cli.conftest import contents, run_here, write_lengths

SWEEP = ("--max-batch-length", 60, "--num-buckets", "2:4")
SECONDS = [1 + number % 17 for number in range(900)]
HOLDS, FAILS, UNKNOWN = "padding_ratio > 90%", "batches > 1", "verify.holds == false"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A run folder with a sweep, and the manifest beside it."""
    folder = tmp_path_factory.mktemp("swept")
    manifest = write_lengths(folder / "train.csv", SECONDS)
    run_here("sweep-buckets", manifest, *SWEEP, "--run", folder / "run", code=0)
    return folder / "run"


@pytest.fixture(autouse=True)
def not_on_github(monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def given(rules):
    """The options of a command line that give these rules."""
    return [word for rule in rules for word in ("--fail-if", rule)]


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([HOLDS], 0),
        ([HOLDS, FAILS], 3),
        ([FAILS, UNKNOWN], 1),
        (["batchs > 1", HOLDS], 1),
    ],
)
def test_the_exit_code_says_what_became_of_the_rules(
    batchtune, swept, tmp_path, rules, code
):
    ran = batchtune(
        "report", swept, *given(rules), "--junit-xml", "sub/gate.xml", code=code
    )
    cases = ElementTree.parse(tmp_path / "sub" / "gate.xml").iter("testcase")
    names = [case.get("name") for case in cases]
    assert names == [f"fails if {rule}" for rule in rules]
    assert all(rule in ran.stdout for rule in rules)
    told = re.findall("^(Fails|Error):", ran.stderr, re.MULTILINE)
    assert len(told) == len(rules) - rules.count(HOLDS)


def test_rules_are_taken_from_the_environment(batchtune, succeed, swept):
    env = {"BATCHTUNE_FAIL_IF": f"{HOLDS}; {FAILS}\n fill < 0"}
    ran = batchtune("report", swept, "--format", "json", env=env, code=3)
    verdicts = json.loads(ran.stdout)["verdicts"]
    assert [verdict["rule"] for verdict in verdicts] == [HOLDS, FAILS, "fill < 0"]
    succeed("report", swept, "--fail-if", HOLDS, env=env)


def test_a_quiet_report_prints_nothing_but_itself(batchtune, swept, tmp_path):
    write_lengths(tmp_path / "new.csv", [2 * length for length in SECONDS])
    loud = batchtune("report", swept, "--manifest", "new.csv")
    quiet = batchtune("report", swept, "--manifest", "new.csv", "-q")
    assert quiet.stdout == loud.stdout
    assert loud.stderr
    assert not quiet.stderr


def test_a_run_is_compared_with_a_baseline(batchtune, succeed, swept, tmp_path):
    gate = ("--baseline", swept, "--fail-if", "batches worse 0%")
    succeed("report", swept, *gate)
    write_lengths(tmp_path / "shorter.csv", [length / 2 for length in SECONDS])
    batchtune("sweep-buckets", "shorter.csv", *SWEEP, "--run", "other")
    gate = ("--baseline", "other", "--fail-if", "batches worse 2%")
    ran = batchtune("report", swept, *gate, code=3)
    said = r"batches is \d+, and \d+ in the baseline \(of other lengths\): worse by more than 2%"
    assert re.search(said, ran.stderr)


@pytest.mark.parametrize(
    ("run", "words"), [("gone", "does not exist"), ("damaged", "rows[1].batches: must")]
)
def test_for_an_unreadable_run_junit_has_an_error_for_each_rule(
    batchtune, swept, tmp_path, run, words
):
    damaged = shutil.copytree(swept, tmp_path / "damaged") / "sweep.json"
    sweep = json.loads(damaged.read_text())
    sweep["rows"][1]["batches"] = -1
    damaged.write_text(json.dumps(sweep))
    (tmp_path / "gate.xml").write_text("an older one")
    rule = ("--fail-if", HOLDS, "--junit-xml", "gate.xml")
    ran = batchtune("report", run, *rule, code=1)
    assert (words in ran.stderr, ran.stdout) == (True, "")
    assert ElementTree.parse(tmp_path / "gate.xml").getroot().get("errors") == "1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--junit-xml", "gate.xml"], "--junit-xml needs rules"),
        (["--fail-if", HOLDS, "--junit-xml", "a.md", "-o", "a.md"], "the same place"),
        (["--fail-if", HOLDS, "--junit-xml", "-"], "the same place"),
        (["--fail-if", HOLDS, "--format", "junit"], "'junit' is not one of"),
        (
            ["-o", "report.pdf"],
            "End it in .md, .html, .htm, .json, .txt, or give --format.",
        ),
        (["--manifest", "new.csv", "--unit", "parsecs"], "unknown --unit 'parsecs'"),
    ],
)
def test_options_that_make_no_sense_together_are_wrong_usage(
    batchtune, swept, tmp_path, options, words
):
    ran = batchtune("report", swept, *options, code=2)
    assert (words in ran.stderr, ran.stdout) == (True, "")
    assert list(tmp_path.iterdir()) == []


def test_github_gets_a_summary_and_annotations(batchtune, swept, tmp_path):
    (tmp_path / "summary.md").write_text("before\n", encoding="utf-8")
    env = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    rules = given([FAILS, "padding_ratio <= 90%"])
    ran = batchtune("report", swept, "--github", *rules, env=env, code=3)
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("before\n# batchtune report")
    assert "| ❌ fails | batches &gt; 1 |" in summary
    errors = [line for line in ran.stderr.splitlines() if line.startswith("::error")]
    assert len(errors) == 2
    assert "::padding_ratio <= 90%25: " in errors[1]
    assert "::" not in ran.stdout


@pytest.mark.parametrize("env", [{}, {"GITHUB_STEP_SUMMARY": ""}])
def test_elsewhere_than_on_github_its_option_is_wrong_usage(batchtune, swept, env):
    ran = batchtune("report", swept, "--github", env=env, code=2)
    assert "GITHUB_STEP_SUMMARY" in ran.stderr


def test_what_was_read_and_what_a_run_needs_is_not_overwritten(
    batchtune, swept, tmp_path
):
    run = shutil.copytree(swept, tmp_path / "mine")
    manifest = write_lengths(tmp_path / "new.csv", SECONDS)
    sweep = run / "sweep.json"
    held = ["report", run, "--manifest", manifest]
    before = contents(run), manifest.read_bytes()
    for arguments in (
        ["report", run, "-o", sweep],
        ["report", run, "--fail-if", FAILS, "--junit-xml", run / "sampler.yaml"],
        [*held, "--fail-if", "stale > 0.5", "--junit-xml", manifest],
        [*held, "--format", "html", "-o", manifest],
        ["export", run, "--to", "speechbrain", "-o", sweep],
        ["schema", "sweep", "-o", sweep],
    ):
        assert "must not be overwritten" in batchtune(*arguments, code=2).stderr
        assert (contents(run), manifest.read_bytes()) == before


def test_an_environment_that_holds_no_rule_is_no_open_gate(batchtune, swept):
    ran = batchtune("report", swept, env={"BATCHTUNE_FAIL_IF": " ; "}, code=2)
    assert "is not a rule" in ran.stderr
