"""The example's workflow for GitHub Actions: its steps are run here as the runner would run them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import run_here
from ruamel.yaml import YAML
from without_torch import UNINSTALLED, blocking

from batchtune.cli.app import load_command

ROOT = Path(__file__).parents[1]
WORKFLOW = YAML(typ="safe").load(ROOT / "examples" / "ci" / "batchtune.yml")
JOBS = WORKFLOW["jobs"]
ACTION = YAML(typ="safe").load(ROOT / "examples" / "ci" / "action" / "action.yml")


def filled(text):
    """A value of the workflow or the action, with their variables and inputs put in."""
    call = next(
        step for step in JOBS["buckets"]["steps"] if "ci/action" in step.get("uses", "")
    )
    inputs = {name: given.get("default") for name, given in ACTION["inputs"].items()}
    values = {f"inputs.{name}": text for name, text in (inputs | call["with"]).items()}
    values |= {f"env.{name}": text for name, text in WORKFLOW["env"].items()}
    # An input may be a variable in its turn.
    for _ in range(2):
        text = re.sub(
            r"\$\{\{ ([\w.-]+) \}\}",
            lambda match: values.get(match[1], match[0]),
            text,
        )
    return text


GATE_STEPS = ACTION["runs"]["steps"]
for _step in GATE_STEPS:
    _step["env"] = {name: filled(text) for name, text in _step["env"].items()}
RUNS = [step for job in JOBS.values() for step in job["steps"] if "run" in step]
RUNS += GATE_STEPS


def commands_of(step):
    """The calls of batchtune in a step, with its variables put in."""
    env = WORKFLOW["env"] | step.get("env", {})
    text = re.sub(r"\$(\w+)", lambda match: env.get(match[1], match[0]), step["run"])
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("batchtune ")]


@pytest.fixture
def checkout(made_once, tmp_path):
    """A repository with the manifest and a run folder as the probe job commits it, and `batchtune` on the path."""

    def make(folder):
        (folder / "examples").mkdir()
        names = WORKFLOW["env"]
        header, *rows = (ROOT / names["MANIFEST"]).read_text().splitlines(True)
        (folder / names["MANIFEST"]).write_text("".join([header, *rows[::2]]))
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


def run_step(checkout, step, **env):
    """Runs a step's script as GitHub's runner does: bash, ending with the first command that fails."""
    ours = ("BATCHTUNE_", "GITHUB_")
    clean = {key: os.environ[key] for key in os.environ if not key.startswith(ours)}
    commands = checkout / "bin"
    env = {
        **clean,
        **WORKFLOW["env"],
        **step["env"],
        **env,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{commands}{os.pathsep}{ROOT}",
        "GITHUB_STEP_SUMMARY": str(checkout / "summary.md"),
        "GITHUB_OUTPUT": str(checkout / "output"),
        "GITHUB_ACTIONS": "true",
        "GITHUB_RUN_ID": "7",
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(shell, cwd=checkout, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_steps_of_the_job_without_a_gpu_run_without_torch(checkout):
    install, sweep, gate, report = GATE_STEPS
    assert "pip install" in install["run"]
    for step in (sweep, gate, report):
        ran = run_step(checkout, step)
        assert ran.returncode == 0, f"{step['name']}: {ran.stderr}"
    page = (checkout / "output").read_text().removeprefix("page=").strip()
    assert (checkout / page).read_text().lstrip().lower().startswith("<!doctype html>")
    uploaded = filled(JOBS["buckets"]["steps"][-1]["with"]["path"]).split()
    assert [name for name in uploaded if not (checkout / name).is_file()] == []
    suite = (checkout / "junit.xml").read_text()
    assert "<testcase" in suite and "<failure" not in suite
    assert "# batchtune report" in (checkout / "summary.md").read_text()

    (checkout / "summary.md").unlink()
    rules = "padding_ratio > 0.01%\n\nbatches > 100000\n"
    ran = run_step(checkout, gate, RULES=rules)
    assert ran.returncode == 3
    assert "padding_ratio > 0.01%" in ran.stderr
    assert "<failure" in (checkout / "junit.xml").read_text()
    assert "Rules: 1 of 2 hold." in (checkout / "summary.md").read_text()


def test_every_command_of_every_job_is_one_with_these_options():
    for step in RUNS:
        for name, *arguments in commands_of(step):
            if '"${rules[@]}"' not in step["run"]:
                # Raises where one is unknown.
                load_command(name).make_context(name, arguments)


def test_no_script_has_anything_put_into_its_text():
    # What GitHub puts into a script's text could be anybody's commands; variables can't.
    assert [step["name"] for step in RUNS if "${{" in step["run"]] == []
