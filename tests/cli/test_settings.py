"""Flags over environment over [tool.batchtune] over defaults."""

import json
from pathlib import Path

from cli.conftest import Run


def counts(tmp_path: Path) -> set[int]:
    return {row["num_buckets"] for row in json.loads((tmp_path / "batchtune-run" / "sweep.json").read_text())["rows"]}


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


def test_options_that_can_be_repeated_take_a_word_a_list_or_a_table(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    configure(tmp_path, '[tool.batchtune]\nstrategy = "linear"\nnum_buckets = [2, 3]\nset = { a = 1 }\n')
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60).returncode == 0
    assert counts(tmp_path) == {2, 3}


def test_an_unknown_key_is_named(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, "[tool.batchtune]\nnum_bucket = 7\n")
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60)
    assert ran.returncode == 2
    assert "'num_bucket'" in ran.stderr
    assert "num_buckets" in ran.stderr


def test_a_file_that_is_no_toml_is_told(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, "[tool.batchtune\n")
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60)
    assert ran.returncode == 2
    assert "pyproject.toml is no TOML file" in ran.stderr


def test_a_project_without_settings_is_no_matter(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, '[project]\nname = "something"\n')
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60).returncode == 0
