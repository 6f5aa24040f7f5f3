"""Flags over environment over [tool.batchtune] over defaults."""

import json
import os
from pathlib import Path

import pytest
from cli.conftest import Run, run_here


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


CODE = '[tool.batchtune]\nworkload = "train.py:Step"\n'
PROBE = ("probe-oom", "--device", "cpu")


def test_what_comes_from_the_project_is_said(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, CODE)
    ran = batchtune(*PROBE, manifest)
    assert "workload train.py:Step from pyproject.toml\n" in ran.stderr
    assert "train.py does not exist" in ran.stderr
    configure(tmp_path, "[tool.batchtune]\nnum-buckets = 2\nmax_batch_length = 60\n")
    ran = batchtune("sweep-buckets", manifest)
    assert "num-buckets 2, max-batch-length 60 from pyproject.toml\n" in ran.stderr
    assert "from pyproject.toml" not in batchtune("sweep-buckets", manifest, "--quiet").stderr


@pytest.mark.parametrize(
    ("command", "setting", "option"),
    [
        (PROBE, 'workload = "train.py:Step"', "--workload"),
        (PROBE, "set = { layers = 1 }", "--set"),
        (("report", "."), '[tool.batchtune.report]\njunit-xml = "../victim"', "--junit-xml"),
        (("sweep-buckets", "--max-batch-length", 60), 'run = ".."', "--run"),
    ],
)
def test_a_project_in_a_run_folder_names_no_code_or_outputs(
    batchtune: Run, manifest: Path, tmp_path: Path, command: tuple[object, ...], setting: str, option: str
) -> None:
    assert batchtune("sweep-buckets", manifest, "--max-batch-length", 60, "--run", ".").returncode == 0
    configure(tmp_path, f"[tool.batchtune]\n{setting}\n")
    given = command if command[0] == "report" else (*command, manifest)
    ran = batchtune(*given)
    assert ran.returncode == 2
    assert "is not used: the file lies in a run folder" in ran.stderr
    assert f"give {option} on the command line" in ran.stderr
    assert not (tmp_path.parent / "victim").exists()


def test_code_on_the_command_line_needs_no_trusted_project(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, CODE)
    (tmp_path / "sweep.json").touch()
    ran = batchtune(*PROBE, manifest, "--workload", "mine.py:Step")
    assert "mine.py does not exist" in ran.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_project_of_another_user_names_no_code(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, CODE)
    os.chown(tmp_path / "pyproject.toml", 12345, -1)
    ran = batchtune(*PROBE, manifest)
    assert ran.returncode == 2
    assert "is not used: the file belongs to another user" in ran.stderr
    os.chown(tmp_path, 12345, -1)  # as in a container that runs as root on somebody's project
    assert "train.py does not exist" in batchtune(*PROBE, manifest).stderr


def test_a_link_to_the_users_own_project_is_not_theirs(
    batchtune: Run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, CODE)
    lstat = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result([*lstat(path)[:4], 12345, *lstat(path)[5:]]))
    assert "is not used: the file belongs to another user" in batchtune(*PROBE, manifest).stderr


@pytest.mark.parametrize("end", ["root", "home"])
def test_the_search_ends_at_the_projects_root_or_at_home(
    batchtune: Run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    configure(tmp_path, "no TOML")
    inside = tmp_path / "project" / "inside"
    inside.mkdir(parents=True)
    if end == "root":
        (tmp_path / "project" / ".git").mkdir()
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "project"))
    arguments = ("sweep-buckets", manifest, "--max-batch-length", "60", "--num-buckets", "2")
    monkeypatch.chdir(inside)
    assert run_here(*arguments).returncode == 0
    configure(tmp_path / "project", "no TOML")
    assert "is not a TOML file" in run_here(*arguments).stderr


def test_a_project_that_nests_without_end_is_one_error(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    configure(tmp_path, "a = " + "[" * 100_000)
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60)
    assert ran.returncode == 2
    assert "is not a TOML file" in ran.stderr
