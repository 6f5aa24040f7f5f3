"""The example's workflow for GitHub Actions: its steps are run here as the runner would run them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import run_here
from ruamel.yaml import YAML
from without_torch import UNINSTALLED, blocking

from batchtune.cli.app import load_command

ROOT = Path(__file__).parents[1]
WORKFLOW: dict[str, Any] = YAML(typ="safe").load(
    ROOT / "examples" / "ci" / "batchtune.yml"
)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
RUNS = [(job, step) for job in JOBS for step in JOBS[job]["steps"] if "run" in step]


def step_named(job: str, name: str) -> dict[str, Any]:
    return next(step for step in JOBS[job]["steps"] if step.get("name") == name)


def commands_of(text: str) -> list[list[str]]:
    """The calls of batchtune in a step, with the workflow's variables put in."""
    filled = re.sub(
        r"\$(\w+)", lambda match: WORKFLOW["env"].get(match[1], match[0]), text
    )
    lines = [line.strip() for line in filled.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("batchtune ")]


@pytest.fixture
def checkout(made_once, tmp_path):
    """A repository with the manifest and a run folder as the probe job commits it, and `batchtune` on the path."""

    def make(folder: Path) -> None:
        (folder / "examples").mkdir()
        header, *rows = (
            (ROOT / "examples" / "stdlib_lengths.csv")
            .read_text()
            .splitlines(keepends=True)
        )
        (folder / "examples" / "stdlib_lengths.csv").write_text(
            "".join([header, *rows[::2]])
        )
        names = WORKFLOW["env"]
        law = "law:constant=1GB,linear=1MB,limit=21GB,seconds=0.02,seconds_linear=1e-6"
        where = ("--device", law, "--run", folder / names["RUN"])
        probed = run_here("probe-oom", folder / names["MANIFEST"], *where)
        assert probed.returncode == 0, probed.stderr
        command = folder / "bin" / "batchtune"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m batchtune "$@"\n')
        command.chmod(0o755)
        blocking(UNINSTALLED, folder / "bin")

    shutil.copytree(made_once("ci-checkout", make), tmp_path / "checkout")
    return tmp_path / "checkout"


def run_step(checkout: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a step's script as GitHub's runner does: bash, ending with the first command that fails."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("BATCHTUNE_", "GITHUB_"))
    }
    env = {
        **clean,
        **WORKFLOW["env"],
        "PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout / 'bin'}{os.pathsep}{ROOT}",
        "GITHUB_STEP_SUMMARY": str(checkout / "summary.md"),
        "GITHUB_ACTIONS": "true",
        "GITHUB_RUN_ID": "7",
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    return subprocess.run(
        shell, cwd=checkout, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_steps_of_the_job_without_a_gpu_run_without_torch(checkout):
    for step in JOBS["buckets"]["steps"]:
        if "run" in step and not step["name"].startswith("Install"):
            ran = run_step(checkout, step["run"])
            assert ran.returncode == 0, f"{step['name']}: {ran.stderr}"
    uploaded = (
        JOBS["buckets"]["steps"][-1]["with"]["path"]
        .replace("${{ env.RUN }}", WORKFLOW["env"]["RUN"])
        .split()
    )
    assert [name for name in uploaded if not (checkout / name).is_file()] == []
    suite = ElementTree.parse(checkout / "junit.xml").getroot()
    assert list(suite.iter("testcase")) and not list(suite.iter("failure"))
    assert "# batchtune report" in (checkout / "summary.md").read_text()
    assert (
        (checkout / "report.html")
        .read_text()
        .lstrip()
        .lower()
        .startswith("<!doctype html>")
    )

    gate = step_named("buckets", "Hold the recommendation to the rules")["run"]
    ran = run_step(checkout, gate.replace("> 0.15", "> 0.0001"))
    assert ran.returncode == 3
    assert "padding_ratio > 0.0001" in ran.stderr
    assert list(ElementTree.parse(checkout / "junit.xml").getroot().iter("failure"))
    assert "padding_ratio" in (checkout / "summary.md").read_text()


def test_every_command_of_every_job_is_one_with_these_options():
    for _, step in RUNS:
        for name, *arguments in commands_of(step["run"]):
            # Raises where one is unknown.
            load_command(name).make_context(name, arguments)


def test_no_script_has_anything_put_into_its_text():
    # What GitHub puts into a script's text could be anybody's commands; variables can't.
    assert [step["name"] for _, step in RUNS if "${{" in step["run"]] == []
