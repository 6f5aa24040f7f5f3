"""A run's report as one page of HTML that needs nothing else: no network, no fonts, no other files.

The page carries plotly.js and a small script of its own (`page.js`), both allowed by their hashes alone; its Content
Security Policy forbids everything else, so that no string of a result file can become code or load anything, even
where escaping had a hole. plotly.js is in it compressed and is started after the page has been shown: it takes a
browser longer than all the rest. Without the package plotly (the extra `html`) the page has no charts, and says so.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import count, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from batchtune.loaders import kind_of
from batchtune.reports import RunResults
from batchtune.reports.page import build_page
from batchtune.reports.reading import MAP_STYLE, algorithm_name, row_cells, setting_name
from batchtune.reports.section import (
    Times,
    clean,
    current_name,
    format_shape,
    spread,
)
from batchtune.reports.sweeps import series_name
from batchtune.results import (
    AnyRow,
    AnySweep,
    Costed,
    LoaderRow,
    LoaderTuning,
    Probe,
    Row,
    StreamSweep,
    Sweep,
    cost_of,
)
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_seconds,
    format_size,
)

if TYPE_CHECKING:
    from jinja2 import Template

# These, and `<`, could end or open something inside a script element; all are inside JSON's strings.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def render(results: RunResults, configs: Mapping[str, str] | None = None) -> str:
    """Return the report as an HTML page; every string in it is escaped.

    Args:
        results: The run folder's results.
        configs: Name of a framework, or of `sampler.yaml` → the config to copy, in the order to show them.
    """
    from markupsafe import Markup

    drawn = figures(results)
    script = _asset("page.js")
    plotly = ""
    sources = [_source(script)]
    missing = missing_charts(results)
    if missing:
        drawn = []
    elif drawn:
        plotly, source = _plotly()
        sources.insert(0, source)
    data = {
        figure.name: {"data": figure.data, "layout": figure.layout} for figure in drawn
    }
    # Nothing may be loaded, and no script may run but these. Plotly.js styles elements in place, and before its
    # version 4 decodes an image that it holds in itself.
    policy = (
        f"default-src 'none'; script-src {' '.join(sources)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _template("page.html.j2").render(
        page=build_page(results),
        figures=drawn,
        missing_charts=missing,
        configs=configs or {},
        policy=policy,
        style=Markup(_asset("page.css")),
        data=Markup(msgspec.json.encode(data).decode().translate(_ESCAPES)),
        plotly=plotly,
        script=Markup(script),
    )


def missing_charts(results: RunResults) -> str | None:
    """Return why the page lacks charts that it would have, and how to get them; None if it lacks none."""
    if not figures(results) or _is_installed():
        return None
    return (
        "The charts need plotly, which is not installed: pip install plotly, and write the page again. The tables hold "
        "the same numbers."
    )


def render_for_notebook(results: RunResults) -> str:
    """Return the report's first sentences and its tables as a piece of HTML without styles, which a notebook has."""
    return _template("notebook.html.j2").render(page=build_page(results))


def _template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("batchtune.reports.html", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template(name)


def _is_installed() -> bool:
    try:
        import plotly  # noqa: F401 -- to see whether it is there
    except ImportError:
        return False
    return True


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly.js, compressed, in base64, and its hash for the policy; the same bytes each time."""
    from plotly.offline import get_plotlyjs

    script = str(get_plotlyjs())
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), _source(
        script
    )


def _asset(name: str) -> str:
    return files("batchtune.reports.html").joinpath(name).read_text(encoding="utf-8")


def _source(script: str) -> str:
    """Return the hash by which a policy knows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# The charts of the HTML report: what plotly.js is to draw, as data.
#
# Result files may come from anywhere. Every string that reaches plotly.js goes through `label`, because plotly.js
# reads a few HTML tags (links among them) in names and hover texts. Colours are the names of the page's CSS variables;
# the page's script puts the colours in, so that one figure serves the light and the dark page.

# As plotly.js takes them: traces, layouts.
Plotly = dict[str, Any]
Point = tuple[float, float, str]
"""x, y and what the pointer shows."""

# The page has this many colours for series.
_HUES = 7
# More points make no chart clearer, and the page larger.
_MOST_POINTS = 400
_DASHES = ("dash", "dot", "dashdot", "longdash")
# A level above this multiple of the most expensive row would press all rows flat.
_HIGHEST = 1.5
# How an outcome is drawn: name in the legend, colour, symbol, outcomes.
_OUTCOMES = (
    ("passed", "--hue-1", "circle", ("ok",)),
    ("out of memory", "--hue-0", "x", ("oom",)),
    ("failed otherwise", "--hue-5", "triangle-up", ("timeout", "crash", "error")),
)
_MANY_SECONDS = 120.0  # more are counted in minutes
# Bins that widen by more are spaced by their logarithm.
_WIDENING = 1.5
_ALL_DATA = {"symbol": "square-open", "size": 11, "line": {"width": 2}}
_STAR = {"symbol": "star", "size": 16, "line": {"color": "--paper", "width": 1.5}}


class Figure(NamedTuple):
    """An interactive chart.

    Attributes:
        name: Distinguishes its elements on the page.
        caption: Describes the chart in a sentence, also for those who can't see it.
    """

    name: str
    title: str
    caption: str
    data: list[Plotly]
    layout: Plotly


def figures(run: RunResults) -> list[Figure]:
    """Return the charts of a run, in the order to show them."""
    drawn = []
    sweep = run.sweep
    if sweep is not None and sweep.packed is not None:
        # Padded batches are drawn for comparison.
        sweep = structs.replace(sweep, recommended=None, recommended_table=None)
    if sweep is not None and not all(row.uses_pools for row in sweep.rows):
        drawn.append(_sweep_figure(run, sweep))
    if sweep is not None and sweep.histogram:
        drawn.append(_lengths_figure(sweep))
    if run.stream is not None and run.stream.rows:
        drawn.append(_stream_figure(run, run.stream))
    if run.probe is not None and run.probe.frontier:
        drawn.append(_frontier_figure(run.probe))
    if run.loader is not None and run.loader.working_rows:
        drawn.append(_loader_figure(run.loader))
    return drawn


def label(text: str) -> str:
    """Return one line of text that plotly.js shows unchanged: it reads tags and entities, and these are neither."""
    return html.escape(clean(text), quote=False)


def _trace(name: str, points: Iterable[Point], color: str, **looks: Any) -> Plotly:
    """Return a trace of points in the order to connect them; the colour is a CSS variable's name."""
    listed = list(points)
    shown = [listed[index] for index in spread(len(listed), _MOST_POINTS)]
    trace: Plotly = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name),
        "x": [_short(x) for x, _, _ in shown],
        "y": [_short(y) for _, y, _ in shown],
        "hovertext": [label(text) for _, _, text in shown],
    }
    trace |= looks
    for part in ("line", "marker"):
        trace[part] = {"color": color, **trace.get(part, {})}
    return trace


def _level(
    name: str, ends: Sequence[float], height: float, text: str, **looks: Any
) -> Plotly:
    """Return a level line that is as wide as the other traces."""
    points = [(min(ends), height, text), (max(ends), height, text)]
    return _trace(name, points, "--faint", mode="lines", **looks)


def _star(point: Point) -> Plotly:
    """Return the mark of what is recommended."""
    return _trace("recommended", [point], "--accent", mode="markers", marker=_STAR)


def _short(value: float) -> float:
    """Return a number with 6 significant digits: a chart shows no more, and the page stays small."""
    return float(f"{value:.6g}")


def _axis(title: str, unit: str | None = None, **settings: Any) -> Plotly:
    return {
        "title": {"text": label(f"{title} ({unit})" if unit else title)},
        **settings,
    }


def _sweep_figure(run: RunResults, sweep: Sweep) -> Figure:
    """Draw what an epoch costs with each number of buckets; pools have none, and are a level if recommended."""
    places = [
        (series_name(row), row.num_buckets, row)
        for row in sweep.rows
        if not row.uses_pools
    ]
    levels: dict[str, Costed] = {
        baseline.name: baseline for baseline in sweep.baselines
    }
    levels["lower bound"] = sweep.lower_bound
    packed = None if sweep.packed is None else sweep.packed.row
    if packed is not None and cost_of(packed, timed=sweep.has_times):
        levels[packed.name] = packed
    return _cost_figure(
        run,
        sweep,
        places,
        levels,
        _axis("number of buckets"),
        name="sweep",
        title="What an epoch costs, by number of buckets",
        caption="Each coloured line is a strategy; lower is better. Grey lines are for comparison: fixed batch sizes, "
        "length-grouped batches, your own config, and the bound that no table can beat.",
    )


def _stream_figure(run: RunResults, stream: StreamSweep) -> Figure:
    """Draw what an epoch of a stream costs, by the size of the buffer."""
    places = [(algorithm_name(row), row.buffer_size, row) for row in stream.rows]
    levels: dict[str, Costed] = {}
    if stream.map_style is not None:
        levels[MAP_STYLE] = stream.map_style
    return _cost_figure(
        run,
        stream,
        places,
        levels,
        _axis("examples in the buffer of a worker", type="log"),
        name="stream",
        title="What an epoch of the stream costs, by buffer size",
        caption="Each point is the best row of its algorithm and buffer; lower is better.",
    )


def _cost_figure(
    run: RunResults,
    sweep: AnySweep,
    places: Sequence[tuple[str, int, AnyRow]],
    levels: dict[str, Costed],
    x_axis: Plotly,
    **words: str,
) -> Figure:
    """Draw a line of the best row at each place of each series, and as levels those given and what has no place.

    Levels that would press all rows flat are only named in the legend, where a click shows them; the caption says so.
    """
    timed = Times(run, sweep).are_reliable
    chosen = sweep.recommended_row
    if sweep.current is not None:
        levels[current_name(sweep)] = sweep.current
    if isinstance(chosen, Row) and chosen.uses_pools:
        levels[f"recommended: {chosen.name}"] = chosen
    best: dict[str, dict[int, AnyRow]] = {}
    for name, place, row in places:
        series = best.setdefault(name, {})
        other = series.setdefault(place, row)
        is_better = cost_of(row, timed=timed) < cost_of(other, timed=timed)
        if row is chosen or (other is not chosen and is_better):
            series[place] = row
    highest = max(cost_of(row, timed=timed) for _, _, row in places)
    divisor = 1.0
    y_title = "batches of one epoch"
    if timed:
        y_title = "estimated time of one epoch (s)"
        if highest >= _MANY_SECONDS:
            divisor = 60.0
            y_title = "estimated time of one epoch (min)"

    def height(costed: Costed) -> float:
        return cost_of(costed, timed=timed) / divisor

    data = []
    hidden = []
    ends = [place for _, place, _ in places]
    for dash, (name, level) in zip(cycle(_DASHES), levels.items(), strict=False):
        visible: bool | str = True
        if height(level) > _HIGHEST * highest / divisor:
            visible = "legendonly"
            hidden.append(f"{name} ({_cost_words(level)})")
        trace = _level(
            name,
            ends,
            height(level),
            f"{name}: {_cost_words(level)}",
            line={"dash": dash},
            visible=visible,
        )
        data.append(trace)
    for hue, (name, series) in zip(count(), best.items(), strict=False):
        points = []
        for place in sorted(series):
            row = series[place]
            points.append((place, height(row), f"{row.name}: {_cost_words(row)}"))
        data.append(_trace(name, points, f"--hue-{hue % _HUES}"))
    for _, place, row in places:
        if row is chosen:
            text = f"recommended: {row.name}, {_cost_words(row)}"
            data.append(_star((place, height(row), text)))
    if hidden:
        words["caption"] += (
            f" Grey in the legend, because they cost far more than every row: {', '.join(hidden)}. A click shows them."
        )
    return Figure(
        **words,
        data=data,
        layout={"xaxis": x_axis, "yaxis": _axis(y_title)},
    )


def _cost_words(costed: Costed) -> str:
    batches = f"{format_number(costed.batches)} batches"
    if costed.estimated_epoch_seconds is None:
        return batches
    return f"{batches}, {format_seconds(costed.estimated_epoch_seconds)}"


def _lengths_figure(sweep: Sweep) -> Figure:
    """Draw how many examples have which length, and the recommended batch size for each."""
    unit = sweep.lengths.unit
    bars = []
    for bin_ in sweep.histogram:
        text = f"{format_length(bin_.from_, unit)} to {format_length(bin_.to, unit)}: {counted(bin_.count, 'example')}"
        bars.append(((bin_.from_ + bin_.to) / 2, bin_.count, text))
    widths = [_short(bin_.to - bin_.from_) for bin_ in sweep.histogram]
    scale = "linear"
    if widths[-1] > _WIDENING * widths[0]:  # bins of even ratio
        scale = "log"
    data = [
        _trace(
            "examples",
            bars,
            "--hue-1",
            type="bar",
            width=widths,
        )
    ]
    row = sweep.recommended_row
    if row is not None:
        steps = []
        for boundary, size in zip(row.boundaries, row.batch_sizes, strict=True):
            text = f"up to {format_length(boundary, unit)}: batch size {format_number(size)}"
            steps.append((boundary, size, text))
        steps.insert(0, (sweep.lengths.min, row.batch_sizes[0], steps[0][2]))
        # Up or down at each boundary, then level to the next one.
        data.append(
            _trace(
                "batch size",
                steps,
                "--accent",
                line={"shape": "vh"},
                yaxis="y2",
            )
        )
    return Figure(
        name="lengths",
        title="Lengths, boundaries and batch sizes",
        caption=f"{counted(sweep.lengths.count, 'example')}. The line is the recommended batch size.",
        data=data,
        layout={
            "xaxis": _axis("length", unit, type=scale),
            "yaxis": _axis("examples", rangemode="tozero"),
            "yaxis2": _axis(
                "batch size",
                overlaying="y",
                side="right",
                rangemode="tozero",
                showgrid=False,
            ),
        },
    )


def _frontier_figure(probe: Probe) -> Figure:
    """Draw the largest batch that fits at each length, and the trials by their outcome."""
    unit = probe.lengths.unit
    fitting: list[Point] = []
    filled: list[Point] = []
    for point in probe.frontier:
        shape = format_shape(point.batch_size, point.length, unit)
        if point.closed_by == "data":
            text = f"largest tried, and memory allows more: {shape}"
            filled.append((point.length, point.batch_size, text))
        else:
            text = f"largest: {shape}, closed by {point.closed_by}"
            fitting.append((point.length, point.batch_size, text))
    data = []
    if fitting:
        data.append(_trace("largest that memory allows", fitting, "--hue-4"))
    if filled:
        looks = {"mode": "markers", "marker": _ALL_DATA}
        data.append(_trace("largest tried", filled, "--hue-4", **looks))
    for name, color, symbol, outcomes in _OUTCOMES:
        points = []
        for trial in probe.trials:
            if trial.outcome in outcomes:
                text = f"trial {trial.index}: {format_shape(trial.batch_size, trial.length, unit)}, {trial.outcome}"
                if trial.peak_bytes is not None:
                    text += f", peak {format_size(trial.peak_bytes)}"
                if trial.step_seconds is not None:
                    text += f", step {format_seconds(trial.step_seconds)}"
                points.append((trial.length, trial.batch_size, text))
        if points:
            data.append(
                _trace(
                    name,
                    points,
                    color,
                    mode="markers",
                    marker={"symbol": symbol, "size": 8},
                )
            )
    oom = sum(trial.outcome == "oom" for trial in probe.trials)
    caption = (
        f"Found in {counted(len(probe.trials), 'trial')}, {oom} of them out of memory."
    )
    if filled:
        caption += " Where the data have too few examples up to a length, their number is the largest batch."
    return Figure(
        name="frontier",
        title="Frontier: the largest batch, by length",
        caption=caption,
        data=data,
        layout={
            "xaxis": _axis("length", unit, type="log"),
            "yaxis": _axis("batch size", type="log"),
        },
    )


def _loader_figure(loader: LoaderTuning) -> Figure:
    """Draw what each setting of the loader delivers, by its workers, and what the step takes."""
    rows = loader.working_rows
    points = [_loader_point(loader, row) for row in rows]
    data = [_trace("settings", points, "--hue-0", mode="markers")]
    if loader.demanded is not None:
        text = f"the step takes {format_number(loader.demanded)} examples/s"
        ends = [row.workers for row in rows]
        data.append(_level(text, ends, loader.demanded, text))
    if loader.recommended_row is not None:
        data.append(_star(_loader_point(loader, loader.recommended_row)))
    workers = kind_of(loader.kind).WORKERS_ARE
    return Figure(
        name="loader",
        title=f"What the loader delivers, by its {workers}",
        caption="Each point is a setting of the loader.",
        data=data,
        layout={
            "xaxis": _axis(workers),
            "yaxis": _axis("examples per second", rangemode="tozero"),
        },
    )


def _loader_point(loader: LoaderTuning, row: LoaderRow) -> Point:
    cells = row_cells(row).items()
    text = ", ".join(f"{title} {cell}" for title, cell in cells if cell is not None)
    return row.workers, row.rate, f"{setting_name(loader, row)}: {text}"
