"""The help: a manual page for each command, whose examples would run; and what is said of misspelt commands."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import Run

from batchtune.cli.app import COMMANDS, app, load_command
from batchtune.cli.commands import environment_variables

Called = Callable[..., tuple[object, str, str]]


def help_of(name: str) -> str:
    context = load_command(name).make_context(name, [], parent=None, resilient_parsing=True)
    return str(context.get_help())


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """`called("tune", ...)` in this process: for what never comes to run. Exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the tests' own process stay as they are

    def call(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            app(arguments, prog_name="batchtune")
        return ended.value.code, *capsys.readouterr()

    return call


def all_examples() -> list[tuple[str, str]]:
    return [(name, line) for name in COMMANDS for line in load_command(name).epilog.strip().splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_a_manual_page(name: str) -> None:
    text = help_of(name)
    assert load_command(name).help.strip().splitlines()[0] == COMMANDS[name]
    assert COMMANDS[name] in text
    assert "\nExamples:\n  batchtune " in text
    assert "\nExit codes:\n  0    done\n" in text
    assert all(parameter.help for parameter in load_command(name).params)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("  batchtune ")] == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if environment_variables(load_command(name))[0]])
def test_the_help_names_each_option_and_its_variable(name: str) -> None:
    alike, others = environment_variables(load_command(name))
    text = " ".join(help_of(name).split())
    first = next(iter(alike))
    assert f"{first} as {alike[first]}" in text
    assert all(f"{option} as {variable}" in text for option, variable in others.items())
    # Of one command line, never of a project: what to show this time, and where a single file goes.
    never = {"--force", "--quiet", "--json", "--full", "--output", "--summary", "--list", "--patch", "--key-path"}
    never.add("--manifest")
    options = {max(one.opts, key=len) for one in load_command(name).params if one.param_type_name == "option"}
    assert options - never <= {*alike, *others}


def test_an_examples_options_are_there() -> None:
    for name, line in all_examples():
        assert len(line) <= 108  # on a usual terminal
        words = shlex.split(line)
        words = words[: next((place for place, word in enumerate(words) if word in ("|", ">")), None)]
        assert words[:2] == ["batchtune", name]
        load_command(name).make_context(name, words[2:])  # raises where one is unknown or its value can't be parsed


@pytest.mark.parametrize("line", [line for name, line in all_examples() if name in ("sweep-buckets", "schema")])
def test_an_example_that_needs_no_device_runs(batchtune: Run, tmp_path: Path, line: str) -> None:
    rows = (f"utt{number},{1 + number % 23}\n" for number in range(200))
    (tmp_path / "train.csv").write_text("id,duration\n" + "".join(rows))
    words = shlex.split(line.partition(" | ")[0])
    needs = ["--max-batch-length", "600"] if words[1] == "sweep-buckets" and "--max-batch-length" not in words else []
    ran = batchtune(*words[1:], *needs)
    assert ran.returncode == 0, ran.stderr


def test_without_arguments_the_help_is_shown(batchtune: Run) -> None:
    bare, short, long = batchtune(), batchtune("-h"), batchtune("--help")
    assert bare.returncode == 2
    assert short.returncode == long.returncode == 0
    assert bare.stderr.strip() == short.stdout.strip() == long.stdout.strip()
    listed = " ".join(long.stdout.split())
    assert all(f"{name} {purpose}" in listed for name, purpose in COMMANDS.items())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("sweep-bucket", "Did you mean sweep-buckets?"),
        ("sweep_buckets", "Did you mean sweep-buckets?"),
        ("sweep", "Did you mean sweep-buckets or sweep-stream?"),
        ("probe", "Did you mean probe-oom?"),
        ("Tune", "Did you mean tune or tune-loader?"),
        ("xyz", "Commands: tune, probe-oom,"),
    ],
)
def test_a_misspelt_command_gets_a_suggestion(called: Called, written: str, meant: str) -> None:
    code, stdout, stderr = called(written, "train.csv")
    assert code == 2 and stdout == ""
    assert f"Unknown command '{written}'. {meant}" in stderr


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["sweep-buckets", "--num_buckets", "3"], "Unknown option --num_buckets. Did you mean --num-buckets?"),
        (["sweep-buckets", "--num-bucket=3"], "Unknown option --num-bucket. Did you mean --num-buckets?"),
        (
            ["sweep-buckets", "--workload", "w"],
            "It is an option of `batchtune tune`, `batchtune probe-oom`, `",
        ),
        (["export", "--run", "x"], "Unknown option --run. RUN is an argument here: `batchtune export RUN`."),
        (["doctor", "--qqqq"], "Unknown option --qqqq. `batchtune doctor --help` lists"),
        (["--debgu"], "Unknown option --debgu. Did you mean --debug?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelt_option_gets_a_suggestion(called: Called, written: list[str], meant: str) -> None:
    code, stdout, stderr = called(*written)
    assert code == 2 and stdout == ""
    assert meant in stderr
