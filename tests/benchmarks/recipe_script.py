"""Trains a recipe as a script of its own: `python tests/benchmarks/recipe_script.py RECIPE.json`.

It knows nothing of batchtune: a data set, a shuffling DataLoader with a fixed batch size, a loop that accumulates
gradients. `recipes.py` writes RECIPE.json, and trains this command with `batchtune run`.
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
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Examples(Dataset):
    """The examples of a recipe, by their place in its manifest."""

    def __init__(
        self,
        training,
        lengths,
        targets,
    ):
        self.training = training
        self.lengths = lengths
        self.targets = targets

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.training.numbered(index, self.lengths[index], self.targets[index])


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.json")
    parser.add_argument("--max-steps", type=int, help="end after so many steps")
    given = parser.parse_args()
    recipe = json.loads(given.recipe.read_text())
    training = getattr(recipe_models, recipe["training"])(**recipe["options"])
    torch.manual_seed(0)
    device = torch.device(recipe["device"])
    training.setup(device)
    examples = Examples(training, recipe["lengths"], recipe["targets"])
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(
        examples,
        batch_size=recipe["batch_size"],
        sampler=RandomSampler(examples, generator=order),
        collate_fn=training.collate,
    )
    steps = 0
    items = 0
    for number, batch in enumerate(loader, 1):
        on_device = {name: values.to(device) for name, values in batch.items()}
        loss, its_items = training.accumulate(on_device)
        items += its_items
        size = list(next(iter(batch.values())).shape)
        print(f"batch {number}, {size}: loss {loss / its_items:.3f}", flush=True)
        if number % recipe["accumulate"] and number != len(loader):
            continue
        training.finish(items)
        items = 0
        steps += 1
        if steps == given.max_steps:
            break


if __name__ == "__main__":
    main()
