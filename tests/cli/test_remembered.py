"""A run remembers how its manifest was read: later commands need not repeat it."""

import json

import pytest
from cli.conftest import write_lengths

TOLD = "Options taken from the run in batchtune-run: --max-length 30."


@pytest.fixture
def swept(succeed, tmp_path):
    """A run of the 60 examples of at most 30 s of 70; the manifest is train.csv."""
    short = [2 + index % 28 for index in range(60)]
    write_lengths(tmp_path / "train.csv", [*short, *range(31, 81, 5)])
    limits = ("--max-length", 30, "--max-batch-length", 120)
    succeed("sweep-buckets", "train.csv", *limits, "--num-buckets", "2:4")
    return tmp_path / "batchtune-run"


def again(batchtune, *options, code=0):
    few = ("--max-batch-length", 90, "--num-buckets", "2:4")
    return batchtune("sweep-buckets", "train.csv", *few, *options, code=code).stderr


@pytest.mark.usefixtures("swept")
def test_a_sweep_takes_the_limit_from_the_run_and_says_so(batchtune):
    said = again(batchtune)
    assert said.startswith(f"{TOLD}\n")
    assert "Left out: 10 examples, longer than --max-length 30." in said
    assert TOLD not in again(batchtune, "--max-length", 30)
    # What was found without.
    again(batchtune, "--unit", "s", "--length-key", "duration")


@pytest.mark.usefixtures("swept")
def test_another_limit_is_refused(batchtune):
    ran = batchtune("verify", "train.csv", "--max-length", 40, code=1)
    assert "has 62 examples up to 36 s, the tuned one had 60 up to" in ran.stderr
    assert "Give the same manifest with the same options" in ran.stderr


@pytest.mark.usefixtures("swept")
def test_a_report_reads_new_lengths_as_the_runs_unless_told(batchtune):
    report = ("report", "--manifest", "train.csv", "--fail-if")
    assert TOLD in batchtune(*report, "changed == true", code=0).stderr
    batchtune(*report, "beyond > 0", "--max-length", 40, code=3)


@pytest.mark.usefixtures("swept")
def test_starting_over_forgets(batchtune):
    assert again(batchtune, "--force").startswith("70 lengths")


def test_what_the_file_says_is_checked(batchtune, swept):
    sweep = json.loads((swept / "sweep.json").read_text())
    sweep["lengths"]["reading"] = {"length_scale": "1e999999999"}
    (swept / "sweep.json").write_text(json.dumps(sweep))
    said = again(batchtune, code=1)
    assert "how the run's manifest was read is damaged" in said
