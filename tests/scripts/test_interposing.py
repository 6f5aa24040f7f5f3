"""The hook on PYTHONPATH in a process that batchtune did not start: nothing changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchtune.scripts

HOOK = Path(batchtune.scripts.__file__).with_name("hook")


def ran(code, folder, *options, variable):
    """What a Python prints that runs this code with the hook, and with a `sitecustomize` of the user's."""
    (folder / "sitecustomize.py").write_text("print('the user\\'s own')\n")
    environment = {**os.environ, "PYTHONPATH": f"{HOOK}{os.pathsep}{folder}"}
    environment.pop("BATCHTUNE_SCRIPT", None)
    if variable is not None:
        environment["BATCHTUNE_SCRIPT"] = variable
    ran = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout + ran.stderr


@pytest.mark.process
def test_without_the_variable_nothing_is_patched(tmp_path):
    code = "import sys; print([name for name in sys.modules if 'batchtune' in name])"
    assert ran(code, tmp_path, variable=None) == "the user's own\n[]\n"


@pytest.mark.process
def test_a_python_without_batchtune_runs_as_ever(tmp_path):
    """`-S` leaves out the folder with packages; torch alone is a reason to say so."""
    bare = "import sys, sitecustomize; print(1)"
    said = ran(bare, tmp_path, "-S", variable='{"mode": "record"}')
    assert said == "the user's own\n1\n"
    used = ran(f"{bare}; sys.modules['torch'] = sys", tmp_path, "-S", variable="{}")
    assert used.startswith("the user's own\n1\nbatchtune: can't be imported by ")
    assert len(used.splitlines()) == 3
