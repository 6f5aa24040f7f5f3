"""The benchmark of recipes: what it makes of its rounds, and that the README's table is what the kept rounds say."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks import recipe_summary, recipes
from benchmarks.recipe_list import SCRIPT
from benchmarks.recipe_summary import (
    BEGIN,
    README,
    Summary,
    block,
    goals,
    read_summaries,
    with_block,
)

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "benchmarks" / "results"


def made_results(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Results of a recipe whose contenders took so long in each round; the first is what it ships."""
    kinds = dict.fromkeys(seconds, "peer")
    kinds[next(iter(seconds))] = "shipped"
    for name in ("batchtune", recipe_summary.STEPS_KEPT):
        if name in kinds:
            kinds[name] = "batchtune"
    facts = {
        "setting": "batch size 8",
        "finding_seconds": 30.0,
        "finding_trials": 5,
        "finding_ooms": 2,
        "batches": 10,
        "padding_ratio": 0.25,
    }
    rounds = []
    for number in range(len(next(iter(seconds.values())))):
        round_of = {}
        for name, times in seconds.items():
            round_of[name] = {
                "lr": 1e-3,
                "oom": False,
                "steps": 2,
                "seconds": times[number],
                "peak_bytes": 90 << 20,
                "loss": 2.0 + 0.1 * number,
            }
        rounds.append(round_of)
    return {
        "recipe": "ctc",
        "machine": "a processor, 2 cores",
        "limit_bytes": 100 << 20,
        "data": "LibriSpeech",
        "examples": 100,
        "total_length": 1000.0,
        "unit": "s",
        "left_out": [],
        "phase_seconds": {"batchtune tune": 30.0, "rounds": 12.0},
        "held_bytes": 40 << 20,
        "predicted_ceiling_bytes": 95 << 20,
        "contenders": {name: {"kind": kinds[name], **facts} for name in seconds},
        "rounds": rounds,
        "trace": {name: [[1.0, 50 << 20], [2.0, 90 << 20]] for name in seconds},
    }


def test_a_missed_goal_is_told() -> None:
    seconds = {"as shipped": [4.0] * 5, "peer": [1.9] * 5, "batchtune": [2.0] * 5}
    kept = recipe_summary.STEPS_KEPT
    results = made_results(seconds | {kept: [1.8] * 5})
    for round_of in results["rounds"]:
        round_of["batchtune"]["loss"] += 1.0
    found = {text: met for met, text in goals([Summary.of(results)])}
    faster = "at least 1.15 times what the recipe ships on 4 recipes: on 1 of 1"
    loss = "loss within the spread of seeds"
    assert found == {
        f"batchtune: {faster}": False,
        f"{kept}: {faster}": False,
        "ctc: at least 5 rounds: 5": True,
        "ctc: batchtune: at least 0.99 times the best peer (peer): 0.950 ± 0.0%": False,
        "ctc: batchtune: at least 0.99 times the best of unchanged loss (peer): 0.950 ± 0.0%": False,
        "ctc: batchtune: no epoch runs out of memory: 0": True,
        f"ctc: batchtune: {loss}: 3.200 ± 0.158, shipped 2.200 ± 0.158": False,
        f"ctc: {kept}: at least 0.99 times the best peer (peer): 1.056 ± 0.0%": True,
        f"ctc: {kept}: at least 0.99 times the best of unchanged loss (peer): 1.056 ± 0.0%": True,
        f"ctc: {kept}: no epoch runs out of memory: 0": True,
        f"ctc: {kept}: {loss}: 2.200 ± 0.158, shipped 2.200 ± 0.158": True,
    }


def test_the_table_of_the_readme_is_what_the_kept_rounds_say() -> None:
    readme = README.read_text(encoding="utf-8")
    if BEGIN not in readme:
        assert not list(KEPT.glob("*.json")), "`recipes.py summarise` was not run"
        pytest.skip("no rounds are kept yet")
    assert with_block(readme, block(read_summaries(KEPT))) == readme


@pytest.mark.parametrize("recipe", recipes.RECIPES.values(), ids=lambda one: one.name)
def test_unchanged_scripts_contend_in_every_recipe(recipe: Any) -> None:
    assert SCRIPT.name in [contender.name for contender in recipe.contenders]
