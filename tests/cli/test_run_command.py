"""Commands of a script and run folders on the command line, without starting a script."""

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "tune python train.py --epochs 1",
            "Put its command after --: batchtune tune -- python train.py --epochs 1",
        ),
        (
            "probe-oom --minutes 3 train.py",
            "batchtune probe-oom --minutes 3 -- train.py",
        ),
        ("tune", "batchtune tune MANIFEST -- python train.py"),
        ("tune -- train.py", "Give it as in a shell: -- python train.py"),
        (
            "record -- no-such-program x",
            "no-such-program can't be started: no program has this name",
        ),
        ("tune m.csv --run=", "'--run': the path is empty"),
        ("verify m.csv --run=", "'--run': the path is empty"),
        ("record --run= -- python", "'--run': the path is empty"),
        ("report --run=", "'RUN': the path is empty"),
    ],
)
def test_a_command_in_the_wrong_place_or_form_is_told_so(words, message):
    ran = CliRunner().invoke(app, words.split())
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())


def test_the_run_folder_is_an_option_too(tmp_path):
    for words in (["report", "--run"], ["report"]):
        ran = CliRunner().invoke(app, [*words, str(tmp_path / "run")])
        assert "Run folder" in ran.output and "does not exist" in ran.output
