"""What a report says of a data loader: in sentences, in tables, and in the verdicts of the gate."""

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
from report_records import made_probe, made_sweep, rule_inputs, summary_of, tables_of, warnings_of

from batchtune.errors import ResultError
from batchtune.reports import load_run
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import build_page
from batchtune.results import LoaderRow, LoaderTuning, Verdict, write_result


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


@pytest.mark.parametrize(
    ("loader", "headline"),
    [
        (
            made_loader(),
            "Set num_workers=4 prefetch_factor=2 for the loader: 870.7 examples/s, and the step waits for data 0.6% of "
            "the time.",
        ),
        (
            bottleneck(),
            "The loader is the bottleneck: with the best setting, num_workers=6 prefetch_factor=2, the step waits for "
            "data 34.0% of the time.",
        ),
        (made_dali(), "Set eval_mode=eager num_threads=2 for the loader: 467.6 examples/s."),
        (made_iterable(), "Measured the loader as it is: 52.5 examples/s."),
        (all_failed(), "Nothing is recommended: all 2 settings failed."),
    ],
    ids=["step", "bottleneck", "no step", "one setting", "failed"],
)
def test_the_headline_says_what_to_set_and_if_the_step_waits(loader: LoaderTuning, headline: str) -> None:
    assert summary_of(loader=loader)[0] == headline


def test_a_row_is_named_by_what_tells_it_apart() -> None:
    rows = [
        LoaderRow(arguments={"num_workers": 2, **more}, workers=2, outcome="ok", examples_per_second=3.0)
        for more in ({"pin_memory": False}, {"pin_memory": True})
    ]
    assert "Set pin_memory=true for" in summary_of(loader=replace(made_iterable(), rows=rows, recommended=1))[0]
    only = replace(made_iterable(), rows=rows[1:], recommended=0)
    assert "Measured num_workers=2 pin_memory=true: 3 examples/s." in summary_of(loader=only)[0]


@pytest.mark.parametrize(
    "sentence",
    [
        "The slowest stage: decode takes 71.0% of the time to make a batch.",
        "An epoch with the step is estimated at 34.5 s.",
        "The step takes 38.4 ms for a batch on average, by the probe on NVIDIA H200, which is 833.3 examples/s.",
        "Why: With num_workers=4 prefetch_factor=2 a step of 38.4 ms waits for 0.6% of the time.",
        "Reproducible: two epochs from one seed gave the same 40 batches, bit for bit.",
        "Its rate is the median of 3 trials, which differ by 3.0%.",
        "Measured: train.py:make_dataset root=data (torch), batches of 32 × 1600 × 80 (features), 892 in an epoch.",
    ],
)
def test_evidence_is_said(sentence: str) -> None:
    assert sentence in summary_of(loader=made_loader())


def test_failed_settings_are_counted_and_quoted() -> None:
    assert warnings_of(loader=made_loader())[0] == (
        "2 of 11 settings of the loader failed; num_workers=8 prefetch_factor=2: RuntimeError: DataLoader "
        "worker (pid 4711) is killed by signal: Bus error."
    )
    failed = tables_of(loaded())["Settings that failed"]
    assert len(failed.rows) == 2
    assert failed.rows[0] == (
        "num_workers=8 prefetch_factor=2",
        "/dev/shm is too small",
        " ".join(SHARED_MEMORY.split()),
    )


def test_workers_that_repeat_each_other_have_no_rate() -> None:
    repeated = with_row(made_loader(recommended=0), 10, outcome="repeats", error="each delivers the whole data set")
    repeated = with_row(repeated, 9, outcome="ok", first_batch_seconds=1.0)
    assert not any("failed" in text for text in warnings_of(loader=repeated))
    assert tables_of(loaded(repeated))["Settings that failed"].rows[0][1] == "workers repeat each other"


def test_interruptions_and_differing_batches_are_warned_of() -> None:
    assert warnings_of(loader=made_loader(interrupted=True))[0].startswith("The tuning was interrupted after")
    assert warnings_of(loader=made_dali())[0] == (
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
    assert [step for step, _ in build_page(loaded(loader)).next_steps] == [*expected, "batchtune report --full"]


# Tables


def test_the_full_table_has_the_settings_that_worked() -> None:
    table = tables_of(loaded())["Settings of the loader"]
    assert table.columns[:3] == ("setting", "examples/s", "step waits") and len(table.rows) == 9
    assert table.marked == 5
    assert table.rows[5][:3] == ("num_workers=4 prefetch_factor=2", "870.7", "0.6%")


def test_settings_that_can_not_be_told_apart_are_called_equal() -> None:
    equal = with_row(made_loader(), 6, equal_to_best=True)
    table = tables_of(loaded(equal))["Settings of the loader"]
    assert (table.columns[-1], table.rows[6][-1]) == ("equal to best", "yes")


def test_the_brief_table_compares_the_fastest_and_no_workers() -> None:
    (table,) = tables_of(loaded(), brief=True).values()
    assert [row[:3] for row in table.rows] == [
        ("recommended", "4", "870.7"),
        ("fastest", "6", "1234"),
        ("without workers", "0", "252.5"),
    ]
    assert tables_of(loaded(made_dali()), brief=True)["The loader's rate"].columns[1] == "reader threads"


def test_a_single_setting_is_not_called_recommended() -> None:
    page = build_page(loaded(made_iterable()))
    assert "Only this setting was measured, so it is not known to be the best." in page.lead
    assert "recommended" not in str(page)


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
