"""What the rounds of `recipes.py` show: tables, the blocks of README.md and FIGURES.md. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipe_picture import PICTURE, picture_of

from batchtune.errors import BatchtuneError
from batchtune.files import write_whole
from batchtune.probe.devices import backend_for

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FIGURES = ROOT / "examples" / "FIGURES.md"
BEGIN = "<!-- recipes -->"
END = "<!-- /recipes -->"
RECUT = "batchtune, accumulation as it advises"
FILLED = "batchtune, memory filled"
# In the order of the table.
TITLES = {
    "sft": "Fine-tuning on chats (Transformers)",
    "mlm": "Masked language model of code (Transformers)",
    "ctc": "CTC speech recognition (Transformers)",
    "aed": "Encoder-decoder speech recognition (Transformers)",
    "sft-packed": "Fine-tuning on chats, packed (TRL)",
    "ctc-bucketed": "CTC speech recognition, bucketed (SpeechBrain)",
    "stream": "Stream of tar shards (WebDataset)",
}
# Of the losses of the same step, by rounding alone.
SAME_LOSS = 1e-3
UNKNOWN = "–"  # noqa: RUF001  # as in all tables of batchtune


def machine_name(device):
    """Return the name of the device, and for a CPU how many processors may be used."""
    name = backend_for(device).identify(device).name
    if device.startswith("cpu"):
        return f"{name}, {len(os.sched_getaffinity(0))} cores"
    return name


def largest_error(results):
    """Return the largest relative standard error of a contender's times over the shipped setting's, of two rounds on.

    Contenders that ran out of memory have none.
    """
    errors = [0.0]
    for name in results["contenders"]:
        if ratios := ratios_of(results, name):
            deviation = statistics.stdev(ratios) / len(ratios) ** 0.5
            errors.append(deviation / statistics.mean(ratios))
    return max(errors)


def ratios_of(results, name):
    """Return how many times as fast as shipped a contender was, in each round; empty if either ran out of memory."""
    shipped = next(iter(results["contenders"]))
    ratios = []
    for round_of in results["rounds"]:
        mine = round_of[name]
        theirs = round_of[shipped]
        if mine["oom"] or theirs["oom"]:
            return []
        ratios.append(theirs["seconds"] / mine["seconds"])
    return ratios


@dataclass(frozen=True)
class Shown:
    """A contender over all rounds.

    Attributes:
        seconds: Of an epoch; None if each ran out of memory.
        ooms: Epochs that ran out of memory, and ended there.
        times_shipped: How many times as fast as the shipped setting; None if either ran out of memory.
        losses: Of each round, which is a seed.
        curve_difference: The largest relative difference between the loss of a step and that of the shipped training's;
            None if they have other numbers of steps.
    """

    name: str
    kind: str
    facts: dict[str, Any]
    seconds: float | None
    ooms: int
    times_shipped: float | None
    losses: list[float]
    curve_difference: float | None

    @classmethod
    def of(cls, results, name):
        """Summarise the rounds of a contender."""
        rounds = [round_of[name] for round_of in results["rounds"]]
        whole = [one["seconds"] for one in rounds if not one["oom"]]
        ratios = ratios_of(results, name)
        differences = [one.get("curve_difference") for one in rounds]
        difference = None if None in differences else max(differences)
        return cls(
            name=name,
            kind=results["contenders"][name]["kind"],
            facts=results["contenders"][name],
            seconds=statistics.mean(whole) if whole else None,
            ooms=sum(one["oom"] for one in rounds),
            times_shipped=statistics.mean(ratios) if ratios else None,
            losses=[one["loss"] for one in rounds if "loss" in one],
            curve_difference=difference,
        )

    @property
    def trains_the_same(self):
        """Whether each step's loss is the shipped training's, but for rounding."""
        return self.curve_difference is not None and self.curve_difference < SAME_LOSS

    @property
    def loss(self):
        """Mean and standard deviation over seeds; None with fewer than two."""
        if len(self.losses) < 2:
            return None
        return statistics.mean(self.losses), statistics.stdev(self.losses)


@dataclass(frozen=True)
class Summary:
    """One recipe with all its contenders."""

    results: dict
    contenders: list[Shown]

    @classmethod
    def of(cls, results):
        """Summarise a recipe."""
        contenders = [Shown.of(results, name) for name in results["contenders"]]
        return cls(results, contenders)

    @property
    def name(self):
        """The recipe's name."""
        return str(self.results["recipe"])

    @property
    def shipped(self):
        """What the recipe ships."""
        return self.contenders[0]

    @property
    def batchtune(self):
        """What batchtune recommends by default."""
        return next(one for one in self.contenders if one.name == "batchtune")

    @property
    def recut(self):
        """The same training with the accumulation that its report advises; None if that is no faster."""
        return next((one for one in self.contenders if one.name == RECUT), None)

    @property
    def title(self):
        """The recipe's title."""
        return TITLES[self.name]

    @property
    def batch_words(self):
        """What a step is as shipped, for people."""
        words = str(self.shipped.facts["setting"])
        return f"{words} × {self.results['accumulate']}" if self.accumulates else words

    @property
    def accumulates(self):
        """Whether the recipe cuts a step into micro-batches."""
        return int(self.results["accumulate"]) > 1

    @property
    def best_peer_of_same_loss(self):
        """The fastest that never ran out of memory, and whose loss is within the spread of seeds."""
        peers = [
            one
            for one in self.contenders
            if one.kind == "peer" and not one.ooms and self.loss_is_unchanged(one)
        ]
        return min(peers, key=lambda one: one.seconds or math.inf, default=None)

    def loss_is_unchanged(self, one):
        """Return whether a mean loss is above the shipped one's by no more than the seeds explain.

        That is twice the standard error of the difference, sqrt((sd² + sd²) / n). None with fewer than two seeds.
        """
        mine = one.loss
        theirs = self.shipped.loss
        if mine is None or theirs is None:
            return None
        seeds = min(len(one.losses), len(self.shipped.losses))
        error = ((mine[1] ** 2 + theirs[1] ** 2) / seeds) ** 0.5
        return mine[0] - theirs[0] <= 2 * error


def read_summaries(folder):
    """Read all kept results, in the order of the table. Raises BatchtuneError if there are none."""
    summaries = []
    for name in TITLES:
        path = folder / f"{name}.json"
        if path.exists():
            results = json.loads(path.read_text(encoding="utf-8"))
            if results["rounds"]:
                summaries.append(Summary.of(results))
    if not summaries:
        raise BatchtuneError(
            f"{folder} holds no results", "Run `python tests/benchmarks/recipes.py`."
        )
    return summaries


def table(summaries):
    """Return the table: seconds an epoch, how many times as fast as shipped, and losses after an epoch."""
    lines = [
        "| recipe | as shipped | batchtune | times as fast | with its accumulation | loss (shipped) | "
        "largest difference of a step's loss | best peer that learns as much |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for summary in summaries:
        ours = summary.batchtune
        recut = summary.recut
        peer = summary.best_peer_of_same_loss
        cells = [
            f"{summary.title}, {summary.batch_words}",
            epoch_of(summary.shipped),
            epoch_of(ours),
            times(ours.times_shipped),
            UNKNOWN if recut is None else times(recut.times_shipped),
            f"{loss_of(ours)} ({loss_of(summary.shipped)})",
            precision(ours),
            UNKNOWN if peer is None else f"{epoch_of(peer)} ({peer.name})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_all(summaries):
    """Return the table of all contenders."""
    lines = [
        "| recipe | contender | setting | steps | padding | times as fast as shipped | loss after the epoch | OOMs |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for summary in summaries:
        for one in summary.contenders:
            cells = [
                summary.name,
                one.name,
                one.facts["setting"],
                str(one.facts["steps"]),
                f"{one.facts['padding_ratio']:.1%}",
                times(one.times_shipped),
                loss_of(one),
                str(one.ooms),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def precision(one):
    """Return the largest difference of a step's loss, where the training is the same."""
    return f"{one.curve_difference:.0e}" if one.trains_the_same else UNKNOWN


def epoch_of(one):
    """Return the time of an epoch, and whether memory ran out."""
    if one.seconds is None:
        return "out of memory"
    if one.ooms:
        return f"{one.seconds:.1f} s, {one.ooms} epochs out of memory"
    return f"{one.seconds:.1f} s"


def times(ratio):
    """Return a ratio for people."""
    return UNKNOWN if ratio is None else f"{ratio:.2f}"


def loss_of(one):
    """Return the mean loss and its deviation over seeds."""
    if one.loss is None:
        return UNKNOWN
    return f"{one.loss[0]:.3f} ± {one.loss[1]:.3f}"


def block(summaries):
    """Return the block of FIGURES.md, with its marks."""
    machines = dict.fromkeys(summary.results["machine"] for summary in summaries)
    rounds = [len(summary.results["rounds"]) for summary in summaries]
    words = (
        f"Seconds an epoch on {' and '.join(machines)}, all under one memory limit, {min(rounds)} to {max(rounds)} "
        "rounds in turns, one seed each (`python tests/benchmarks/recipes.py --jobs 2`). Losses are those of held-out "
        "examples: mean and standard deviation over the rounds."
    )
    left_out = [
        f"Left out of {summary.name}: {text}."
        for summary in summaries
        for text in summary.results["left_out"]
    ]
    parts = [table(summaries), words, "All contenders:", table_of_all(summaries), *left_out]  # fmt: skip
    inner = "\n\n".join(parts)
    return f"{BEGIN}\n{inner}\n{END}"


def headline(summaries):
    """Return the block of the README, with its marks: the one number, with its conditions."""
    accumulating = [one for one in summaries if one.accumulates]
    same = [one for one in accumulating if one.batchtune.trains_the_same]
    ratios = sorted(one.batchtune.times_shipped or 0.0 for one in same)
    largest = max(one.batchtune.curve_difference or 0.0 for one in same)
    words = (
        f"**{ratios[0]:.2f} to {ratios[-1]:.2f} times as fast on the {len(ratios)} of {len(summaries)} recipes whose "
        f"steps batchtune cuts again; the loss of each step differs by at most {largest:.0e}**: small models on real "
        f"lengths, {same[0].results['machine']}, no GPU ([all recipes and peers](examples/FIGURES.md#recipes))."
    )
    return f"{BEGIN}\n{words}\n{END}"


def with_block(page, text):
    """Return a page with its block replaced. Raises BatchtuneError if it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BatchtuneError(
            f"the page has no {BEGIN} and {END}", "Add both where the block belongs."
        )
    return before + text + after


def written(summaries):
    """Return the pages as the results have them."""
    blocks = {README: headline(summaries), FIGURES: block(summaries)}
    return {
        path: with_block(path.read_text(encoding="utf-8"), text)
        for path, text in blocks.items()
    }


def summarise(folder):
    """Print both tables, write the blocks of the pages, and draw."""
    summaries = read_summaries(folder)
    print(block(summaries))
    for path, text in written(summaries).items():
        write_whole(path, text)
    drawn = folder / PICTURE
    write_whole(drawn, picture_of(pictured(summaries)))
    print(drawn)


def pictured(summaries):
    """Return the recipe to draw: of those whose training is the same, the one with the (lower) median gain."""
    same = [one for one in summaries if one.batchtune.trains_the_same]
    same.sort(key=lambda one: one.batchtune.times_shipped or 0.0)
    return same[(len(same) - 1) // 2]
