"""Draws the loss of each optimizer step over time, as shipped and with batchtune, and the memory of each step below."""

from __future__ import annotations

from itertools import accumulate

PICTURE = "recipes.svg"
WIDTH, HEIGHT, LEFT, RIGHT = 860, 416, 60, 150
LOSS_TOP, LOSS_BOTTOM = 46, 222
MEMORY_TOP, MEMORY_BOTTOM = 268, 360
STYLE = """text { font: 13px system-ui, sans-serif; fill: #57606a }
.title { font-weight: 600; font-size: 15px; fill: #1f2328 } .name { font-weight: 600 }
.tie { stroke: #8c959f; stroke-width: .8; stroke-opacity: .45 }
.axis { stroke: #8c959f; stroke-width: .7 } .limit { stroke: #cf222e; stroke-dasharray: 5 4 }
.shipped { stroke: #8c959f; fill: #8c959f } .batchtune { stroke: #1f883d; fill: #1f883d }
text.shipped, text.batchtune { stroke: none } polyline { fill: none !important; stroke-width: 1.8 }
circle { stroke: none } polygon { stroke: none; fill-opacity: .55 }
@media (prefers-color-scheme: dark) {
text { fill: #9da7b3 } .title { fill: #e6edf3 } .limit { stroke: #f85149 }
.batchtune { stroke: #3fb950; fill: #3fb950 } }"""


def picture_of(summary):
    """Return the picture of a recipe's first round as SVG."""
    shown = [summary.shipped, summary.batchtune]
    traces = [summary.results["trace"][one.name] for one in shown]
    axis = Axes(summary, traces)
    parts = [text(axis.title, "title", LEFT, 20)]
    parts += axis.frame()
    parts += axis.ties(*traces)
    for one, trace in zip(shown, traces, strict=True):
        parts += axis.drawn(one, trace)
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{axis.title}</title>\n<style>{STYLE}</style>\n{inner}\n</svg>\n"
    )


class Axes:
    """Where seconds, losses and bytes are in the picture."""

    def __init__(self, summary, traces):
        results = summary.results
        self.limit = results["limit_bytes"]
        # What the process holds before its first step is below the axis.
        self.held = results["held_bytes"]
        shipped, ours = (sum(step[0] for step in trace) for trace in traces)
        self.seconds = max(shipped, ours)
        losses = [step[2] for trace in traces for step in trace]
        self.highest = max(losses)
        self.lowest = min(losses)
        self.title = (
            f"The same steps, the same losses, {shipped / ours:.2f} times as fast"
        )
        self.conditions = (
            f"{summary.title}, {results['data']}, {summary.batch_words}",
            f"one epoch of {len(traces[0])} optimizer steps on {results['machine']}",
        )

    def x(self, seconds):
        """Return where a time is."""
        return LEFT + seconds / self.seconds * (WIDTH - LEFT - RIGHT)

    def loss_y(self, loss):
        """Return where a loss is."""
        share = (loss - self.lowest) / (self.highest - self.lowest)
        return LOSS_BOTTOM - 6 - share * (LOSS_BOTTOM - LOSS_TOP - 12)

    def memory_y(self, size):
        """Return where a size in bytes is."""
        share = max(0.0, size - self.held) / (self.limit - self.held)
        return MEMORY_BOTTOM - share * (MEMORY_BOTTOM - MEMORY_TOP)

    def frame(self):
        """Yield the axes and their labels."""
        yield text("training loss of each step", "", LEFT, LOSS_TOP - 6)
        for loss in (self.lowest, self.highest):
            yield text(f"{loss:.2f}", "", LEFT - 6, self.loss_y(loss) + 4, "end")
        yield text("memory of each step", "", LEFT, MEMORY_TOP - 10)
        side = WIDTH - RIGHT + 8
        yield text(f"limit, {self.limit >> 20} MiB", "", side, MEMORY_TOP + 4)
        yield text(f"held before, {self.held >> 20} MiB", "", side, MEMORY_BOTTOM + 4)
        for kind, y in (("axis", LOSS_BOTTOM), ("limit", MEMORY_TOP), ("axis", MEMORY_BOTTOM)):  # fmt: skip
            yield f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield text("0 s", "", LEFT, LOSS_BOTTOM + 18, "middle")
        for line, words in enumerate(self.conditions):
            yield text(words, "", LEFT, HEIGHT - 28 + 16 * line)

    def curve(self, trace):
        """Return where each step ends, by its time and its loss."""
        ends = accumulate(step[0] for step in trace)
        return [
            (self.x(end), self.loss_y(step[2]))
            for step, end in zip(trace, ends, strict=True)
        ]

    def ties(self, trace, other):
        """Yield a line between the same steps of two trainings."""
        pairs = zip(self.curve(trace), self.curve(other), strict=True)
        for (x, y), (other_x, other_y) in pairs:
            yield f'<line class="tie" x1="{x:.1f}" x2="{other_x:.1f}" y1="{y:.1f}" y2="{other_y:.1f}"/>'

    def drawn(self, one, trace):
        """Yield the curve of a contender, its end, and its memory."""
        points = self.curve(trace)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="{one.kind}" points="{line}"/>'
        for x, y in points:
            yield f'<circle class="{one.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        last_x, last_y = points[-1]
        seconds = sum(step[0] for step in trace)
        words = f"{one.name}, {seconds:.1f} s"
        yield text(words, f"name {one.kind}", last_x + 10, last_y + 4)
        outline = [(LEFT, MEMORY_BOTTOM)]
        start = LEFT
        for step, (x, _) in zip(trace, points, strict=True):
            height = self.memory_y(step[1])
            outline += [(start, height), (x, height)]
            start = x
        outline.append((last_x, MEMORY_BOTTOM))
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        yield f'<polygon class="{one.kind}" points="{corners}"/>'


def text(words, kind, x, y, anchor="start"):
    """Return a text of the picture."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
