"""The content that all formats for people share."""

from __future__ import annotations

import msgspec
import pytest
from report_records import (
    made_lengths,
    made_probe,
    made_sweep,
    made_trial,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
)

from batchtune.reports import RunResults
from batchtune.reports.page import build_page
from batchtune.reports.table import clean
from batchtune.results import Probe, Sweep


def facts_of(probe: Probe | None = None, sweep: Sweep | None = None) -> dict[str, str]:
    return dict(build_page(RunResults(name="run", probe=probe, sweep=sweep)).facts)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" a\n\tb\r\nc ", "a b c"),
        ("a\x1b[31mb", "a\ufffd[31mb"),
        ("a\x00b\x7fc\x9bd", "a\ufffdb\ufffdc\ufffdd"),
        ("safe\u202egnp.exe", "safe\ufffdgnp.exe"),
        ("x" * 401, "x" * 399 + "…"),
        ("é ▶ 漢字", "é ▶ 漢字"),
    ],
)
def test_a_string_becomes_one_harmless_line(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_trials_are_counted_by_outcome() -> None:
    probe = msgspec.structs.replace(
        made_probe(), trials=[made_trial(0, "oom"), made_trial(1, "ok"), made_trial(2, "ok")]
    )
    assert facts_of(probe)["Trials"] == "3: 2 ok, 1 oom"


def test_the_largest_error_of_a_model_is_shown_if_known() -> None:
    probe = made_probe()
    assert probe.models.peak_bytes is not None
    exact = msgspec.structs.replace(probe.models.peak_bytes, largest_error=0.0123)
    probe = msgspec.structs.replace(probe, models=msgspec.structs.replace(probe.models, peak_bytes=exact))
    assert (
        facts_of(probe)["Models"]
        == "fit the trials: peak memory to within 0.4% (1.2% at most), step time to within 3.1%"
    )


def test_the_device_of_a_sweep_without_a_probe_is_told() -> None:
    assert facts_of(sweep=made_sweep())["Device"] == "NVIDIA H200"


def test_an_unknown_unit_is_told() -> None:
    sweep = msgspec.structs.replace(made_sweep(), lengths=made_lengths(None))
    assert facts_of(sweep=sweep)["Data"] == ("28,539 examples of 1.41 to 24.52, 362,127 in all; the unit is unknown")


def test_a_long_frontier_is_thinned_and_says_so() -> None:
    probe = made_probe()
    points = [msgspec.structs.replace(probe.frontier[0], length=1.0 + n) for n in range(100)]
    long = RunResults(name="run", probe=msgspec.structs.replace(probe, frontier=points), sweep=None)
    table = build_page(long).tables[0]
    assert (table.rows[0][0], table.rows[-1][0]) == ("1 s", "100 s")
    assert table.notes == ("24 of 100 lengths shown; all are in probe.json.",)


def test_target_lengths_have_a_column_where_there_are_any() -> None:
    probe = made_probe()
    points = [msgspec.structs.replace(point, target_length=80.0) for point in probe.frontier]
    targets = RunResults(name="run", probe=msgspec.structs.replace(probe, frontier=points), sweep=None)
    assert build_page(targets).tables[0].columns[1].title == "target length"


def test_each_bucket_tells_the_trial_that_proves_it() -> None:
    page = build_page(RunResults(name="run", probe=proven_probe(), sweep=proven_sweep()))
    _, _, buckets, frontier = page.tables
    assert buckets.columns[-1].title == "proven by"
    assert buckets.rows[0] == ("3.582 s", "167", "598.2 s", "trial 13: 170 \u00d7 3.582 s")
    assert (frontier.columns[-1].title, frontier.rows[1][0], frontier.rows[1][-1]) == ("trial", "3.582 s", "13")


def test_buckets_that_no_trial_proves_say_so() -> None:
    sweep = partly_proven_sweep()
    empty = msgspec.structs.replace(sweep.buckets[-1], examples=0)
    sweep = msgspec.structs.replace(sweep, buckets=[*sweep.buckets[:-1], empty])
    page = build_page(RunResults(name="run", probe=proven_probe(), sweep=sweep))
    assert [row[-1] for row in page.tables[2].rows[-5:]] == [
        "trial 21: 32 \u00d7 18.61 s",
        *["not proven"] * 3,
        "\u2013",
    ]


def test_what_is_not_proven_names_no_trials() -> None:
    page = build_page(RunResults(name="run", probe=made_probe(), sweep=made_sweep()))
    assert [table.columns[-1].title for table in page.tables[2:]] == ["largest batch", "step time"]
