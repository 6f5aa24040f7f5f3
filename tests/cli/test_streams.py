"""A reader that leaves early, or was never there, does not change the exit code."""

import shlex

import pytest
from cli.conftest import command, run_here, start_in, write_manifest

# `set -o pipefail` is bash's.
BASH = ["bash", "-o", "pipefail", "-c"]


pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    manifest = write_manifest(folder / "lengths.csv")
    options = ("--max-batch-length", 60, "--run", folder / "run")
    run_here("sweep-buckets", manifest, *options, code=0)
    return folder / "run"


def run_in_bash(folder, arguments, redirected):
    script = f"{shlex.join(command(*arguments))} {redirected}"
    return start_in(folder, [*BASH, script], {})


@pytest.mark.slow
def test_a_failing_gate_ends_with_3_whoever_reads(swept, tmp_path):
    gate = ("report", swept, "--fail-if", "batches > 0", "--format", "html")
    ran = run_in_bash(tmp_path, gate, "| true")
    assert ran.returncode == 3
    assert "Traceback" not in ran.stderr and "BrokenPipe" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["report", "nowhere"], 1), (["report", "--help"], 0)]
)
def test_errors_and_help_end_as_with_a_reader(arguments, code, tmp_path):
    for redirected in ("2>&1 | true", ">&- 2>&-"):
        assert run_in_bash(tmp_path, arguments, redirected).returncode == code


def test_errors_never_get_into_the_result_where_stderr_is_closed(swept, tmp_path):
    gate = ("report", swept, "--json", "--fail-if", "batches > 0")
    ran = run_in_bash(tmp_path, gate, "2>&-")
    assert ran.returncode == 3
    assert ran.stdout.startswith("{") and "Fails:" not in ran.stdout
