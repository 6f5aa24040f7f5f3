"""Runs batchtune as a user does: in this process, or in one of its own if streams or signals matter."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from shared_nursery import OF_LOADERS, SHARED
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.probe.devices.law import MadeDevice

KNOWN = f"{Path(__file__).parents[1] / 'probe' / 'known_workload.py'}:Known"
FAULTY = f"{Path(__file__).parents[1] / 'probe' / 'faulty_workload.py'}"
MIB = 1 << 20
# One example of 20 s takes 52 MiB, of 10 s 18, of 5 s 7.
LAW = "law:constant=100MiB,linear=1MiB,quadratic=0.08MiB,limit=460MiB"
# The same for real.
WORKLOAD = [
    *("--workload", KNOWN, "--set", f"a={MIB}", "--set", f"b={0.08 * MIB}"),
    *("--device", "cpu", "--memory", "460MiB"),
]
# Memory and time depend on the padded length alone.
STEADY_LAW = (
    "law:constant=220MiB,linear=1MiB,limit=400MiB,seconds=0,seconds_linear=1e-5"
)
# Other programs run beside the tests: no time is held unless a workload is much slower on purpose.
ANY_TIME = ["--time-tolerance", "1000"]


@pytest.fixture
def batchtune(tmp_path):
    """`batchtune("sweep-buckets", ...)` in an empty folder, without the caller's settings.

    In this process, which saves Python's start; in one of its own if options of `subprocess.run` are given. It has to
    end with `code` if that is given.
    """

    def run(
        *arguments,
        env=None,
        code=None,
        **options,
    ):
        run = run_in if options else run_here_in
        return run(tmp_path, *arguments, env=env, code=code, **options)

    return run


@pytest.fixture
def succeed(batchtune):
    """As `batchtune`, for a command that has to end with 0."""

    return partial(batchtune, code=0)


def flat(text):
    """A text in one line, as it was before it was broken to the width of a terminal."""
    return " ".join(text.split())


def result_in(folder, name="sweep"):
    """A result of the run in this folder."""
    path = folder / "batchtune-run" / f"{name}.json"
    return json.loads(path.read_text())


def ended(ran, code):
    """A command that ran, and had to end with this code unless it is None."""
    assert code in (None, ran.returncode), f"{ran.args}: {ran.stdout}\n{ran.stderr}"
    return ran


def run_here(*arguments, env=None, code=None):
    """Runs a command in this process; workers come from a nursery that runs already, unless they need `env`."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    with pytest.MonkeyPatch.context() as patch:
        if env is None:
            patch.setattr("batchtune.probe.supervisor.Nursery", lambda *_: SHARED)
            patch.setattr("batchtune.loaders.runner.Nursery", lambda *_: OF_LOADERS)
        try:
            ran = CliRunner().invoke(
                app, list(map(str, arguments)), env=env, prog_name="batchtune"
            )
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    done = (arguments, ran.exit_code, ran.stdout, ran.stderr)
    return ended(subprocess.CompletedProcess(*done), code)


def run_here_in(folder, *arguments, env=None, code=None):
    """Runs a command in this process and in a folder, without the caller's settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("BATCHTUNE_")]:
            patch.delenv(name)
        return run_here(*arguments, env=env, code=code)


def run_in(folder, *arguments, env=None, code=None, **options):
    """Runs a command in a folder, without the caller's settings."""
    ran = start_in(folder, command(*arguments), env or {}, **options)
    return ended(ran, code)


def start_in(folder, words, env, **options):
    """Runs any program in a folder, without the caller's settings."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("BATCHTUNE_")
    }
    piped = {"capture_output": True, "text": True, **options}
    return subprocess.run(words, cwd=folder, env={**clean, **env}, **piped)


@pytest.fixture(scope="session")
def verified(made_once):
    """A folder with a manifest, the run folder of `tune --verify --json`, and its stdout; not to be written to."""

    def make(folder):
        write_lengths(folder / "lengths.csv", [5, 10, 20] * 200)
        options = ["--device", STEADY_LAW, "--num-buckets", "2", "--verify", "--json"]
        ran = run_here_in(folder, "tune", "lengths.csv", *options, code=0)
        (folder / "stdout").write_text(ran.stdout)

    return made_once("verified", make)


@pytest.fixture
def plan(monkeypatch):
    """`plan(fault)`: what devices made by a law do instead of the law, from now on."""

    def plan(fault):
        made = MadeDevice.of

        def of(*arguments):
            device = made(*arguments)
            device.fault = fault
            return device

        monkeypatch.setattr(MadeDevice, "of", of)

    return plan


def interrupted_at(number):
    """An interruption by the user in the n-th trial or step, from 0."""

    def fault(shape, run):
        if run == number:
            raise KeyboardInterrupt

    return fault


def command(*arguments):
    return [sys.executable, "-m", "batchtune", *map(str, arguments)]


@pytest.fixture
def manifest(tmp_path):
    """36 examples of 5, 10 and 20 s."""
    return write_manifest(tmp_path / "lengths.csv")


def write_manifest(path):
    return write_lengths(path, [5, 10, 20] * 12)


def write_lengths(path, lengths, key="duration"):
    """Writes a table of examples with these lengths."""
    rows = (f"utt{number},{length}\n" for number, length in enumerate(lengths))
    path.write_text(f"id,{key}\n" + "".join(rows))
    return path


def contents(folder):
    """The bytes of each file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
