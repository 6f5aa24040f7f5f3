"""The name `batchtune` on the package index is a stranger's: nothing tells users to install it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("batchtune", "examples", ".ci", "tests")
FILES = [path for path in ROOT.iterdir() if path.is_file()]
FILES += [path for place in PLACES for path in (ROOT / place).rglob("*")]
TEXTS = (".md", ".py", ".toml", ".yml", ".yaml", ".j2", ".json", "")
# In a shell's command: `pip install … batchtune`, but for its checkout's folder and for `batchtune-cli`.
STRANGERS = re.compile(
    r"pip3? install(?:[^\n&;|`]*[ '\"])?batchtune(?![-\w/])|batchtune\[\w"
)


def test_nothing_names_the_strangers_distribution():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in FILES
        if path.is_file() and path.suffix in TEXTS and path != Path(__file__)
        for match in STRANGERS.finditer(path.read_text(errors="replace"))
    ]
    assert found == []


def test_distribution_and_package_have_different_names():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^name = "(.*)"$', project, re.MULTILINE) == ["batchtune-cli"]
    assert 'batchtune = "batchtune.cli:main"' in project
    assert 'packages = ["batchtune"]' in project
