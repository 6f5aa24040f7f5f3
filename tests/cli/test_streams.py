"""A reader that leaves early, or was never there, does not change the exit code."""

import shlex
import subprocess

import pytest
from cli.conftest import command, run_here, write_manifest

# `set -o pipefail` is bash's.
BASH = ["bash", "-o", "pipefail", "-c"]


pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    manifest = write_manifest(folder / "lengths.csv")
    options = ("--max-batch-length", 60, "--run", folder / "run")
    ran = run_here("sweep-buckets", manifest, *options)
    assert ran.returncode == 0, ran.stderr
    return folder / "run"


@pytest.mark.slow
def test_a_failing_gate_ends_with_3_whoever_reads(swept):
    gate = shlex.join(command("report", swept, "--fail-if", "batches > 0"))
    script = f"{gate} --format html | true"
    ran = subprocess.run([*BASH, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert "Traceback" not in ran.stderr and "BrokenPipe" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["report", "nowhere"], 1), (["report", "--help"], 0)]
)
def test_errors_and_help_end_as_with_a_reader(arguments, code, tmp_path):
    for redirected in ("2>&1 | true", ">&- 2>&-"):
        script = f"{shlex.join(command(*arguments))} {redirected}"
        ran = subprocess.run(
            [*BASH, script], cwd=tmp_path, capture_output=True, check=False
        )
        assert ran.returncode == code


def test_errors_never_get_into_the_result_where_stderr_is_closed(swept):
    gate = shlex.join(command("report", swept, "--json", "--fail-if", "batches > 0"))
    ran = subprocess.run(
        [*BASH, f"{gate} 2>&-"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3
    assert ran.stdout.startswith("{") and "Fails:" not in ran.stdout
