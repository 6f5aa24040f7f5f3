"""Draws the pictures of the concepts' page: `python examples/site/pictures.py`.

The lengths are those of Python functions, drawn at random; the memory of a batch is made up: it grows with its tokens,
and with the square of its length.
"""

import csv
import random
from collections.abc import Iterable
from pathlib import Path

EXAMPLES = Path(__file__).parents[1]
PAGES = EXAMPLES / "pages"
WIDTH = 720
INK = "#1f2937"
FAINT = "#6b7280"
BLUE = "#2563eb"
PALE = "#bfdbfe"
RED = "#dc2626"
COLOURS = ["#2563eb", "#d97706", "#059669", "#9333ea"]
# Of a token, of a squared token in each example, and the limit.
TOKEN = 1.0
SQUARED_TOKEN = 0.004
LIMIT = 3000


def text(
    x: float, y: float, words: str, colour: str = INK, size: int = 13, anchor="start"
) -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def bar(
    x: float, y: float, width: float, colour: str, height: float = 7, rest: float = 0
) -> str:
    """Return a bar for an example, with a pale rest for its padding."""
    drawn = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'
    if rest:
        drawn += (
            f'<rect x="{x + width:.1f}" y="{y:.1f}" width="{rest:.1f}" height="{height}" '
            f'fill="{PALE}" fill-opacity="0.6"/>'
        )
    return drawn


def picture(title: str, height: int, parts: Iterable[str]) -> str:
    """Return an SVG image on a white card, which is legible on dark pages, too."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def some_lengths(count: int) -> list[int]:
    """Return lengths of the example's data set, of at most 300 tokens, in a random order."""
    with (EXAMPLES / "stdlib_lengths.csv").open(encoding="utf-8") as stream:
        lengths = [int(row["num_tokens"]) for row in csv.DictReader(stream)]
    return random.Random(3).sample([each for each in lengths if each <= 300], count)


# The frontier


def largest_size(length: int) -> int:
    """Return the largest batch size that fits at a length."""
    return int(LIMIT / (TOKEN * length + SQUARED_TOKEN * length**2))


def frontier() -> str:
    """Return the picture of the frontier, with the trials that found it."""
    left, bottom, most = 60, 280, 64

    def place(length: float, size: float) -> tuple[float, float]:
        return left + length * 1.25, bottom - size * 240 / most

    curve = [
        place(length, min(most, largest_size(length))) for length in range(40, 501)
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve)
    area = f"{points} {curve[-1][0]:.1f},{bottom} {curve[0][0]:.1f},{bottom}"
    parts = [
        f'<polygon points="{area}" fill="{PALE}" fill-opacity="0.35"/>',
        f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2"/>',
        f'<path d="M{left} 30V{bottom}H{left + 640}" fill="none" stroke="{FAINT}"/>',
        text(left, 22, "batch size", FAINT),
        text(
            left + 640,
            bottom + 34,
            "length of its longest example",
            FAINT,
            anchor="end",
        ),
        text(130, 262, "fits", BLUE),
        text(300, 140, "runs out of memory", RED),
    ]
    for length in (50, 80, 120, 180, 260, 360, 480):
        x, y = place(length, largest_size(length))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{BLUE}"/>')
        parts.append(text(x, bottom + 16, str(length), FAINT, 12, "middle"))
    for length in (80, 180, 360):
        x, y = place(length, largest_size(length) * 1.2 + 1)
        cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        parts.append(f'<path d="{cross}" stroke="{RED}" stroke-width="2"/>')
    parts += [
        text(left - 8, place(0, size)[1] + 4, str(size), FAINT, 12, "end")
        for size in (20, 40, 60)
    ]
    legend = "● a trial that fitted   × a trial that ran out of memory"
    parts.append(text(330, 60, legend, FAINT))
    return picture("The frontier", 330, parts)


# Fixed batches, a table, a pool


def padding(batches: list[list[int]]) -> float:
    """Return the padded share of all cells."""
    cells = sum(len(batch) * max(batch) for batch in batches)
    return 1 - sum(map(sum, batches)) / cells


def fixed(lengths: list[int], size: int) -> list[list[int]]:
    """Return batches of a fixed size, in order."""
    return [lengths[at : at + size] for at in range(0, len(lengths), size)]


def bucketed(lengths: list[int], boundaries: list[int], cells: int) -> list[list[int]]:
    """Return the batches of a bucket table whose sizes are `cells` / boundary."""
    batches = []
    lower = 0
    for boundary in boundaries:
        bucket = [length for length in lengths if lower < length <= boundary]
        batches += fixed(bucket, cells // boundary)
        lower = boundary
    return batches


def pooled(lengths: list[int], cells: int) -> list[list[int]]:
    """Return the batches of one pool: sorted, and cut where the next one would not fit."""
    batches: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0] <= cells:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def batches() -> str:
    """Return the picture of the same examples in three kinds of batches."""
    lengths = some_lengths(48)
    longest = max(lengths)
    size = 4
    cells = size * longest
    ordered = sorted(lengths)
    boundaries = [ordered[15], ordered[31], ordered[41], longest]
    kinds = {
        f"shuffled, {size} each": fixed(lengths, size),
        "a table of 4 buckets": bucketed(lengths, boundaries, cells),
        "a pool of 48": pooled(lengths, cells),
    }
    parts = []
    lowest = 0.0
    for column, (name, made) in enumerate(kinds.items()):
        x = 24 + column * 232
        y = 64.0
        parts.append(text(x, 28, name))
        share = f"{len(made)} batches, {padding(made):.0%} padding"
        parts.append(text(x, 46, share, FAINT, 12))
        for batch in made:
            for length in batch:
                scale = 200 / longest
                rest = (max(batch) - length) * scale
                parts.append(bar(x, y, length * scale, BLUE, 5, rest))
                y += 6
            y += 9
        lowest = max(lowest, y)
    legend = (
        "a bar is an example, pale its padding; every batch fits into the same memory"
    )
    parts.append(text(24, lowest + 14, legend, FAINT, 12))
    return picture("Batches of the same examples", int(lowest) + 30, parts)


# The same step


def same_step() -> str:
    """Return the picture of a step whose examples are cut into other micro-batches."""
    lengths = some_lengths(16)
    as_they_come = fixed(lengths, 4)
    colour_of = {
        id(batch): COLOURS[number] for number, batch in enumerate(as_they_come)
    }
    origin = [
        (length, colour_of[id(batch)]) for batch in as_they_come for length in batch
    ]
    in_order = sorted(origin, key=lambda each: -each[0])
    cut = [in_order[:2], in_order[2:5], in_order[5:9], in_order[9:]]
    sides = {
        "as they come": [origin[at : at + 4] for at in range(0, 16, 4)],
        "the same step": cut,
    }
    parts = []
    scale = 300 / max(lengths)
    for column, (name, made) in enumerate(sides.items()):
        x = 24 + column * 352
        y = 64.0
        parts.append(text(x, 28, name))
        share = padding([[length for length, _ in batch] for batch in made])
        parts.append(
            text(x, 46, f"16 examples, 4 micro-batches, {share:.0%} padding", FAINT, 12)
        )
        for batch in made:
            longest = max(length for length, _ in batch)
            for length, colour in batch:
                rest = (longest - length) * scale
                parts.append(bar(x, y, length * scale, colour, 9, rest))
                y += 11
            y += 12
    legend = "colours: the micro-batch from which an example came"
    parts.append(text(24, 300, legend, FAINT, 12))
    return picture("One optimizer step", 318, parts)


def main() -> None:
    """Write the three pictures."""
    for name, drawn in drawings().items():
        (PAGES / name).write_text(drawn, encoding="utf-8")


def drawings() -> dict[str, str]:
    """Return each picture by its file's name."""
    return {
        "frontier.svg": frontier(),
        "batches.svg": batches(),
        "same-step.svg": same_step(),
    }


if __name__ == "__main__":
    main()
