"""A run's report as one page of HTML that needs nothing else: no network, no fonts, no other files.

The page carries plotly.js and a small script of its own (`page.js`), both allowed by their hashes alone; its Content
Security Policy forbids everything else, so that no string of a result file can become code or load anything, even
where escaping had a hole. plotly.js lies in it compressed and is started after the page has been shown: it takes a
browser longer than all the rest.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from batchtune.reports.html.data_figures import frontier_figure, histogram_figure, padding_figure
from batchtune.reports.html.figure import Figure
from batchtune.reports.html.loader_figures import loader_figures
from batchtune.reports.html.stream_figures import stream_figures
from batchtune.reports.html.sweep_figures import cost_figures
from batchtune.reports.page import Fact, build_page, clean_facts
from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, Table, clean, format_shape, known, make_table, shown_of, spread
from batchtune.results import Device, Probe
from batchtune.units import counted, format_number, format_seconds, format_size

# These, and `<`, could end or open something inside a script element; all are inside JSON's strings.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}

# Of the trial log, enough for any search; the page's size is bounded by it.
_MOST_TRIALS = 1000


def render(results: RunResults, configs: Mapping[str, str] | None = None) -> str:
    """Return the report as an HTML page; every string in it is escaped.

    Args:
        results: The run folder's results.
        configs: Name of a framework, or of `sampler.yaml` → the config to copy, in the order to show them.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    template = Environment(
        loader=PackageLoader("batchtune.reports.html", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("page.html.j2")
    drawn, script = figures(results), _asset("page.js")
    plotly, *sources = _plotly() if drawn else ("",)
    data = {figure.name: [{"data": v.data, "layout": v.layout} for v in figure.views] for figure in drawn}
    # Nothing may be loaded, and no script may run but these. Plotly.js styles elements in place, and before its
    # version 4 decodes an image that it holds in itself.
    policy = (
        f"default-src 'none'; script-src {' '.join([*sources, _source(script)])}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return template.render(
        page=build_page(results),
        figures=drawn,
        configs=configs or {},
        trial_log=_trial_log(results.probe) if results.probe is not None else None,
        environment=_environment(results),
        policy=policy,
        style=Markup(_asset("page.css")),
        data=Markup(msgspec.json.encode(data).decode().translate(_ESCAPES)),
        plotly=plotly,
        script=Markup(script),
    )


def figures(results: RunResults) -> list[Figure]:
    """Return the charts of a run, in the order to show them."""
    sweep, probe = results.sweep, results.probe
    costs = cost_figures(sweep) if sweep is not None else []
    data = [histogram_figure(sweep), padding_figure(sweep)] if sweep is not None else []
    streams = stream_figures(results.stream) if results.stream is not None else []
    loaders = loader_figures(results.loader) if results.loader is not None else []
    drawn = [*costs[:1], *data, *costs[1:], *streams, frontier_figure(probe) if probe is not None else None, *loaders]
    return [replace(figure, caption=clean(figure.caption)) for figure in drawn if figure is not None]


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly.js, compressed, in base64, and its hash for the policy; the same bytes each time."""
    from plotly.offline import get_plotlyjs

    script = str(get_plotlyjs())
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), _source(script)


def _asset(name: str) -> str:
    return files("batchtune.reports.html").joinpath(name).read_text(encoding="utf-8")


def _source(script: str) -> str:
    """Return the hash by which a policy knows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _environment(results: RunResults) -> list[tuple[str, tuple[Fact, ...]]]:
    """Return lists of names and values, each with its title: the device, the settings, what wrote the files."""
    probe, sweep, stream, verification = results.probe, results.sweep, results.stream, results.verification
    groups: dict[str, list[Fact]] = {}
    loader = results.loader
    files = {} if results.lengths is None else {"data fingerprint": results.lengths.fingerprint}
    if probe is not None:
        groups["Device"] = list(_device_facts(probe.device))
        groups["Settings of the device"] = _settings(probe.device.settings)
        groups["Workload"] = [("spec", probe.workload.spec), *_settings(probe.workload.options)]
        groups["Probe"] = [*_settings(probe.settings), *_check_facts(probe)]
        files["probe.json"] = f"batchtune {probe.meta.batchtune}"
    if sweep is not None:
        groups["Sweep"] = _settings(sweep.settings)
        groups["Current settings"] = _settings(sweep.current_settings or {})
        files["sweep.json"] = f"batchtune {sweep.meta.batchtune}"
    if stream is not None:
        groups["Stream"] = _settings(stream.settings)
        groups["Current settings of the stream"] = _settings(stream.current_settings or {})
        files["stream.json"] = f"batchtune {stream.meta.batchtune}"
    if loader is not None:
        groups["Loader"] = [("target", loader.target.words), ("kind", loader.kind), *_settings(loader.settings)]
        files["loader.json"] = f"batchtune {loader.meta.batchtune}"
    if verification is not None:
        groups["Verification"] = _settings(verification.settings)
        files["verify.json"] = f"batchtune {verification.meta.batchtune}"
    groups["Files"] = list(files.items())
    return [(title, clean_facts(facts)) for title, facts in groups.items() if facts]


def _trial_log(probe: Probe) -> Table | None:
    """Return every trial, in order; None without any."""
    if not probe.trials:
        return None
    shown, unit = spread(probe.trials, _MOST_TRIALS), probe.lengths.unit
    rows = []
    for trial in shown:
        seconds, distance = trial.step_seconds, trial.step_seconds_spread
        either_side = "" if distance is None else f" ± {format_seconds(distance / 2)}"
        rows.append(
            {
                "trial": str(trial.index),
                "batch shape": format_shape(trial.batch_size, trial.length, unit),
                "target length": known(trial.target_length, format_number),
                "outcome": f"{trial.outcome} (in alternation)" if trial.confirmation else trial.outcome,
                "step time": None if seconds is None else f"{format_seconds(seconds)}{either_side}",
                "peak memory": known(trial.peak_bytes, format_size),
                "held": known(trial.reserved_bytes, format_size),
                "took": format_seconds(trial.elapsed_seconds),
                "message": trial.error or ", ".join(trial.throttle_reasons or ()) or UNKNOWN,
            }
        )
    return make_table("Every trial", rows, shown_of(len(shown), len(probe.trials), "", "probe.json"))


def _device_facts(device: Device) -> Iterator[Fact]:
    yield "name", f"{device.name} ({device.kind})"
    sizes = {
        "memory": device.total_bytes,
        "free before": device.free_bytes,
        "limit": device.limit_bytes,
        "outside the allocator": device.outside_bytes,
        "reserve": device.reserve_bytes or None,
        "kept for DistributedDataParallel": device.ddp_bytes or None,
    }
    yield from ((name, format_size(size)) for name, size in sizes.items() if size is not None)
    texts = {"driver": device.driver, "torch": device.torch, "allocator": device.allocator, "UUID": device.uuid}
    flags = {"part of a GPU (MIG)": device.mig, "ECC": device.ecc}
    yield from ((name, _value(value)) for name, value in {**texts, **flags}.items() if value is not None)
    if device.other_processes is not None:
        used = [format_size(p.used_bytes) for p in device.processes or () if p.used_bytes is not None]
        yield "other processes", format_number(device.other_processes) + (f" ({', '.join(used)})" if used else "")


def _check_facts(probe: Probe) -> Iterator[Fact]:
    confirmation, margin = probe.confirmation, probe.margin
    if confirmation is not None:
        shapes, steps = counted(confirmation.shapes, "batch shape"), counted(confirmation.steps, "step")
        workers = "1 process" if confirmation.workers == 1 else f"{confirmation.workers} processes"
        yield "confirmed", f"{shapes} in {steps} in alternation, in {workers}; {confirmation.given_up} given up"
    if margin is not None:
        yield (
            "margin",
            f"{format_size(margin.bytes)}: equal batches differ by up to {format_size(margin.spread_bytes)} in "
            f"{counted(margin.repetitions, 'repetition')}, a process's first step by up to "
            f"{format_size(margin.first_step_bytes)}",
        )


def _settings(settings: Mapping[str, Any]) -> list[Fact]:
    return [(name, _value(value)) for name, value in settings.items()]


def _value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)
