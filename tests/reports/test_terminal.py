"""The report on a terminal.

The snapshots hold whole reports, 80 columns wide. To write them anew after a wanted change:

    REFRESH_SNAPSHOTS=1 python -m pytest tests/reports/test_terminal.py

and read the difference before keeping it.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from loader_records import all_failed, bottleneck, loaded, made_dali
from pooled_records import pooled_sweep
from report_records import (
    failed_verification,
    hostile_results,
    made_probe,
    made_sweep,
    made_trial,
    made_verification,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    whole_sweep,
    without_recommendation,
)
from rich.console import Console
from streamed_records import streamed

from batchtune.reports import RunResults
from batchtune.reports.terminal import render, render_terminal

SNAPSHOTS = Path(__file__).parent / "snapshots"
RUNS = {
    "both": RunResults(name="librispeech-100", probe=made_probe(), sweep=made_sweep()),
    "proven": RunResults(name="librispeech-100", probe=proven_probe(), sweep=proven_sweep()),
    "partly-proven": RunResults(name="librispeech-100", probe=proven_probe(), sweep=partly_proven_sweep()),
    "verified": RunResults(
        name="librispeech-100", probe=made_probe(), sweep=made_sweep(), verification=made_verification()
    ),
    "does-not-hold": RunResults(
        name="librispeech-100", probe=made_probe(), sweep=made_sweep(), verification=failed_verification()
    ),
    "everything": RunResults(
        name="librispeech-100", probe=made_probe(), sweep=whole_sweep(), verification=made_verification()
    ),
    "pooled": RunResults(name="librispeech-100", probe=made_probe(), sweep=pooled_sweep()),
    "stream": streamed(),
    "stream-and-sweep": streamed(sweep=True),
    "loader": loaded(),
    "loader-bottleneck": loaded(bottleneck()),
    "loader-dali": loaded(made_dali()),
    "loader-and-sweep": loaded(sweep=True),
    "loader-failed": loaded(all_failed()),
    "probe": RunResults(name="librispeech-100", probe=made_probe(), sweep=None),
    "sweep-untimed": RunResults(name="librispeech-100", probe=None, sweep=made_sweep(timed=False)),
    "nothing-recommended": RunResults(name="librispeech-100", probe=None, sweep=without_recommendation(made_sweep())),
}


BRIEF = (
    *("proven", "partly-proven", "does-not-hold", "everything", "pooled", "stream", "stream-and-sweep"),
    *("probe", "sweep-untimed", "nothing-recommended", "loader", "loader-bottleneck", "loader-and-sweep"),
)


def printed(results: RunResults, console: Console, *, full: bool = True) -> str:
    render_terminal(results, console, full=full)
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


@pytest.mark.parametrize(("name", "full"), [*((name, True) for name in RUNS), *((name, False) for name in BRIEF)])
def test_the_report_is_as_in_its_snapshot_within_80_columns(name: str, full: bool) -> None:
    path, text = SNAPSHOTS / f"{name if full else f'brief-{name}'}.txt", render(RUNS[name], full=full)
    if os.environ.get("REFRESH_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80


def test_a_brief_report_has_20_lines_for_a_short_warning() -> None:
    for name, results in RUNS.items():
        lines = render(results, full=False).splitlines()
        assert max(map(len, lines)) <= 80, name
        shown = sum(line.startswith("! ") for line in lines)
        sections = [results.sweep, results.stream, results.loader]
        both = sum(section is not None for section in sections) > 1  # with warnings of both
        assert len(lines) <= 20 or shown == 1 or "1 more warning" in str(lines) or both, name


@pytest.mark.parametrize("words", [1, 70])
def test_warnings_for_which_a_screen_has_no_room_are_counted(words: int) -> None:
    sweep = msgspec.structs.replace(made_sweep(), warnings=[f"{number} {'xx ' * words}" for number in range(20)])
    text = render(RunResults(name="run", probe=None, sweep=sweep), full=False)
    lines = text.splitlines()
    shown = sum(line.startswith("! ") for line in lines) - 1
    assert f"{20 - shown} more warnings: --full shows them." in text
    assert "! 0 xx" in text and f"! {shown} xx" not in text
    assert len(lines) == 20 if words == 1 else shown == 1


def test_the_environment_changes_nothing_in_a_rendered_report(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = render(RUNS["both"])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert render(RUNS["both"]) == plain


def test_a_narrow_terminal_cuts_no_number() -> None:
    console = Console(file=io.StringIO(), width=66, color_system=None, _environ={})
    lines = [line.split() for line in printed(RUNS["both"], console).splitlines()]
    cells = ["13", "634", "3.1%", "45.0", "4.09%", "3", "min", "20", "s", "1.41\u00d7"]
    assert any(line[-len(cells) :] == cells for line in lines)


@pytest.mark.parametrize("width", [20, 40, 60])
def test_what_tells_rows_apart_is_there_at_any_width(width: int) -> None:
    text = printed(RUNS["everything"], Console(file=io.StringIO(), width=width, color_system=None, _environ={}))
    found = re.search(r"Bucket\s+tables\s+compared(.*)Recommended\s+buckets", text, re.DOTALL)
    assert found is not None
    rows = found[1]
    for name in ("speechbrain", "quantile", "exponential", "(frontier)", "fixed-random"):
        assert name in rows
    assert {"10", "13", "20"} <= set(rows.split())


def test_a_command_that_comes_next_is_never_broken(tmp_path: Path) -> None:
    long = replace(RUNS["both"], folder=tmp_path / ("long" * 20))
    text = printed(long, Console(file=io.StringIO(), width=40, color_system=None, _environ={}), full=False)
    assert f"batchtune verify {long.folder} MANIFEST" in text.splitlines()


def test_the_recommended_row_is_bold_where_there_are_colours() -> None:
    console = Console(file=io.StringIO(), width=100, color_system="standard", force_terminal=True, _environ={})
    marked = next(line for line in printed(RUNS["both"], console).splitlines() if "▶" in line and "optimal" in line)
    assert marked.startswith("\x1b[1")


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    assert "[bold]text[/bold]" in render(hostile_results("[bold]text[/bold]"))


def test_an_encoding_without_our_signs_gets_other_ones() -> None:
    class AsciiStream(io.StringIO):
        encoding = "ascii"

    console = Console(file=AsciiStream(), width=80, color_system=None, _environ={})
    text = printed(RUNS["both"], console)
    assert text.isascii() and "> optimal" in text


def test_a_failed_trials_long_message_is_shown_whole() -> None:
    message = " ".join(f"word{number}" for number in range(40))
    probe = msgspec.structs.replace(made_probe(), trials=[made_trial(0, "crash", error=message)])
    crash = RunResults(name="run", probe=probe, sweep=None)
    assert message in " ".join(render(crash).split())
