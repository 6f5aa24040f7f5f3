"""batchtune's packing next to the bounds that no packer can beat: `python tests/benchmarks/packing.py`.

On the public token lengths of `public_lengths.py`, in a random order, cut at the budget.

- `steps`: global batches of 512 sequences for 8 ranks: micro-batches of all steps; the time of the slowest
  rank, by the time law of `batchtune.packing.DENSE_7B`, / its bound, over the steps and in the worst one. No
  rank is quicker than the mean of all, or than the longest sequence.
- `cap`: micro-batches until there are a million, and how many of them exceed the budget.

Prints a table of each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from public_lengths import SETS, folder

import batchtune
from batchtune.packing import DENSE_7B

BUDGETS = (2048, 4096, 8192, 16_384)
RANKS = 8
GLOBAL_BATCH = 512
MICRO_BATCHES = 1_000_000


def main():
    """Measures and prints."""
    public = folder()
    if public is None:
        sys.exit("the public lengths are not here")
    random = np.random.default_rng(0)
    data = {name: random.permutation(read(public)) for name, read in SETS.items()}
    print_table("steps", list(of_steps(data, GLOBAL_BATCH)))
    print_table("cap", [cap(data, MICRO_BATCHES)])


def of_steps(data, size):
    """Packs global batches."""
    for name, lengths in data.items():
        for budget in BUDGETS:
            tokens = np.minimum(lengths, budget)
            micro_batches = 0
            slowest = []
            bounds = []
            for first in range(0, tokens.size - size + 1, size):
                held = tokens[first : first + size]
                work = DENSE_7B.of_sequences(held)
                batches = batchtune.pack(held, budget, world_size=RANKS)
                micro_batches += len(batches)
                seconds = np.array([work[batch].sum() for batch in batches])
                slowest.append(seconds.reshape(-1, RANKS).sum(axis=0).max())
                bounds.append(max(work.sum() / RANKS, work.max()))
            yield {
                "data": name,
                "budget": budget,
                "steps": len(bounds),
                "micro-batches": micro_batches,
                "slowest / bound": round(sum(slowest) / sum(bounds), 4),
                "worst step": round(float((np.array(slowest) / bounds).max()), 4),
            }


def cap(data, wanted):
    """Counts micro-batches that exceed their budget."""
    random = np.random.default_rng(1)
    micro_batches = 0
    over = 0
    while micro_batches < wanted:
        for lengths in data.values():
            budget = int(random.integers(512, 32_769))
            tokens = random.choice(np.minimum(lengths, budget), 50_000)
            batches = batchtune.pack(tokens, budget, world_size=RANKS)
            micro_batches += len(batches)
            over += sum(int(tokens[batch].sum()) > budget for batch in batches)
    return {"micro-batches": micro_batches, "over cap": over}


def print_table(name, rows):
    """Prints rows in columns."""
    print(f"\n## {name}\n")
    widths = [max(len(key), 12) for key in rows[0]]
    for line in (rows[0], *(row.values() for row in rows)):
        cells = map(str, line)
        print("  ".join(map(str.rjust, cells, widths)))


if __name__ == "__main__":
    main()
