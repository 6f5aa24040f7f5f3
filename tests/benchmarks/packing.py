"""batchtune's packing next to other trainers': `python tests/benchmarks/packing.py`.

All in one run, on the public token lengths of `public_lengths.py` (another folder: `--data`), in a random order, cut at
the budget. The others are our twins of them, which `tests/packing/test_twins.py` holds to the real ones list for list;
their times are the twins', not those of the real packers.

- `steps`: global batches of `--global-batch` sequences for 8 ranks: micro-batches of all steps; the time of the slowest
  rank / the mean of the ranks', over the steps, by the time law of `batchtune.packing.time_law.DENSE_7B`; the same time
  / that if Karmarkar-Karp divides the sequences by that law without any budget, over the steps and in the worst one;
  how many micro-batches exceed the budget; the seconds of packing. verl, today and before its pull request 7553, first
  divides the sequences among ranks by Karmarkar-Karp with equal counts, as its trainer's `balance_batch` does.
- `epochs`: whole data sets, for 8 ranks that wait for each other at every micro-batch: axolotl and TRL pack so, in
  their order, and ranks take micro-batches in turn. `batchtune` is the sampler's first epoch.
- `bounds`: whole data sets in one pool: micro-batches / ⌈tokens / budget⌉ by `even` and by first-fit-decreasing, the
  slowest rank of ours / that of Karmarkar-Karp on the same micro-batches, and whether both bounds hold.
- `cap`: micro-batches until there are 10⁶, and how many of them exceed the budget.
- `speed`: seconds to pack a million lengths, drawn from each data set, into lists for 8 ranks.

Prints a table of each, or JSON (`--json`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from public_lengths import SETS, IntArray, folder

import batchtune
from batchtune.epochs.layout import Dealing, Drawing, drawn
from batchtune.packing.batcher import PackedBatcher
from batchtune.packing.figures import in_turn, row_of
from batchtune.packing.packed import Packed
from batchtune.packing.packing import Budget
from batchtune.packing.ranks import karmarkar_karp
from batchtune.packing.time_law import DENSE_7B
from batchtune.packing.twins import (
    axolotl_batches,
    slime_steps,
    trl_bfd,
    verl_micro_batches,
)
from batchtune.results import PackedRow

BUDGETS = (2048, 4096, 8192, 16_384)
RANKS = 8
BIN_SIZE = 200  # axolotl's default
POOL = 8192  # the sampler's default
MILLION = 1_000_000
T = TypeVar("T")
# Of a step: the micro-batches of each rank.
Step = list[list[list[int]]]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=folder())
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.data is None:
        parser.error("the public lengths are not here: give their folder with --data")
    random = np.random.default_rng(0)
    data = {name: random.permutation(read(options.data)) for name, read in SETS.items()}
    measured = {
        "steps": list(of_steps(data, options.global_batch)),
        "epochs": list(of_epochs(data)),
        "bounds": list(bounds(data)),
        "cap": [cap(data)],
        "speed": list(speed(data)),
    }
    if options.json:
        print(json.dumps(measured, indent=2))
        return
    for name, rows in measured.items():
        print(f"\n## {name}\n")
        print_table(rows)


def of_steps(data: dict[str, IntArray], size: int) -> Iterator[dict[str, Any]]:
    """Packs global batches."""
    packers: dict[str, Callable[[list[int], int], Step]] = {
        "batchtune": ours,
        "verl": lambda held, budget: verl(held, budget, keeps_cap=True),
        "verl before 7553": lambda held, budget: verl(held, budget, keeps_cap=False),
        "slime": lambda held, budget: slime(held, budget, balanced=False),
        "slime balance_data": lambda held, budget: slime(held, budget, balanced=True),
    }
    for name, lengths in data.items():
        for budget in BUDGETS:
            tokens = np.minimum(lengths, budget)
            steps = [
                tokens[first : first + size].tolist()
                for first in range(0, tokens.size - size + 1, size)
            ]
            least = [slowest_by_karmarkar_karp(held) for held in steps]
            mean = sum(DENSE_7B.of_sequences(np.array(held)).sum() for held in steps)
            for packer, pack in packers.items():
                seconds, packed = timed(
                    lambda pack=pack, steps=steps, budget=budget: [
                        pack(held, budget) for held in steps
                    ]
                )
                slowest = []
                totals = []
                for held, step in zip(steps, packed, strict=True):
                    slowest.append(max(work_of(held, batches) for batches in step))
                    for batches in step:
                        totals += [
                            sum(held[index] for index in batch) for batch in batches
                        ]
                yield {
                    "data": name,
                    "budget": budget,
                    "packer": packer,
                    "steps": len(steps),
                    "micro-batches": len(totals),
                    "slowest / mean": round(sum(slowest) / mean * RANKS, 4),
                    "/ karmarkar_karp": round(sum(slowest) / sum(least), 4),
                    "worst step": round(max(map(truediv, slowest, least)), 4),
                    "over cap": sum(total > budget for total in totals),
                    "seconds": round(seconds, 3),
                }


def ours(lengths: list[int], budget: int) -> Step:
    """A step of batchtune's."""
    batches = batchtune.pack(lengths, budget, world_size=RANKS)
    return [batches[rank::RANKS] for rank in range(RANKS)]


def verl(lengths: list[int], budget: int, *, keeps_cap: bool) -> Step:
    """A step of verl's: sequences to ranks, then each rank's to micro-batches."""
    work = DENSE_7B.of_sequences(np.array(lengths)).astype(int).tolist()
    parts = karmarkar_karp(work, RANKS, equal_size=True)
    ranks = [sorted(part) for part in parts]
    held = [[lengths[index] for index in part] for part in ranks]
    step = verl_micro_batches(held, budget, keeps_cap=keeps_cap)
    return [
        [[part[place] for place in batch] for batch in batches]
        for part, batches in zip(ranks, step, strict=True)
    ]


def slime(lengths: list[int], budget: int, *, balanced: bool) -> Step:
    """A step of slime's."""
    work = None
    if balanced:
        work = DENSE_7B.of_sequences(np.array(lengths)).tolist()
    return slime_steps(
        lengths,
        budget,
        world_size=RANKS,
        global_batch_size=len(lengths),
        work=work,
    )[0]


def slowest_by_karmarkar_karp(lengths: list[int]) -> float:
    """The slowest of ranks that share the sequences, whatever the micro-batches."""
    work = DENSE_7B.of_sequences(np.array(lengths)).tolist()
    parts = karmarkar_karp(work, RANKS, equal_size=False)
    return max(sum(work[index] for index in part) for part in parts)


def work_of(lengths: list[int], batches: list[list[int]]) -> float:
    """The time of a rank."""
    held = np.array([lengths[index] for batch in batches for index in batch])
    return float(DENSE_7B.of_sequences(held).sum())


def of_epochs(data: dict[str, IntArray]) -> Iterator[dict[str, Any]]:
    """Packs whole data sets."""
    dealing = Dealing(world_size=RANKS)
    for name, lengths in data.items():
        for budget in BUDGETS:
            tokens = np.minimum(lengths, budget)
            as_list = tokens.tolist()
            settings = Budget(max_tokens=budget)

            def sampler(
                tokens: IntArray = tokens, settings: Budget = settings
            ) -> Packed:
                drawing = Drawing()
                cut = PackedBatcher(tokens, settings, POOL).cut(drawing, dealing)
                packed = Packed(cut.examples, cut.layout.batch_sizes)
                return packed.ordered(drawn(cut, drawing))

            def axolotl(lengths: list[int] = as_list, budget: int = budget) -> Packed:
                order = range(len(lengths))
                batches = axolotl_batches(lengths, order, budget, bin_size=BIN_SIZE)
                return Packed.of_lists(batch for (batch,) in batches)

            def trl(lengths: list[int] = as_list, budget: int = budget) -> Packed:
                return Packed.of_lists(trl_bfd(lengths, budget))

            for packer, pack in (
                ("batchtune", sampler),
                ("axolotl", axolotl),
                ("trl", trl),
            ):
                seconds, packed = timed(pack)
                slots = in_turn(packed.count, dealing)
                row = row_of(packed, slots, tokens, tokens, settings, RANKS)
                yield {
                    "data": name,
                    "budget": budget,
                    "packer": packer,
                    **of_row(row),
                    "seconds": round(seconds, 3),
                }


def of_row(row: PackedRow) -> dict[str, Any]:
    """The columns of an epoch."""
    return {
        "micro-batches": row.batches,
        "/ bound": round(row.batches / row.lower_bound, 4),
        "slowest / mean": round(row.slowest_rank, 4),
        "over cap": row.over_cap,
    }


def bounds(data: dict[str, IntArray]) -> Iterator[dict[str, Any]]:
    """Holds the packer to first-fit-decreasing, and ranks to Karmarkar-Karp."""
    for name, lengths in data.items():
        for budget in BUDGETS:
            tokens = np.minimum(lengths, budget)
            settings = Budget(max_tokens=budget)
            lowest = -(-int(tokens.sum()) // budget)
            even = settings.packed(tokens).count
            first_fit = Budget(max_tokens=budget, packer="first-fit").packed(tokens)
            dealt = Packed.of_lists(batchtune.pack(tokens, budget, world_size=RANKS))
            seconds = settings.seconds(dealt, tokens)
            slowest = float(seconds.reshape(-1, RANKS).sum(axis=0).max())
            parts = karmarkar_karp(seconds.tolist(), RANKS, equal_size=True)
            by_differencing = max(float(seconds[part].sum()) for part in parts)
            possible = first_fit.count <= 1.01 * lowest
            yield {
                "data": name,
                "budget": budget,
                "even / bound": round(even / lowest, 4),
                "first-fit / bound": round(first_fit.count / lowest, 4),
                "slowest / karmarkar_karp's": round(slowest / by_differencing, 5),
                "holds": (even <= 1.01 * lowest or not possible)
                and slowest <= 1.02 * by_differencing,
            }


def cap(data: dict[str, IntArray]) -> dict[str, Any]:
    """Counts micro-batches that exceed their budget."""
    random = np.random.default_rng(1)
    micro_batches = 0
    over = 0
    while micro_batches < MILLION:
        for lengths in data.values():
            budget = int(random.integers(512, 32_769))
            tokens = random.choice(np.minimum(lengths, budget), 50_000)
            packed = Packed.of_lists(batchtune.pack(tokens, budget, world_size=RANKS))
            micro_batches += packed.count
            over += int(np.count_nonzero(packed.sums(tokens) > budget))
    return {"micro-batches": micro_batches, "over cap": over}


def speed(data: dict[str, IntArray]) -> Iterator[dict[str, Any]]:
    """Times a million lengths."""
    random = np.random.default_rng(2)
    for name, lengths in data.items():
        for budget in (2048, 16_384):
            tokens = np.minimum(random.choice(lengths, MILLION), budget)
            row: dict[str, Any] = {"data": name, "budget": budget}
            for packer in ("even", "first-fit", "best-fit"):
                started = time.process_time()
                wall, batches = timed(
                    lambda packer=packer, tokens=tokens, budget=budget: batchtune.pack(
                        tokens, budget, packer=packer, world_size=RANKS
                    )
                )
                row["micro-batches"] = len(batches)
                row[f"{packer}, seconds"] = round(wall, 2)
                row[f"{packer}, of processor"] = round(time.process_time() - started, 2)
            yield row


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what it gave."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints rows in columns."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(
                text.rjust(width) for text, width in zip(line, widths, strict=True)
            )
        )


if __name__ == "__main__":
    main()
