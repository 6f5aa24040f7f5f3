"""The help: a manual page for each command, whose examples would run; and what is said of misspelt words."""

import pytest
from cli.conftest import flat

from batchtune.cli.app import COMMANDS, load_command

EXAMPLES = [
    (name, line)
    for name in COMMANDS
    for line in load_command(name).epilog.strip().splitlines()
]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_a_manual_page(name):
    command = load_command(name)
    text = command.make_context(name, [], resilient_parsing=True).get_help()
    assert command.help.strip().splitlines()[0] == COMMANDS[name].summary
    assert "\nExamples:\n  batchtune " in text
    assert all(parameter.help for parameter in command.params)
    assert [
        line
        for line in text.splitlines()
        if len(line) > 80 and not line.startswith("  batchtune ")
    ] == []


def test_options_of_a_project_can_be_set_elsewhere():
    of_one_line = {
        "force",
        "quiet",
        "json",
        "full",
        "output",
        "summary",
        "histogram",
        "engine",
        "ray_address",
        "list_known",
        "help",
        "command",
    }
    for name in COMMANDS:
        options = [
            one for one in load_command(name).params if one.param_type_name == "option"
        ]
        unset = {one.name for one in options if not one.envvar}
        assert unset <= of_one_line | {"manifest"}
        assert all(one.envvar.startswith("BATCHTUNE_") for one in options if one.envvar)


def test_an_example_fits_on_a_usual_terminal():
    """The commands' pages show the same lines: test_pages.py runs them."""
    for name, line in EXAMPLES:
        assert line.startswith(f"batchtune {name}") and len(line) <= 108


def test_the_main_help_lists_commands_settings_and_exit_codes(batchtune, succeed):
    shown = succeed("--help")
    listed = flat(shown.stdout)
    assert all(
        f"{name} {declared.summary}" in listed for name, declared in COMMANDS.items()
    )
    assert "BATCHTUNE_NUM_BUCKETS" in listed and "130 interrupted" in listed
    assert batchtune().returncode == 2


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["sweep-bucket"], "sweep-buckets"),
        (["sweep-buckets", "--num_buckets", "3"], "--num-buckets"),
        (["sweep-buckets", "m.csv", "--strategy", "optimum"], "'optimal'"),
        (["sweep-buckets", "m.csv", "--unit", "m"], "'ms'"),
        (["schema", "sweep.json"], "'sweep'"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(batchtune, tmp_path, words, meant):
    (tmp_path / "m.csv").write_text("id,duration\na,1.5\n")
    (tmp_path / "batchtune-run").mkdir()
    ran = batchtune(*words)
    assert ran.returncode in (1, 2) and ran.stdout == ""
    assert meant in ran.stderr


def test_bash_completes_commands_and_options(batchtune):
    for line, offered in (
        ("batchtune ", set(COMMANDS)),
        ("batchtune sweep-buckets --num", {"--num-buckets"}),
    ):
        place = len(line.split(" ")) - 1
        env = {
            "_BATCHTUNE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(place),
        }
        assert set(batchtune(env=env).stdout.split()) == offered


def test_a_manifest_is_not_required_with_a_command(batchtune):
    for command in ("tune", "probe-oom", "run"):
        said = flat(batchtune(command, "--help").stdout)
        assert "[required without -- COMMAND]" in said
        assert "[required]" not in said
