"""Trains a recipe as a script of its own: `python tests/benchmarks/recipe_script.py RECIPE.json`.

It knows nothing of batchtune: a data set, a DataLoader with a fixed batch size, a loop. `recipes.py` writes
RECIPE.json, tunes this command with `batchtune tune`, and trains it with `batchtune run`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from benchmarks import recipe_models
from benchmarks.recipe_models import Example, Training
from torch.utils.data import DataLoader, Dataset


class Examples(Dataset[Example]):
    """The examples of a recipe, by their place in its manifest."""

    def __init__(
        self,
        training: Training,
        lengths: list[float],
        targets: list[float | None],
    ) -> None:
        self.training = training
        self.lengths = lengths
        self.targets = targets

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        return self.training.numbered(index, self.lengths[index], self.targets[index])


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.json")
    parser.add_argument("--max-steps", type=int, help="end after so many steps")
    given = parser.parse_args()
    recipe = json.loads(given.recipe.read_text())
    training: Training = getattr(recipe_models, recipe["training"])(**recipe["options"])
    torch.manual_seed(0)
    device = torch.device(recipe["device"])
    training.setup(device)
    loader = DataLoader(
        Examples(training, recipe["lengths"], recipe["targets"]),
        batch_size=recipe["batch_size"],
        shuffle=True,
        collate_fn=training.collate,
    )
    for step, batch in enumerate(loader):
        if step == given.max_steps:
            break
        on_device = {name: values.to(device) for name, values in batch.items()}
        loss = training.step(on_device)
        size = list(next(iter(batch.values())).shape)
        print(f"step {step}, {size}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
