"""Flags over environment over [tool.batchtune] over defaults."""

import json
from pathlib import Path

import pytest
from cli.conftest import Run


def counts(tmp_path: Path) -> set[int]:
    rows = json.loads((tmp_path / "batchtune-run" / "sweep.json").read_text())["rows"]
    return {row["num_buckets"] for row in rows if row["pool_size"] is None}


def configure(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)


def test_the_project_gives_defaults(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, '[tool.batchtune]\nmax-batch-length = 60\nnum_buckets = "2:3"\nstrategy = ["linear"]\n')
    assert batchtune("sweep-buckets", manifest).returncode == 0
    assert counts(tmp_path) == {2, 3}


def test_a_table_of_a_command_holds_for_that_command_alone(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, "[tool.batchtune]\nnum_buckets = 7\n[tool.batchtune.sweep-buckets]\nnum-buckets = 5\n")
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60).returncode == 0
    assert counts(tmp_path) == {5}


def test_the_environment_comes_before_the_project(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, "[tool.batchtune]\nnum_buckets = 7\n")
    env = {"BATCHTUNE_NUM_BUCKETS": "4", "BATCHTUNE_MAX_BATCH_LENGTH": "60"}
    assert batchtune("sweep-buckets", manifest, env=env).returncode == 0
    assert counts(tmp_path) == {4}


def test_a_flag_comes_before_the_environment(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    env = {"BATCHTUNE_NUM_BUCKETS": "4"}
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60, "--num-buckets", "2", env=env)
    assert ran.returncode == 0
    assert counts(tmp_path) == {2}


def test_repeatable_options_take_a_word_a_list_or_a_table(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, '[tool.batchtune]\nstrategy = "linear"\nnum_buckets = [2, 3]\nset = { a = 1 }\n')
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60).returncode == 0
    assert counts(tmp_path) == {2, 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.batchtune]\nnum_bucket = 7\n", "'num_bucket'\nDid you mean 'num_buckets'?"),
        ("[tool.batchtune\n", "pyproject.toml is not a TOML file"),
        ("[tool.batchtune.sweep-bucket]\nnum-buckets = 3\n", "'sweep-bucket'\nDid you mean 'sweep-buckets'?"),
        ("[tool.batchtune]\nforce = true\n", "'force' can't be set here"),
        ('[tool.batchtune]\nworld-size = "many"\n', "'many', set in {file}, [tool.batchtune] world-size"),
    ],
    ids=["key", "no TOML", "command", "of one command line", "value"],
)
def test_what_is_wrong_in_the_project_is_named(
    batchtune: Run, manifest: Path, tmp_path: Path, text: str, said: str
) -> None:
    configure(tmp_path, text)
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60)
    assert ran.returncode == 2
    assert said.format(file=tmp_path / "pyproject.toml") in ran.stderr


def test_a_project_without_settings_is_no_matter(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, '[project]\nname = "something"\n')
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60).returncode == 0


def test_a_wrong_value_in_the_environment_names_its_variable(batchtune: Run, manifest: Path) -> None:
    ran = batchtune("probe-oom", manifest, env={"BATCHTUNE_NUM_LENGTHS": "many"})
    assert ran.returncode == 2
    assert "'many', set by the environment variable BATCHTUNE_NUM_LENGTHS" in ran.stderr


def test_an_invalid_value_names_where_it_was_set(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    ran = batchtune("sweep-buckets", manifest, env={"BATCHTUNE_UNIT": "sec", "BATCHTUNE_SEED": "1"})
    assert ran.returncode == 2
    assert "--unit is sec, set by the environment variable BATCHTUNE_UNIT." in ran.stderr
    assert "--seed" not in ran.stderr
    configure(tmp_path, '[tool.batchtune]\nunit = "s"\n[tool.batchtune.sweep-buckets]\nunit = "sec"\n')
    ran = batchtune("sweep-buckets", manifest)
    assert f"set in {tmp_path / 'pyproject.toml'}, [tool.batchtune.sweep-buckets] unit." in ran.stderr
    assert "set in" not in batchtune("sweep-buckets", manifest, "--unit", "sec").stderr


def test_an_unknown_column_names_its_environment_variable(batchtune: Run, manifest: Path) -> None:
    ran = batchtune("sweep-buckets", manifest, env={"BATCHTUNE_LENGTH_KEY": "seconds"})
    assert ran.returncode == 1
    assert "--length-key is seconds, set by the environment variable BATCHTUNE_LENGTH_KEY." in ran.stderr


def test_an_unknown_variable_is_a_warning_with_the_nearest(batchtune: Run, manifest: Path) -> None:
    arguments = ("sweep-buckets", manifest, "--max-batch-length", 60, "--json")
    ran = batchtune(*arguments, env={"BATCHTUNE_NUM_BUCKET": "3", "BATCHTUNE_MEMORY": "1GiB"})
    assert ran.returncode == 0
    assert "variable BATCHTUNE_NUM_BUCKET sets no option. Did you mean BATCHTUNE_NUM_BUCKETS?" in ran.stderr
    assert "BATCHTUNE_MEMORY" not in ran.stderr  # another command's
    assert json.loads(ran.stdout)
    assert "NUM_BUCKET" not in batchtune(*arguments, "--quiet", env={"BATCHTUNE_NUM_BUCKET": "3"}).stderr


def test_a_manifests_format_is_not_taken_for_a_reports(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, '[tool.batchtune]\nformat = "table"\nmax-batch-length = 60\n')
    assert batchtune("sweep-buckets", manifest).returncode == 0
    ran = batchtune("report")
    assert ran.returncode == 0 and ran.stdout.startswith("Set ")
    configure(tmp_path, '[tool.batchtune]\nformat = "table"\n[tool.batchtune.report]\nformat = "markdown"\n')
    assert batchtune("report").stdout.startswith("# batchtune report")
