"""Flags override the environment, and nothing else sets an option."""

import pytest
from cli.conftest import result_in


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), {6, 7}), (("--num-buckets", 2), {2})],
    ids=["environment", "flag"],
)
def test_flags_override_the_environment(succeed, manifest, tmp_path, options, expected):
    env = {"BATCHTUNE_NUM_BUCKETS": "6,7", "BATCHTUNE_STRATEGY": "linear"}
    given = ("--max-batch-length", 60, *options)
    succeed("sweep-buckets", manifest, *given, env=env)
    rows = result_in(tmp_path)["rows"]
    assert {row["num_buckets"] for row in rows} == expected


def test_what_comes_from_the_environment_is_said(batchtune, manifest):
    ran = batchtune("sweep-buckets", manifest, env={"BATCHTUNE_UNIT": "sec"}, code=2)
    assert "Settings: unit sec from BATCHTUNE_UNIT\n" in ran.stderr
    many = {"BATCHTUNE_NUM_LENGTHS": "many"}
    ran = batchtune("probe-oom", manifest, env=many, code=2)
    assert "'many' is not a whole number (from BATCHTUNE_NUM_LENGTHS)" in ran.stderr


def test_quiet_hides_what_comes_from_the_environment(succeed, manifest):
    env = {"BATCHTUNE_NUM_BUCKETS": "2", "BATCHTUNE_MAX_BATCH_LENGTH": "60"}
    ran = succeed("sweep-buckets", manifest, "--quiet", env=env)
    assert "BATCHTUNE_" not in ran.stderr


def test_a_manifests_format_is_not_taken_for_a_reports(batchtune, succeed, manifest):
    env = {"BATCHTUNE_MANIFEST_FORMAT": "table", "BATCHTUNE_MAX_BATCH_LENGTH": "60"}
    succeed("sweep-buckets", manifest, env=env)
    assert batchtune("report", env=env).stdout.startswith("Set ")
    env["BATCHTUNE_REPORT_FORMAT"] = "markdown"
    assert batchtune("report", env=env).stdout.startswith("# batchtune report")
