"""What the rounds of `recipes.py` show: the tables, the goals, the README's block and the picture. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from batchtune.errors import BatchtuneError
from batchtune.files import write_whole
from batchtune.probe.devices import backend_for

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN = "<!-- recipes -->"
END = "<!-- /recipes -->"
PICTURE = "recipes.svg"
STEPS_KEPT = "batchtune, steps kept"
# In the order of the table.
TITLES = {
    "ctc": "CTC speech recognition (SpeechBrain)",
    "aed": "Encoder-decoder speech (NeMo)",
    "tts": "Speech synthesis (Lightning)",
    "sft": "Fine-tuning on chats (Transformers)",
    "sft-packed": "Fine-tuning on chats, packed (TRL)",
    "mlm": "Masked language model of code (Transformers)",
    "stream": "Stream of tar shards (WebDataset)",
}
# The goals.
TIMES_SHIPPED = 1.15
RECIPES_TIMES_SHIPPED = 4
TIMES_BEST_PEER = 0.99
FEWEST_ROUNDS = 5
Results = dict[str, Any]
UNKNOWN = "–"  # noqa: RUF001  # as in all tables of batchtune


def machine_name(device: str) -> str:
    """Return the name of the device, and for a CPU how many processors may be used."""
    name = backend_for(device).identify(device).name
    if device.startswith("cpu"):
        return f"{name}, {len(os.sched_getaffinity(0))} cores"
    return name


def errors_of(results: Results, other: str | None = None) -> dict[str, float]:
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


def ratios_of(results: Results, name: str, other: str) -> list[float]:
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
    """

    name: str
    kind: str
    facts: dict[str, Any]
    seconds: float | None
    ooms: int
    times_shipped: float | None
    losses: list[float]

    @classmethod
    def of(cls, results: Results, name: str) -> Shown:
        """Summarise the rounds of a contender."""
        rounds = [round_of[name] for round_of in results["rounds"]]
        whole = [one["seconds"] for one in rounds if not one["oom"]]
        ratios = ratios_of(results, name, next(iter(results["contenders"])))
        return cls(
            name=name,
            kind=results["contenders"][name]["kind"],
            facts=results["contenders"][name],
            seconds=statistics.mean(whole) if whole else None,
            ooms=sum(one["oom"] for one in rounds),
            times_shipped=statistics.mean(ratios) if ratios else None,
            losses=[one["loss"] for one in rounds if "loss" in one],
        )

    @property
    def loss(self) -> tuple[float, float] | None:
        """Mean and standard deviation over seeds; None with fewer than two."""
        if len(self.losses) < 2:
            return None
        return statistics.mean(self.losses), statistics.stdev(self.losses)


@dataclass(frozen=True)
class Summary:
    """One recipe with all its contenders."""

    results: Results
    contenders: list[Shown]

    @classmethod
    def of(cls, results: Results) -> Summary:
        """Summarise a recipe."""
        contenders = [Shown.of(results, name) for name in results["contenders"]]
        return cls(results, contenders)

    @property
    def name(self) -> str:
        """The recipe's name."""
        return str(self.results["recipe"])

    @property
    def shipped(self) -> Shown:
        """What the recipe ships."""
        return self.contenders[0]

    @property
    def batchtune(self) -> Shown:
        """What batchtune recommends."""
        return next(one for one in self.contenders if one.name == "batchtune")

    @property
    def steps_kept(self) -> Shown | None:
        """The same with as many optimizer steps an epoch as shipped; None if it has no recommendation."""
        found = (one for one in self.contenders if one.name == STEPS_KEPT)
        return next(found, None)

    @property
    def ours(self) -> list[Shown]:
        """All of batchtune's contenders."""
        return [one for one in self.contenders if one.kind == "batchtune"]

    @property
    def best_peer(self) -> Shown | None:
        """The fastest peer that never ran out of memory, the shipped setting included."""
        return fastest(self._peers)

    @property
    def best_peer_of_same_loss(self) -> Shown | None:
        """The fastest of those whose loss is within the spread of seeds."""
        return fastest(one for one in self._peers if self.loss_is_unchanged(one))

    @property
    def _peers(self) -> list[Shown]:
        return [
            one
            for one in self.contenders
            if one.kind != "batchtune" and not one.ooms and one.seconds
        ]

    def times(self, one: Shown, other: Shown | None) -> float | None:
        """Return how many times as fast as another one is, round by round; None if that is not known."""
        if other is None:
            return None
        ratios = ratios_of(self.results, one.name, other.name)
        return statistics.mean(ratios) if ratios else None

    def loss_is_unchanged(self, one: Shown) -> bool | None:
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


def fastest(contenders: Iterable[Shown]) -> Shown | None:
    """Return the fastest contender; None of none."""
    return min(contenders, key=lambda one: one.seconds or math.inf, default=None)


def read_summaries(folder: Path) -> list[Summary]:
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


def table(summaries: Iterable[Summary]) -> str:
    """Return the README's table: seconds an epoch, and how many times as fast as shipped; losses after an epoch."""
    lines = [
        "| recipe | as shipped | best peer | batchtune | batchtune, steps kept | loss, steps kept (shipped) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for summary in summaries:
        peer = summary.best_peer
        best = "all ran out of memory"
        if peer is not None:
            best = f"{epoch_of(peer)} ({peer.name})"
        cells = [
            TITLES[summary.name],
            epoch_of(summary.shipped),
            best,
            compared(summary, summary.batchtune),
            compared(summary, summary.steps_kept),
            losses(summary),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compared(summary: Summary, one: Shown | None) -> str:
    """Return the time of an epoch, and how many times as fast as shipped that is."""
    if one is None:
        return UNKNOWN
    return f"{epoch_of(one)} ({times(summary.times(one, summary.shipped))}×)"


def losses(summary: Summary) -> str:
    """Return the mean loss with the steps kept, and the shipped one's."""
    kept = summary.steps_kept
    if kept is None or kept.loss is None or summary.shipped.loss is None:
        return UNKNOWN
    return f"{kept.loss[0]:.2f} ({summary.shipped.loss[0]:.2f})"


def epoch_of(one: Shown) -> str:
    """Return the time of an epoch, and whether memory ran out."""
    if one.seconds is None:
        return "out of memory"
    if one.ooms:
        return f"{one.seconds:.1f} s, {one.ooms} epochs out of memory"
    return f"{one.seconds:.1f} s"


def times(ratio: float | None, digits: int = 2) -> str:
    """Return a ratio for people."""
    return UNKNOWN if ratio is None else f"{ratio:.{digits}f}"


def goals(summaries: list[Summary]) -> list[tuple[bool, str]]:
    """Return each goal, and whether it is met."""
    goal = f"at least {TIMES_SHIPPED} times what the recipe ships on {RECIPES_TIMES_SHIPPED} recipes"
    found = []
    ours = [one.name for summary in summaries for one in summary.ours]
    for name in dict.fromkeys(ours):
        ratios = [
            summary.times(one, summary.shipped) or 0.0
            for summary in summaries
            for one in summary.ours
            if one.name == name
        ]
        faster = sum(ratio >= TIMES_SHIPPED for ratio in ratios)
        met = faster >= RECIPES_TIMES_SHIPPED
        found.append((met, f"{name}: {goal}: on {faster} of {len(ratios)}"))
    for summary in summaries:
        for met, text in goals_of(summary):
            found.append((met, f"{summary.name}: {text}"))
    return found


def goals_of(summary: Summary) -> Iterator[tuple[bool, str]]:
    """Yield the goals of one recipe, and whether each is met."""
    rounds = len(summary.results["rounds"])
    yield rounds >= FEWEST_ROUNDS, f"at least {FEWEST_ROUNDS} rounds: {rounds}"
    for one in summary.ours:
        for met, text in goals_of_one(summary, one):
            yield met, f"{one.name}: {text}"


def goals_of_one(summary: Summary, one: Shown) -> Iterator[tuple[bool, str]]:
    """Yield the goals of one of batchtune's recommendations, and whether each is met."""
    peers = {
        "the best peer": summary.best_peer,
        "the best of unchanged loss": summary.best_peer_of_same_loss,
    }
    for which, peer in peers.items():
        if peer is None:
            continue
        ratio = summary.times(one, peer)
        met = ratio is not None and ratio >= TIMES_BEST_PEER
        goal = f"at least {TIMES_BEST_PEER} times {which}"
        error = errors_of(summary.results, peer.name)[one.name]
        yield met, f"{goal} ({peer.name}): {times(ratio, 3)} ± {error:.1%}"
    yield one.ooms == 0, f"no epoch runs out of memory: {one.ooms}"
    unchanged = summary.loss_is_unchanged(one)
    if unchanged is not None:
        text = f"loss within the spread of seeds: {loss_of(one)}, shipped {loss_of(summary.shipped)}"
        yield unchanged, text


def loss_of(one: Shown) -> str:
    """Return the mean loss and its deviation over seeds."""
    if one.loss is None:
        return UNKNOWN
    return f"{one.loss[0]:.3f} ± {one.loss[1]:.3f}"


def details(summary: Summary) -> str:
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
                "padding": f"{facts['padding_ratio']:.1%}",
                "OOMs": str(one.ooms),
                "loss": loss_of(one),
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


def in_columns(rows: list[dict[str, str]]) -> list[str]:
    """Return lines with the cells of rows below each other, the first and last column on the left."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    laid_out = []
    for first, *middle, last in lines:
        cells = [first.ljust(widths[0])]
        cells += map(str.rjust, middle, widths[1:-1])
        laid_out.append("  ".join(["", *cells, last]))
    return laid_out


def block(summaries: list[Summary]) -> str:
    """Return the README's block, with its marks."""
    machines = dict.fromkeys(summary.results["machine"] for summary in summaries)
    rounds = [len(summary.results["rounds"]) for summary in summaries]
    words = (
        f"Seconds an epoch on {' and '.join(machines)}, all under one memory limit, {min(rounds)} to {max(rounds)} "
        "rounds in turns (`python tests/benchmarks/recipes.py --jobs 2`)."
    )
    return f"{BEGIN}\n{table(summaries)}\n\n{words}\n{END}"


def with_block(readme: str, text: str) -> str:
    """Return the README with its block replaced. Raises BatchtuneError if it has no marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BatchtuneError(
            f"README.md has no {BEGIN} and {END}", "Add both where the table belongs."
        )
    return before + text + after


def summarise(folder: Path) -> None:
    """Print all tables and goals, write the README's block if it has the marks, and draw."""
    summaries = read_summaries(folder)
    for summary in summaries:
        print(details(summary), end="\n\n")
    for met, text in goals(summaries):
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    readme = README.read_text(encoding="utf-8")
    if BEGIN in readme:
        write_whole(README, with_block(readme, block(summaries)))
    else:
        print(f"\nREADME.md has no {BEGIN}: its table is not written")
    print(draw(folder))


WIDTH, LEFT, RIGHT = 860, 235, 20
STRIP, GAP = 76, 12
COLORS = {"shipped": "#8c959f", "peer": "#bf8700", "batchtune": "#1f883d"}
STYLE = """text { font: 13px system-ui, sans-serif; fill: #57606a }
.name { font-weight: 600 } .small { font-size: 11px }
.limit { stroke: #cf222e; stroke-dasharray: 5 4 } .ceiling { stroke: #1f883d; stroke-dasharray: 2 3 }
.axis { stroke: #8c959f; stroke-width: .7 }
@media (prefers-color-scheme: dark) {
text { fill: #9da7b3 } .limit { stroke: #f85149 } .ceiling { stroke: #3fb950 } }"""


def draw(folder: Path) -> Path:
    """Draw the picture of one recipe; return its path.

    It is the one in which batchtune is the median number of times as fast as shipped, of those whose ceiling was
    predicted, if there are any.
    """
    summaries = read_summaries(folder)
    drawable = [one for one in summaries if one.results["predicted_ceiling_bytes"]]
    ranked = sorted(
        drawable or summaries,
        key=lambda one: one.times(one.batchtune, one.shipped) or 0.0,
    )
    path = folder / PICTURE
    write_whole(path, picture_of(ranked[len(ranked) // 2]))
    return path


def picture_of(summary: Summary) -> str:
    """Return the picture as SVG: the memory of each step over the time of the epoch."""
    results = summary.results
    limit = results["limit_bytes"]
    shown = [summary.shipped]
    if summary.best_peer is not None and summary.best_peer is not summary.shipped:
        shown.append(summary.best_peer)
    shown.append(summary.batchtune)
    traces = [results["trace"][one.name] for one in shown]
    longest = max(sum(step[0] for step in trace) for trace in traces)
    # What the process holds before its first step is below the axis.
    held = results["held_bytes"]
    room = 1.12 * (limit - held)

    def x_of(seconds: float) -> float:
        return LEFT + seconds / longest * (WIDTH - LEFT - RIGHT)

    parts = []
    top = 34.0
    for one, trace in zip(shown, traces, strict=True):
        bottom = top + STRIP

        def y_of(size: float, bottom: float = bottom) -> float:
            return bottom - max(0.0, size - held) / room * STRIP

        parts.append(label(one.name, "name", 8, top + 34))
        parts.append(label(f"{epoch_of(one)} an epoch", "small", 8, top + 52))
        ends = list(accumulate(step[0] for step in trace))
        points = [f"{x_of(0):.1f},{bottom:.1f}"]
        for step, end in zip(trace, ends, strict=True):
            height = y_of(step[1] or held)
            points.append(f"{x_of(end - step[0]):.1f},{height:.1f}")
            points.append(f"{x_of(end):.1f},{height:.1f}")
        points.append(f"{x_of(ends[-1] if ends else 0):.1f},{bottom:.1f}")
        parts.append(
            f'<polygon points="{" ".join(points)}" fill="{COLORS[one.kind]}" fill-opacity=".75"/>'
        )
        parts.append(rule("limit", y_of(limit)))
        parts.append(rule("axis", bottom))
        ceiling = results["predicted_ceiling_bytes"]
        if one.kind == "batchtune" and ceiling:
            parts.append(rule("ceiling", y_of(ceiling)))
            parts.append(
                label(
                    "ceiling predicted before the run",
                    "small",
                    WIDTH - RIGHT,
                    y_of(ceiling) - 4,
                    "end",
                )
            )
        top = bottom + GAP
    words = f"memory of each step, above the {held >> 20} MiB that the process holds; limit {limit >> 20} MiB"
    parts.insert(0, label(words, "small", LEFT, 18))  # fmt: skip
    title = f"{TITLES[summary.name]}, {results['data']}, {results['machine']}"
    parts.append(label(title, "small", 8, top + 16))
    height = top + 26
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{inner}\n</svg>\n"
    )


def label(text: str, kind: str, x: float, y: float, anchor: str = "start") -> str:
    """Return a text of the picture."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def rule(kind: str, y: float) -> str:
    """Return a horizontal line of the picture."""
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
