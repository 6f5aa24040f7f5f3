"""What a report says of a data loader: in sentences, in tables, on its chart, and in the verdicts of the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loader_records import (
    SHARED_MEMORY,
    all_failed,
    bottleneck,
    loaded,
    made_dali,
    made_iterable,
    made_loader,
)
from msgspec.structs import replace
from report_records import brief_tables, made_probe, made_sweep, rule_inputs

from batchtune.errors import ResultError
from batchtune.reports import load_run, summary_sentences
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.html import figures
from batchtune.reports.page import build_page, next_steps, report_tables, warning_sentences
from batchtune.reports.table import UNKNOWN
from batchtune.results import LoaderRow, LoaderTuning, Verdict, write_result


def said(loader: LoaderTuning) -> str:
    return " ".join(summary_sentences(loaded(loader)))


def with_row(loader: LoaderTuning, index: int | None = None, **changes: Any) -> LoaderTuning:
    """A loader with other numbers in its recommended row, or another."""
    place = loader.recommended if index is None else index
    return replace(loader, rows=[replace(row, **changes) if i == place else row for i, row in enumerate(loader.rows)])


def verdict_of(rule: str, loader: LoaderTuning | None, **evidence: Any) -> Verdict:
    (verdict,) = judge(parse_rules([rule]), rule_inputs(sweep=None, loader=loader, **evidence))
    return verdict


# Reading


@pytest.mark.parametrize("others", [{}, {"probe": made_probe()}, {"sweep": made_sweep()}])
def test_a_loader_is_a_run_alone_and_beside_others(tmp_path: Path, others: dict[str, Any]) -> None:
    for name, result in {**others, "loader": made_loader()}.items():
        write_result(tmp_path / f"{name}.json", result)
    results = load_run(tmp_path)
    assert results.loader == made_loader()
    assert (results.main is results.loader) == (not others)


def test_a_loader_of_other_data_is_refused(tmp_path: Path) -> None:
    loader = made_loader()
    assert loader.lengths is not None
    write_result(tmp_path / "probe.json", made_probe())
    write_result(tmp_path / "loader.json", replace(loader, lengths=replace(loader.lengths, fingerprint="0" * 64)))
    with pytest.raises(ResultError, match=r"probe\.json and .*loader\.json are of different data: 28,539"):
        load_run(tmp_path)
    write_result(tmp_path / "loader.json", made_iterable())
    assert load_run(tmp_path).lengths == made_probe().lengths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": "4"}, "arguments: num_workers: Expected `int`"),
        ({"num_workers": -1}, "arguments: num_workers: Expected `int` >= 0"),
        ({"prefetch_factor": 0}, "arguments: prefetch_factor: "),
        ({"multiprocessing_context": "thread"}, "arguments: multiprocessing_context: "),
        ({"pin_memory": 1}, "arguments: pin_memory: Expected `bool`"),
    ],
)
def test_arguments_that_torch_would_refuse_are_damage(tmp_path: Path, arguments: Any, message: str) -> None:
    write_result(tmp_path / "loader.json", with_row(made_loader(), arguments=arguments))
    with pytest.raises(ResultError) as raised:
        load_run(tmp_path)
    assert "loader.json is edited or damaged: rows, entry 5" in raised.value.message
    assert message in raised.value.message


def test_a_recommended_row_that_failed_is_damage(tmp_path: Path) -> None:
    write_result(tmp_path / "loader.json", replace(made_loader(), recommended=10))
    with pytest.raises(ResultError, match="recommended is 10, whose outcome is shared_memory"):
        load_run(tmp_path)


# Sentences


def test_the_headline_says_what_to_set_and_if_the_step_waits() -> None:
    assert summary_sentences(loaded())[0] == (
        "num_workers=4 prefetch_factor=2 keeps the step busy: it waits for data 0.6% of the time. The loader makes "
        "870.7 examples/s; the step takes 833.3."
    )
    assert summary_sentences(loaded(bottleneck()))[0] == (
        "The loader is the bottleneck: with the best setting, num_workers=6 prefetch_factor=2, the step waits for "
        "data 34.0% of the time; decode takes 71.0% of the time to make a batch."
    )


def test_without_a_step_the_rate_is_said_and_that_of_no_workers() -> None:
    without = made_loader(demand=None)
    rows = [replace(row, gpu_idle=None) for row in without.rows]
    assert summary_sentences(loaded(replace(without, rows=rows)))[0] == (
        "Set num_workers=4 prefetch_factor=2 for the loader: 870.7 examples/s, 3.45 times faster than num_workers=0."
    )
    assert summary_sentences(loaded(made_iterable()))[0] == "The loader as it is makes 52.5 examples/s."
    assert summary_sentences(loaded(all_failed()))[0] == "Loader: Nothing is recommended: all 2 settings failed."


def test_a_row_is_named_by_what_tells_it_apart() -> None:
    rows = [
        LoaderRow(arguments={"num_workers": 2, **more}, workers=2, outcome="ok", examples_per_second=3.0)
        for more in ({}, {"pin_memory": True})
    ]
    assert "Set pin_memory=true for" in said(replace(made_iterable(), rows=rows, recommended=1))
    assert "num_workers=2 pin_memory=true makes" in said(replace(made_iterable(), rows=rows[1:], recommended=0))


def test_defaults_of_torch_go_without_saying() -> None:
    rows = [
        replace(row, arguments={**row.arguments, "in_order": in_order})
        for row in made_loader().rows[:9]
        for in_order in (True, False)
    ]
    first = [summary_sentences(loaded(replace(made_loader(), rows=rows, recommended=place)))[0] for place in (10, 11)]
    assert first[0].startswith("num_workers=4 prefetch_factor=2 keeps the step busy")
    assert first[1].startswith("num_workers=4 prefetch_factor=2 in_order=false keeps the step busy")


def test_the_fastest_is_shown_beside_the_recommended() -> None:
    fast = with_row(made_loader(), 3, examples_per_second=9000.0)  # in the first, short round
    (table,) = brief_tables(loaded(fast))
    assert table.rows[1][:3] == ("fastest", "2", "9000")


def test_sentences_beside_a_sweep_name_the_loader() -> None:
    sentences = summary_sentences(loaded(sweep=True))
    assert sentences[0].startswith("Set 13 buckets") and "keeps the step busy" in sentences[1]
    assert "Loader: An epoch with the step is estimated at 34.5 s." in sentences


def test_evidence_is_said() -> None:
    text = said(made_loader())
    for part in (
        "The slowest stage: decode takes 71.0% of the time to make a batch.",
        "Reproducible: two epochs from one seed gave the same 40 batches, bit for bit.",
        "Its rate is the median of 3 trials, which differ by 3.0%.",
    ):
        assert part in text


def test_failed_settings_are_counted_and_quoted() -> None:
    warnings = warning_sentences(loaded())
    assert warnings[0] == (
        "2 of 11 settings of the loader failed; num_workers=8 prefetch_factor=2: RuntimeError: DataLoader "
        "worker (pid 4711) is killed by signal: Bus error."
    )
    assert "raised by item 17" not in warnings[0]
    (failed,) = [table for table in report_tables(loaded()) if table.title == "Settings that failed"]
    assert len(failed.rows) == 2
    assert failed.rows[0] == (
        "num_workers=8 prefetch_factor=2",
        "/dev/shm is too small",
        " ".join(SHARED_MEMORY.split()),
    )


def test_an_interrupted_tuning_is_said_to_be_one() -> None:
    first = next(iter(warning_sentences(loaded(made_loader(interrupted=True)))))
    assert first.startswith("The tuning was interrupted after")


def test_batches_that_differ_are_warned_of() -> None:
    assert warning_sentences(loaded(made_dali()))[0] == (
        "Not reproducible: two epochs from one seed differ from batch 1 on: log_mel has other values."
    )


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (made_loader(), ["batchtune-run/loader.yaml"]),
        (made_dali(), ["batchtune-run/loader.yaml", "batchtune tune-loader TARGET --step-ms MS"]),
        (replace(bottleneck(), stages=[]), ["batchtune-run/loader.yaml", "batchtune tune-loader TARGET --stages"]),
        (made_loader(interrupted=True), ["batchtune tune-loader TARGET"]),
        (all_failed(), ["batchtune tune-loader TARGET"]),
    ],
)
def test_what_comes_next(loader: LoaderTuning, expected: list[str]) -> None:
    assert [step for step, _ in next_steps(loaded(loader))] == [*expected, "batchtune report --full"]


# Tables


def test_the_full_table_has_a_column_for_what_varies() -> None:
    table = report_tables(loaded())[1]
    titles = [column.title for column in table.columns]
    assert titles[:4] == ["num workers", "prefetch factor", "examples/s", "step waits"] and titles[-1] == "outcome"
    assert table.marked == 5 and table.rows[5][:4] == ("4", "2", "870.7", "0.6%")
    assert table.rows[0][:3] == ("0", UNKNOWN, "252.5") and table.rows[-1][-1] == "shared memory"
    assert "The same for all that take it: pin_memory=true persistent_workers=true." in table.notes


def test_an_argument_with_the_name_of_another_column() -> None:
    rows = [replace(row, arguments={**row.arguments, "memory": i}) for i, row in enumerate(made_dali().rows)]
    table = report_tables(loaded(replace(made_dali(), rows=rows)))[1]
    assert [row[2] for row in table.rows] == ["0", "1", "2", "3"] and "1,020 MiB" in table.rows[1]


def test_the_brief_table_compares_the_fastest_and_no_workers() -> None:
    (table,) = brief_tables(loaded())
    assert [row[:3] for row in table.rows] == [
        ("recommended", "4", "870.7"),
        ("fastest", "6", "1234"),
        ("without workers", "0", "252.5"),
    ]


def test_a_single_setting_is_not_called_recommended() -> None:
    results = loaded(made_iterable())
    assert "Only this setting was measured, so it is not known to be the best." in summary_sentences(results)
    (table,) = brief_tables(results)
    assert [row[0] for row in table.rows] == ["measured"]
    assert "recommended" not in str(build_page(results))


# The chart


def traces(loader: LoaderTuning, view: int = 0) -> dict[str, dict[str, Any]]:
    (figure,) = figures(loaded(loader))
    return {trace["name"]: trace for trace in figure.views[view].data}


def test_throughput_is_drawn_with_the_steps_demand() -> None:
    drawn = traces(made_loader())
    assert list(drawn) == [
        *("the step takes 833.3 examples/s", "other settings", "best of each number of workers", "failed"),
        "recommended",
    ]
    assert set(drawn["the step takes 833.3 examples/s"]["y"]) == {833.333}
    assert drawn["best of each number of workers"]["x"] == [0, 1, 2, 4, 6]
    assert drawn["recommended"]["x"] == [4] and drawn["failed"]["x"] == [8, 8]
    assert traces(made_loader(), view=1)["recommended"]["y"] == [0.6]


def test_a_demand_far_above_all_is_named_above_the_scale() -> None:
    made = made_loader()
    assert made.demand is not None
    (figure,) = figures(loaded(replace(made, demand=replace(made.demand, step_seconds=0.0001))))
    assert "above this scale" in figure.views[0].layout["annotations"][0]["text"]


def test_one_setting_is_a_point_and_none_is_no_chart() -> None:
    assert traces(made_iterable())["measured"]["y"] == [52.5]
    assert figures(loaded(all_failed())) == []


# The gate


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("gpu_idle > 0.05", "holds"),
        ("gpu_idle > 0.5%", "fails"),
        ("loader.gpu_idle > 0.6%", "holds"),
        ("loader.examples_per_second < 900", "fails"),
        ("loader.workers > 4", "holds"),
        ("loader.wait_p99_seconds > 0.1", "fails"),
        ("loader.growth_bytes_per_batch > 0", "holds"),
        ("loader.reproducible == false", "holds"),
    ],
)
def test_a_loader_is_held_to_rules(rule: str, expected: str) -> None:
    assert verdict_of(rule, made_loader()).outcome == expected


@pytest.mark.parametrize(
    ("rule", "loader", "why"),
    [
        ("gpu_idle > 5%", made_dali(), "no step times are known: give --step-ms, or probe first"),
        ("gpu_idle > 5%", None, "the run has no loader.json: run `batchtune tune-loader`"),
        ("gpu_idle > 5%", all_failed(), "the tuning of the loader recommends no row: Nothing is recommended"),
        ("gpu_idle > 5", made_loader(), "from 0 to 1"),
        ("loader.reproducible == true", made_iterable(), "with --check-reproducible"),
        ("loader.gpu_idel > 5%", made_loader(), "did you mean loader.gpu_idle?"),
        ("loader.rounds worse 5%", made_loader(), "can't be worse; loader.batches_per_second, "),
        ("gpu_idle worse 5%", made_loader(), "no other run to compare with is given: use --baseline"),
    ],
)
def test_what_is_not_known_of_a_loader_says_why(rule: str, loader: LoaderTuning | None, why: str) -> None:
    verdict = verdict_of(rule, loader)
    assert verdict.outcome == "error" and why in verdict.message


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("gpu_idle worse 10%", "holds"),
        ("loader.examples_per_second worse 20%", "fails"),
        ("loader.examples_per_second worse 30%", "holds"),
        ("loader.memory_bytes worse 0%", "holds"),
    ],
)
def test_a_loader_is_compared_with_a_baseline(rule: str, expected: str) -> None:
    verdict = verdict_of(rule, made_loader(), baseline_loader=bottleneck())
    assert verdict.outcome == expected and "in the baseline" in verdict.message


def test_a_baseline_without_a_loader_says_so() -> None:
    verdict = verdict_of("gpu_idle worse 2%", made_loader(), baseline=made_sweep())
    assert verdict.message == "the baseline has no loader.json: run `batchtune tune-loader` there"
