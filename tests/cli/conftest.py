"""Runs batchtune as a process, as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app

Run = Callable[..., "subprocess.CompletedProcess[str]"]
KNOWN = f"{Path(__file__).parents[1] / 'probe' / 'known_workload.py'}:Known"
FAULTY = f"{Path(__file__).parents[1] / 'probe' / 'faulty_workload.py'}"
DATA = Path(__file__).parents[2].parent / "shared" / "data"


# Commands that start no process and touch no signal: they run in this one, which saves Python's start.
_HERE = {"sweep-buckets", "report", "export", "schema"}


@pytest.fixture
def batchtune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`batchtune("sweep-buckets", ...)` in an empty folder, without the caller's settings."""

    def run(
        *arguments: object, env: dict[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        if options or not arguments or str(arguments[0]) not in _HERE:
            return run_in(tmp_path, *arguments, env=env, **options)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for name in [name for name in os.environ if name.startswith("BATCHTUNE_")]:
                patch.delenv(name)
            return run_here(*arguments, env=env)

    return run


def run_here(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ran = CliRunner().invoke(app, list(map(str, arguments)), env=env, prog_name="batchtune")
    finally:
        signal.signal(signal.SIGTERM, handler)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return subprocess.CompletedProcess(arguments, ran.exit_code, ran.stdout, ran.stderr)


def run_in(
    folder: Path, *arguments: object, env: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, without the caller's settings."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BATCHTUNE_")}
    return subprocess.run(
        command(*arguments), cwd=folder, env={**clean, **(env or {})}, capture_output=True, text=True, **options
    )  # type: ignore[call-overload, no-any-return]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "batchtune", *map(str, arguments)]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """36 examples of 5, 10 and 20 s."""
    return write_manifest(tmp_path / "lengths.csv")


def write_manifest(path: Path) -> Path:
    path.write_text("id,duration\n" + "".join(f"utt{number},{(5, 10, 20)[number % 3]}\n" for number in range(36)))
    return path
