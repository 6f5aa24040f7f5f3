"""`batchtune verify` and `tune --verify`, on a device made by a law."""

import json
import shutil

import pytest
from cli.conftest import flat, interrupted_at, result_in, write_lengths
from made_trials import ran as reply_of
from msgspec.structs import replace

from batchtune.configs import read_sampler_yaml
from batchtune.exports.run_configs import render_sampler_yaml


@pytest.fixture
def run(verified, tmp_path):
    """A copy of its run folder, in the folder where `batchtune` runs."""
    shutil.copytree(verified, tmp_path, dirs_exist_ok=True)
    (tmp_path / "batchtune-run" / "verify.json").unlink()
    return tmp_path / "batchtune-run"


def test_tune_verifies_at_the_end_and_says_so(verified):
    found = result_in(verified, "verify")
    assert (found["holds"], found["meta"]["format"]) == (True, "batchtune/verify")
    assert found["steps"] == found["epoch_batches"]
    said = json.loads((verified / "stdout").read_text())
    assert said["meta"]["format"] == "batchtune/report"


def test_all_but_own_code_is_taken_from_the_run(succeed, run, tmp_path):
    run = run.rename(tmp_path / "elsewhere")
    own = ["--workload", "train.py:Step"]
    ran = succeed("verify", "elsewhere", "lengths.csv", *own, "--steps", 14, "--json")
    found = json.loads(ran.stdout)
    assert found["workload"]["spec"] == "train.py:Step"
    limit = json.loads((run / "probe.json").read_text())["device"]["limit_bytes"]
    assert found["device"]["limit_bytes"] == limit
    config = read_sampler_yaml(run / "sampler.yaml")
    assert found["bucket_batch_sizes"] == config.bucket_batch_sizes
    assert found == json.loads((run / "verify.json").read_text())
    assert "Warning" not in ran.stderr


@pytest.mark.process
def test_too_large_batches_end_with_3_and_are_warned_of(batchtune, run):
    config = read_sampler_yaml(run / "sampler.yaml")
    first, *rest = config.bucket_batch_sizes
    sizes = {"bucket_batch_sizes": [2 * first, *rest], "max_batch_size": 2 * first}
    (run / "sampler.yaml").write_text(render_sampler_yaml(replace(config, **sizes)))
    ran = batchtune("verify", "lengths.csv", "--steps", 14, code=3)
    assert "ran out of memory" in ran.stdout and "batchtune export" not in ran.stdout
    report = batchtune("report").stdout
    assert report.startswith("The verification does not hold.")
    assert "edited" in report
    assert "batches failed" in batchtune("run", "lengths.csv", "--", "true").stderr
    batchtune("sweep-buckets", "lengths.csv")
    assert "does not hold" not in batchtune("report").stdout


def test_a_config_in_another_unit_is_refused(batchtune, run):
    config = run / "sampler.yaml"
    config.write_text(config.read_text().replace("unit: s", "unit: ms"))
    refused = batchtune("verify", "lengths.csv", code=1).stderr
    assert "sampler.yaml is in ms, and the manifest in s" in refused


def test_a_command_that_the_record_names_is_not_run(batchtune, run, tmp_path):
    probe = json.loads((run / "probe.json").read_text())
    options = {"args": "id > X", "shell": True}
    probe["workload"] = {"spec": "subprocess:run", "options": options}
    (run / "probe.json").write_text(json.dumps(probe))
    ran = batchtune("verify", "lengths.csv", "--steps", 2, code=2)
    assert "runs no code that only a file names" in ran.stderr
    assert not (tmp_path / "X").exists()


def test_the_workloads_own_error_ends_with_1_and_its_traceback(batchtune, run, plan):
    def broken(shape, number):
        return reply_of(shape, "error", traceback="raise IndexError", error="token 7")

    plan(broken)
    ran = batchtune("verify", "lengths.csv", code=1)
    assert "  | raise IndexError" in ran.stderr
    assert "failed in its step, with a batch of" in flat(ran.stderr)
    assert "did not run out of memory" in ran.stderr
    assert not (run / "verify.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["batchtune-run"],
            "the manifest is missing: batchtune-run was tuned with one",
        ),
        (["lengths.csv", "--steps", "5", "--epoch"], "Give one of --steps and --epoch"),
        (["lengths.csv", "--seed", "-1"], "--seed"),
        (["lengths.csv", "--time-tolerance", "nan"], "--time-tolerance"),
    ],
)
def test_what_has_no_meaning_is_a_usage_error(batchtune, run, arguments, said):
    assert said in batchtune("verify", *arguments, code=2).stderr


@pytest.mark.parametrize("command", ["verify", "run"])
def test_the_lengths_of_a_script_are_not_those_of_a_manifest(batchtune, run, command):
    said = batchtune(command, "--", "true", code=2).stderr
    assert "the manifest is missing: batchtune-run was tuned with one" in said


@pytest.mark.parametrize(
    "words", [("verify", "equal.csv"), ("run", "equal.csv", "--", "true")]
)
def test_where_nothing_is_recommended_the_reason_is_given(batchtune, tmp_path, words):
    write_lengths(tmp_path / "equal.csv", [10] * 50, "length")
    batchtune("sweep-buckets", "equal.csv", "--max-batch-length", 100)
    ran = batchtune(*words, code=1)
    why = "sampler.yaml does not exist: no row needs fewer batches than a fixed batch size"
    assert why in ran.stderr
    assert "Keep your current batches" in ran.stderr


def test_interrupted_it_writes_nothing(batchtune, run, plan):
    plan(interrupted_at(5))
    assert "Interrupted." in batchtune("verify", "lengths.csv", code=130).stderr
    assert not (run / "verify.json").exists()
