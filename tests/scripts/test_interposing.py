"""The hook on PYTHONPATH in a process that batchtune did not start: nothing changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchtune.scripts


@pytest.mark.process
def test_without_the_variable_nothing_is_patched(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the user\\'s own')\n")
    hook = Path(batchtune.scripts.__file__).with_name("hook")
    code = "import sys; print([name for name in sys.modules if 'batchtune' in name])"
    environment = {**os.environ, "PYTHONPATH": f"{hook}{os.pathsep}{tmp_path}"}
    environment.pop("BATCHTUNE_SCRIPT", None)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "the user's own\n[]\n"
    assert ran.stderr == ""
