"""The names in the README and the other pages are those of the code."""

import re

import terminal_picture
from test_pages import PAGES, ROOT

from batchtune.buckets import STRATEGIES
from batchtune.manifests import FORMATS
from batchtune.manifests.formats import KNOWN_UNITS
from batchtune.workloads import BUILTINS

TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_known_column_is_listed_under_its_unit():
    for unit in {unit for unit in KNOWN_UNITS.values() if unit}:
        line = next(
            line for line in TEXT.splitlines() if line.startswith(f"| {unit} |")
        )
        listed = set()
        for name in re.findall(r"`([^`]+)`", line):
            listed.add(f"duration{name}" if name.startswith("_") else name)
        assert listed == {
            name for name, its_unit in KNOWN_UNITS.items() if its_unit == unit
        }


def test_every_format_strategy_and_built_in_workload_is_named():
    for name in (*FORMATS, *STRATEGIES, *(f"builtin:{name}" for name in BUILTINS)):
        assert f"`{name}`" in TEXT


def test_every_place_that_they_point_to_is_there():
    for page in PAGES:
        links = re.findall(
            r"\]\((?!https:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")
        )
        for name, anchor in links:
            target = page.parent / name if name else page
            assert target.exists(), (page.name, name)
            assert not anchor or anchor in anchors_of(target), (page.name, anchor)


def anchors_of(page):
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in headings
    ]


def test_the_first_page_has_at_most_700_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_the_terminal_shows_what_the_kept_run_prints():
    drawn = terminal_picture.PICTURE.read_text(encoding="utf-8")
    assert drawn == terminal_picture.picture(), "run tests/terminal_picture.py"
