"""The benchmark of recipes: what it makes of its rounds, and that the README's table is what the kept rounds say."""

from pathlib import Path

import pytest
from benchmarks import recipes
from benchmarks.recipe_list import SCRIPT
from benchmarks.recipe_summary import (
    BEGIN,
    README,
    block,
    read_summaries,
    with_block,
)

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "benchmarks" / "results"


def test_the_table_of_the_readme_is_what_the_kept_rounds_say():
    readme = README.read_text(encoding="utf-8")
    if BEGIN not in readme:
        assert not list(KEPT.glob("*.json")), "`recipes.py summarise` was not run"
        pytest.skip("no rounds are kept yet")
    assert with_block(readme, block(read_summaries(KEPT))) == readme


@pytest.mark.parametrize("recipe", recipes.RECIPES.values(), ids=lambda one: one.name)
def test_unchanged_scripts_contend_in_every_recipe(recipe):
    assert SCRIPT.name in [contender.name for contender in recipe.contenders]
