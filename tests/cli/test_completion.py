"""The shells' completion, requested as the shells do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import Run, run_in

from batchtune.buckets.strategies import STRATEGIES
from batchtune.cli.app import COMMANDS
from batchtune.lengths import UNITS
from batchtune.manifests import FORMATS
from batchtune.schemas import SCHEMAS


def offered(batchtune: Run, shell: str, line: str) -> str:
    """Return what a shell gets if the cursor is at the end of a line."""
    words = line.split(" ")
    env = {
        "_BATCHTUNE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,  # bash
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,  # zsh, fish
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    ran = batchtune(env=env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def values(text: str) -> set[str]:
    """Return the values alone, of bash: one per line."""
    return set(text.split())


def test_bash_completes_commands_options_and_values(batchtune: Run) -> None:
    assert values(offered(batchtune, "bash", "batchtune ")) == set(COMMANDS)
    assert values(offered(batchtune, "bash", "batchtune sweep-buckets --num")) == {"--num-buckets"}
    assert values(offered(batchtune, "bash", "batchtune sweep-buckets --strategy ")) == set(STRATEGIES)
    assert values(offered(batchtune, "bash", "batchtune sweep-buckets --unit ")) == set(UNITS)
    assert values(offered(batchtune, "bash", "batchtune scan --format ")) == set(FORMATS)
    assert values(offered(batchtune, "bash", "batchtune verify --device c")) >= {"cpu", "cuda"}
    assert values(offered(batchtune, "bash", "batchtune tune --workload builtin:c")) == {"builtin:conformer-ctc"}
    assert values(offered(batchtune, "bash", "batchtune schema ")) == set(SCHEMAS)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_the_same_values(batchtune: Run, shell: str) -> None:
    assert "sweep-buckets" in offered(batchtune, shell, "batchtune sw")
    assert "--num-buckets" in offered(batchtune, shell, "batchtune sweep-buckets --num")
    text = offered(batchtune, shell, "batchtune sweep-buckets --strategy ")
    assert all(strategy in text for strategy in STRATEGIES)


def test_a_faulty_project_does_not_disturb_completion(batchtune: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.batchtune]\nnonsense = 1\n")
    assert values(offered(batchtune, "bash", "batchtune sweep-buckets --num")) == {"--num-buckets"}


# Without a shell around it there is nothing to detect: the variable makes the option take its name.
NO_SHELL = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


def test_the_script_for_a_shell_can_be_shown_and_installed(tmp_path: Path) -> None:
    shown = run_in(tmp_path, "--show-completion", "zsh", env=NO_SHELL)
    assert (shown.returncode, "_BATCHTUNE_COMPLETE" in shown.stdout) == (0, True)
    ran = run_in(tmp_path, "--install-completion", "bash", env={"HOME": str(tmp_path), **NO_SHELL})
    assert ran.returncode == 0, ran.stderr
    assert "_BATCHTUNE_COMPLETE" in (tmp_path / ".bash_completions" / "batchtune.sh").read_text()
    assert "batchtune.sh" in (tmp_path / ".bashrc").read_text()
