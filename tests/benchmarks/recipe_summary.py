"""What the rounds of `recipes.py` show: tables, goals, the blocks of README.md and FIGURES.md. Needs no torch."""

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
# The goals.
TIMES_SHIPPED = 1.3
RECIPES_TIMES_SHIPPED = 4
NEVER_SLOWER = 0.99
TIMES_BEST_PEER = 0.99
# Of the losses of the same step, by rounding alone.
SAME_LOSS = 1e-3
FEWEST_ROUNDS = 2
UNKNOWN = "–"  # noqa: RUF001  # as in all tables of batchtune


def machine_name(device):
    """Return the name of the device, and for a CPU how many processors may be used."""
    name = backend_for(device).identify(device).name
    if device.startswith("cpu"):
        return f"{name}, {len(os.sched_getaffinity(0))} cores"
    return name


def errors_of(results, other=None):
    """Return the relative standard error of each contender's epoch time over another's: the shipped setting's."""
    errors = {}
    names = list(results["contenders"])
    for name in names:
        ratios = ratios_of(results, name, other or names[0])
        errors[name] = float("inf")
        if len(ratios) > 1:
            deviation = statistics.stdev(ratios) / len(ratios) ** 0.5
            errors[name] = deviation / statistics.mean(ratios)
    return errors


def ratios_of(results, name, other):
    """Return how many times as fast as another a contender was, in each round; empty if either ran out of memory."""
    ratios = []
    for round_of in results["rounds"]:
        mine = round_of[name]
        theirs = round_of[other]
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
        ratios = ratios_of(results, name, next(iter(results["contenders"])))
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
    def ours(self):
        """All of batchtune's contenders."""
        return [one for one in self.contenders if one.kind == "batchtune"]

    @property
    def best_peer_of_same_loss(self):
        """The fastest that never ran out of memory, and whose loss is within the spread of seeds."""
        peers = [
            one
            for one in self.contenders
            if one.kind == "peer" and not one.ooms and self.loss_is_unchanged(one)
        ]
        return min(peers, key=lambda one: one.seconds or math.inf, default=None)

    def times(self, one, other):
        """Return how many times as fast as another one is, round by round; None if that is not known."""
        if other is None:
            return None
        ratios = ratios_of(self.results, one.name, other.name)
        return statistics.mean(ratios) if ratios else None

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


def times(ratio, digits=2):
    """Return a ratio for people."""
    return UNKNOWN if ratio is None else f"{ratio:.{digits}f}"


def goals(summaries):
    """Return each goal, and whether it is met."""
    accumulating = [one for one in summaries if one.accumulates]
    faster = sum(
        (one.batchtune.times_shipped or 0.0) >= TIMES_SHIPPED for one in accumulating
    )
    goal = f"at least {TIMES_SHIPPED} times what is shipped on {RECIPES_TIMES_SHIPPED} recipes with accumulation"
    met = faster >= RECIPES_TIMES_SHIPPED
    found = [(met, f"{goal}: on {faster} of {len(accumulating)}")]
    for summary in summaries:
        for met, text in goals_of(summary):
            found.append((met, f"{summary.name}: {text}"))
    return found


def goals_of(summary):
    """Yield the goals of one recipe, and whether each is met."""
    rounds = len(summary.results["rounds"])
    yield rounds >= FEWEST_ROUNDS, f"at least {FEWEST_ROUNDS} rounds: {rounds}"
    for one in summary.ours:
        yield one.ooms == 0, f"{one.name}: no epoch runs out of memory: {one.ooms}"
    ours = summary.batchtune
    ratio = ours.times_shipped
    never = ratio is not None and ratio >= NEVER_SLOWER
    yield never, f"not slower than shipped: {times(ratio, 3)}"
    if summary.accumulates and ours.curve_difference is not None:
        text = f"each step's loss is the shipped one's: to {ours.curve_difference:.0e}"
        yield ours.trains_the_same, text
    unchanged = summary.loss_is_unchanged(ours)
    if unchanged is not None:
        text = f"loss within the spread of seeds: {loss_of(ours)}, shipped {loss_of(summary.shipped)}"
        yield unchanged, text
    peer = summary.best_peer_of_same_loss
    if peer is not None:
        ratio = summary.times(ours, peer)
        met = ratio is not None and ratio >= TIMES_BEST_PEER
        error = errors_of(summary.results, peer.name)[ours.name]
        text = f"the best peer that learns as much ({peer.name}): {times(ratio, 3)} ± {error:.1%}"
        yield met, text


def loss_of(one):
    """Return the mean loss and its deviation over seeds."""
    if one.loss is None:
        return UNKNOWN
    return f"{one.loss[0]:.3f} ± {one.loss[1]:.3f}"


def details(summary):
    """Return all contenders of a recipe, for the terminal."""
    results = summary.results
    limit = results["limit_bytes"] >> 20
    errors = errors_of(results)
    rows = []
    for one in summary.contenders:
        facts = one.facts
        seconds = UNKNOWN
        speed = UNKNOWN
        if one.seconds is not None:
            seconds = f"{one.seconds:.2f}"
            speed = f"{results['total_length'] / one.seconds:.0f}"
        rows.append(
            {
                "": one.name,
                "s/epoch": seconds,
                "× shipped": times(one.times_shipped),
                "±": f"{errors[one.name]:.1%}" if one.times_shipped else UNKNOWN,
                f"{results['unit']}/s": speed,
                "batches": str(facts["batches"]),
                "steps": str(facts["steps"]),
                "padding": f"{facts['padding_ratio']:.1%}",
                "OOMs": str(one.ooms),
                "loss": loss_of(one),
                "step's loss": precision(one),
                "setting": facts["setting"],
            }
        )
    what = (
        f"{TITLES[summary.name]}: {results['examples']} examples of {results['data']}"
    )
    lines = [f"{what}, {limit} MiB, {len(results['rounds'])} rounds"]
    lines += in_columns(rows)
    lines += [f"left out: {text}" for text in results["left_out"]]
    return "\n".join(lines)


def in_columns(rows):
    """Return lines with the cells of rows below each other, the first and last column on the left."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    laid_out = []
    for first, *middle, last in lines:
        cells = [first.ljust(widths[0])]
        cells += map(str.rjust, middle, widths[1:-1])
        laid_out.append("  ".join(["", *cells, last]))
    return laid_out


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
    """Print all tables and goals, write the blocks of the pages, and draw."""
    summaries = read_summaries(folder)
    for summary in summaries:
        print(details(summary), end="\n\n")
    for met, text in goals(summaries):
        print(f"{'met   ' if met else 'MISSED'}  {text}")
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
