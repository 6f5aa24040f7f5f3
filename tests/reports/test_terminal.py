"""The report on a terminal.

The snapshots hold whole reports, 80 columns wide. To write them anew after a wanted change:

    REFRESH_SNAPSHOTS=1 python -m pytest tests/reports/test_terminal.py

and read the difference before keeping it.
"""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from loader_records import all_failed, bottleneck, loaded, made_dali
from msgspec import structs
from pooled_records import pooled_sweep
from report_records import (
    failed_verification,
    hostile_results,
    made_probe,
    made_sweep,
    made_verification,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    whole_sweep,
    without_recommendation,
)
from reports.changed import run_of
from rich.console import Console
from streamed_records import streamed

from batchtune.reports import RunResults
from batchtune.reports.page import build_page
from batchtune.reports.terminal import render, text_of

SNAPSHOTS = Path(__file__).parent / "snapshots"


def swept(**records):
    """A run of a probe and a sweep: the made ones unless others are given."""
    both = {"probe": made_probe(), "sweep": made_sweep()}
    return RunResults(name="librispeech-100", **{**both, **records})


RUNS = {
    "both": swept(),
    "proven": swept(probe=proven_probe(), sweep=proven_sweep()),
    "partly-proven": swept(probe=proven_probe(), sweep=partly_proven_sweep()),
    "verified": swept(verification=made_verification()),
    "does-not-hold": swept(verification=failed_verification()),
    "everything": swept(sweep=whole_sweep(), verification=made_verification()),
    "pooled": swept(sweep=pooled_sweep()),
    "stream": streamed(),
    "stream-and-sweep": streamed(sweep=True),
    "loader": loaded(),
    "loader-bottleneck": loaded(bottleneck()),
    "loader-dali": loaded(made_dali()),
    "loader-and-sweep": loaded(sweep=True),
    "loader-failed": loaded(all_failed()),
    "probe": swept(sweep=None),
    "sweep-untimed": swept(probe=None, sweep=made_sweep(timed=False)),
    "nothing-recommended": swept(
        probe=None, sweep=without_recommendation(made_sweep())
    ),
}


SHOWN = [
    *((name, False) for name in RUNS if name != "stream"),
    *((name, True) for name in ("everything", "pooled", "stream", "loader")),
    *((name, True) for name in ("probe", "sweep-untimed", "nothing-recommended")),
]


class AsciiStream(io.StringIO):
    encoding = "ascii"


def printed(results, width=80, stream=io.StringIO, *, full=True):
    console = Console(file=stream(), width=width, color_system=None, _environ={})
    return text_of(build_page(results), console, full=full)


@pytest.mark.parametrize(("name", "full"), SHOWN)
def test_the_report_is_as_in_its_snapshot_within_80_columns(name, full):
    path = SNAPSHOTS / f"{'' if full else 'brief-'}{name}.txt"
    text = render(RUNS[name], full=full)
    if os.environ.get("REFRESH_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    # With tables of both.
    assert full or len(lines) <= 25 or name.endswith("-and-sweep")


@pytest.mark.parametrize("words", [1, 70])
def test_warnings_for_which_a_screen_has_no_room_are_counted(words):
    warnings = [f"{number} {'xx ' * words}" for number in range(20)]
    sweep = structs.replace(made_sweep(), warnings=warnings)
    text = render(run_of(sweep=sweep), full=False)
    shown = sum(line.startswith("! ") for line in text.splitlines()) - 1
    assert f"{20 - shown} more warnings: --full shows all." in text
    assert "! 0 xx" in text and f"! {shown} xx" not in text
    assert shown == 1 or len(text.splitlines()) <= 20


def test_the_environment_changes_nothing_in_a_rendered_report(monkeypatch):
    plain = render(RUNS["both"])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert render(RUNS["both"]) == plain


@pytest.mark.parametrize("width", [20, 60])
def test_a_narrow_terminal_folds_names_and_breaks_no_number(width):
    text = printed(RUNS["both"], width)
    for name in ("speechbrain", "quantile", "exponential", "(frontier)"):
        assert name in text
    assert "±8.1%      634     3.1%" in text


def test_a_command_that_comes_next_is_never_broken(tmp_path):
    long = replace(RUNS["both"], folder=tmp_path / ("long" * 20))
    command = f"batchtune verify MANIFEST --run {long.folder}"
    # Its purpose stands below: to the right nobody would see it.
    below = f"\n{command}\n    run these batches for real\n"
    assert below in printed(long, 40, full=False)


def test_what_looks_like_markup_is_shown_as_it_is():
    assert "[bold]text[/bold]" in render(hostile_results("[bold]text[/bold]"))


def test_an_encoding_without_our_signs_gets_other_ones():
    text = printed(RUNS["both"], stream=AsciiStream)
    assert text.isascii() and "> optimal" in text
