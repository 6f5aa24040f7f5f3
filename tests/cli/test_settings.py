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


def test_flags_come_before_the_environment_before_the_project(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    general = '[tool.batchtune]\nmax-batch-length = 60\nnum_buckets = [6, 7]\nstrategy = "linear"\nset = { a = 1 }\n'
    env = {"BATCHTUNE_NUM_BUCKETS": "4"}
    for project, options, env_of_run, expected in (
        (general, (), None, {6, 7}),
        (f"{general}[tool.batchtune.sweep-buckets]\nnum-buckets = 5\n", (), None, {5}),
        (general, (), env, {4}),
        (general, ("--num-buckets", 2), env, {2}),
    ):
        configure(tmp_path, project)
        ran = batchtune("sweep-buckets", manifest, *options, env=env_of_run)
        assert ran.returncode == 0, ran.stderr
        assert counts(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[tool.batchtune]\nnum_bucket = 7\n",
            "'num_bucket'\nDid you mean 'num-buckets'?",
        ),
        ("[tool.batchtune\n", "pyproject.toml is not a TOML file"),
        (
            "[tool.batchtune.sweep-bucket]\nnum-buckets = 3\n",
            "'sweep-bucket'\nDid you mean 'sweep-buckets'?",
        ),
        ("[tool.batchtune]\nforce = true\n", "unknown setting 'force'"),
        (
            "[tool.batchtune]\nmin-length = true\n",
            "min-length: True is of the wrong kind",
        ),
        ("[tool]\nbatchtune = 3\n", "tool.batchtune must be a table"),
        (
            '[tool.batchtune]\nworld-size = "many"\n',
            "--world-size: 'many' is not a whole number (from {file}, [tool.batchtune] world-size)",
        ),
    ],
    ids=[
        "key",
        "no TOML",
        "command",
        "of one command line",
        "kind",
        "no table",
        "value",
    ],
)
def test_what_is_wrong_in_the_project_is_named(
    batchtune: Run, manifest: Path, tmp_path: Path, text: str, said: str
) -> None:
    configure(tmp_path, text)
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60)
    assert ran.returncode == 2
    assert said.format(file=tmp_path / "pyproject.toml") in ran.stderr


def test_what_comes_from_the_environment_is_said(
    batchtune: Run, manifest: Path
) -> None:
    ran = batchtune("sweep-buckets", manifest, env={"BATCHTUNE_UNIT": "sec"})
    assert ran.returncode == 2
    assert "Settings: unit sec from BATCHTUNE_UNIT\n" in ran.stderr
    ran = batchtune("probe-oom", manifest, env={"BATCHTUNE_NUM_LENGTHS": "many"})
    assert ran.returncode == 2
    assert "'many' is not a whole number (from BATCHTUNE_NUM_LENGTHS)" in ran.stderr


def test_a_manifests_format_is_not_taken_for_a_reports(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    configure(tmp_path, '[tool.batchtune]\nformat = "table"\nmax-batch-length = 60\n')
    assert batchtune("sweep-buckets", manifest).returncode == 0
    assert batchtune("report").stdout.startswith("Set ")
    configure(
        tmp_path,
        '[tool.batchtune]\nformat = "table"\n[tool.batchtune.report]\nformat = "markdown"\n',
    )
    assert batchtune("report").stdout.startswith("# batchtune report")


CODE = '[tool.batchtune]\nworkload = "train.py:Step"\n'
PROBE = ("probe-oom", "--device", "law:limit=8GB")


def probed_workload(tmp_path: Path) -> str:
    run = json.loads((tmp_path / "batchtune-run" / "run.json").read_text())
    return str(run["workload"]["spec"])


def test_what_comes_from_the_project_is_said(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    configure(tmp_path, CODE)
    ran = batchtune(*PROBE, manifest)
    assert "workload train.py:Step from pyproject.toml\n" in ran.stderr
    assert probed_workload(tmp_path) == "train.py:Step"
    configure(tmp_path, "[tool.batchtune]\nnum-buckets = 2\nmax_batch_length = 60\n")
    ran = batchtune("sweep-buckets", manifest)
    assert (
        "num-buckets 2 from pyproject.toml, max-batch-length 60 from pyproject.toml\n"
        in ran.stderr
    )
    assert (
        "from pyproject.toml"
        not in batchtune("sweep-buckets", manifest, "--quiet").stderr
    )


@pytest.mark.parametrize(
    ("command", "setting", "option"),
    [
        (PROBE, 'workload = "train.py:Step"', "--workload"),
        (PROBE, "set = { layers = 1 }", "--set"),
        (
            ("report", "."),
            '[tool.batchtune.report]\njunit-xml = "../victim"',
            "--junit-xml",
        ),
        (("sweep-buckets", "--max-batch-length", 60), 'run = ".."', "--run"),
    ],
)
def test_a_project_in_a_run_folder_names_no_code_or_outputs(
    batchtune: Run,
    manifest: Path,
    tmp_path: Path,
    command: tuple[object, ...],
    setting: str,
    option: str,
) -> None:
    assert (
        batchtune(
            "sweep-buckets", manifest, "--max-batch-length", 60, "--run", "."
        ).returncode
        == 0
    )
    configure(tmp_path, f"[tool.batchtune]\n{setting}\n")
    given = command if command[0] == "report" else (*command, manifest)
    ran = batchtune(*given)
    assert ran.returncode == 2
    assert "is not used: the file is in a run folder" in ran.stderr
    assert f"give {option} on the command line" in ran.stderr
    assert not (tmp_path.parent / "victim").exists()


def test_code_on_the_command_line_needs_no_trusted_project(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    configure(tmp_path, CODE)
    (tmp_path / "sweep.json").touch()
    ran = batchtune(*PROBE, manifest, "--workload", "mine.py:Step")
    assert ran.returncode == 0, ran.stderr
    assert probed_workload(tmp_path) == "mine.py:Step"


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a file to another user"
)
def test_a_project_of_another_user_names_no_code(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    configure(tmp_path, CODE)
    os.chown(tmp_path / "pyproject.toml", 12345, -1)
    ran = batchtune(*PROBE, manifest)
    assert ran.returncode == 2
    assert "is not used: the file belongs to another user" in ran.stderr
    # As in a container that runs as root on somebody's project.
    os.chown(tmp_path, 12345, -1)
    assert batchtune(*PROBE, manifest).returncode == 0
    assert probed_workload(tmp_path) == "train.py:Step"


def test_a_link_to_the_users_own_project_is_not_theirs(
    batchtune: Run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, CODE)
    lstat = Path.lstat
    monkeypatch.setattr(
        Path,
        "lstat",
        lambda path: os.stat_result([*lstat(path)[:4], 12345, *lstat(path)[5:]]),
    )
    assert (
        "is not used: the file belongs to another user"
        in batchtune(*PROBE, manifest).stderr
    )


@pytest.mark.parametrize("end", ["root", "home"])
def test_the_search_ends_at_the_projects_root_or_at_home(
    batchtune: Run,
    manifest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    configure(tmp_path, "no TOML")
    inside = tmp_path / "project" / "inside"
    inside.mkdir(parents=True)
    if end == "root":
        (tmp_path / "project" / ".git").mkdir()
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "project"))
    arguments = (
        "sweep-buckets",
        manifest,
        "--max-batch-length",
        "60",
        "--num-buckets",
        "2",
    )
    monkeypatch.chdir(inside)
    assert run_here(*arguments).returncode == 0
    configure(tmp_path / "project", "no TOML")
    assert "is not a TOML file" in run_here(*arguments).stderr


def test_a_project_that_nests_without_end_is_one_error(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    configure(tmp_path, "a = " + "[" * 100_000)
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60)
    assert ran.returncode == 2
    assert "is not a TOML file" in ran.stderr
