"""The help: a manual page for each command, whose examples would run; and what is said of misspelt words."""

import pytest
from cli.conftest import flat

from batchtune.cli.app import COMMANDS, load_command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_a_manual_page(name):
    command = load_command(name)
    text = command.make_context(name, [], resilient_parsing=True).get_help()
    assert command.help.strip().splitlines()[0] == COMMANDS[name].summary
    assert "\nExamples:\n  batchtune " in text
    assert all(parameter.help for parameter in command.params)
    for line in text.splitlines():
        assert len(line) <= 80 or line.startswith("  batchtune ")
    # The commands' pages show the same lines: test_pages.py runs them.
    for line in command.epilog.strip().splitlines():
        assert line.startswith(f"batchtune {name}") and len(line) <= 108


def test_options_of_a_project_can_be_set_elsewhere():
    of_one_line = ["force", "quiet", "json", "full", "output", "summary", "histogram"]
    of_one_line += [
        "engine",
        "ray_address",
        "list_known",
        "help",
        "command",
        "manifest",
    ]
    for name in COMMANDS:
        for option in load_command(name).params:
            if option.param_type_name == "option" and option.name not in of_one_line:
                assert option.envvar.startswith("BATCHTUNE_")


def test_the_main_help_lists_commands_settings_and_exit_codes(batchtune, succeed):
    listed = flat(succeed("--help").stdout)
    for name, declared in COMMANDS.items():
        assert f"{name} {declared.summary}" in listed
    assert "BATCHTUNE_NUM_BUCKETS" in listed and "130 interrupted" in listed
    batchtune(code=2)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("sweep-bucket", "sweep-buckets"),
        ("sweep-buckets --num_buckets 3", "--num-buckets"),
        ("sweep-buckets lengths.csv --strategy optimum", "'optimal'"),
        ("sweep-buckets lengths.csv --unit m", "'ms'"),
        ("schema sweep.json", "'sweep'"),
    ],
)
@pytest.mark.usefixtures("manifest")
def test_a_misspelt_word_gets_a_suggestion(batchtune, words, meant):
    ran = batchtune(*words.split(), code=2)
    assert ran.stdout == ""
    assert meant in ran.stderr


def test_bash_completes_commands_and_options(batchtune):
    for line, offered in (
        ("batchtune ", set(COMMANDS)),
        ("batchtune sweep-buckets --num", {"--num-buckets"}),
    ):
        env = {
            "_BATCHTUNE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        assert set(batchtune(env=env).stdout.split()) == offered


def test_a_manifest_is_not_required_with_a_command(batchtune):
    for command in ("tune", "probe-oom", "run"):
        said = flat(batchtune(command, "--help").stdout)
        assert "[required without -- COMMAND]" in said
        assert "[required]" not in said
