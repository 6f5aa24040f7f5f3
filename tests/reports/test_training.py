"""What reports and rules say of a recorded training."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_records import made_probe, made_sweep, rule_inputs
from training_lines import start, step, write

from batchtune.epochs.measured_costs import costs_of
from batchtune.reports import FORMATS, RunResults, load_run, render
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import build_page
from batchtune.reports.rule_fields import RuleInputs
from batchtune.results import Training, TrainingStart, TrainingStep, write_result

LINES = [
    start(per_unit=100.0),
    step((60, 1000), seconds=9.0, peak_bytes=10**11, warm_up=True),
    step((60, 1000), seconds=0.4, peak_bytes=2 * 10**9),
    step((40, 1500), seconds=0.6, peak_bytes=3 * 10**9),
]


def recorded(folder: Path, lines: list[TrainingStart | TrainingStep]) -> RunResults:
    """The run of a probe and a sweep with a recorded training."""
    write_result(folder / "probe.json", made_probe())
    write_result(folder / "sweep.json", made_sweep())
    write(folder, lines)
    return load_run(folder)


def training_of(run: RunResults) -> Training:
    assert run.training is not None
    return run.training


def test_measured_is_what_the_steps_after_the_first_took(tmp_path: Path) -> None:
    training = training_of(recorded(tmp_path, LINES))
    assert (training.steps, training.batches, training.examples) == (3, 3, 160)
    assert training.mean_step_seconds == pytest.approx(0.5)
    assert training.peak_bytes == 3 * 10**9


def test_predicted_is_what_the_probe_says_of_the_same_batches(tmp_path: Path) -> None:
    training = training_of(recorded(tmp_path, LINES))
    seconds = costs_of(made_probe()).step_seconds
    assert seconds is not None
    expected = float(seconds([60.0, 40.0], [10.0, 15.0]).mean())
    assert training.predicted_step_seconds == pytest.approx(expected)
    assert training.time_ratio == pytest.approx(0.5 / expected)
    assert training.predicted_peak_bytes is not None


def test_an_epoch_is_as_many_examples_as_the_data_has(tmp_path: Path) -> None:
    training = training_of(recorded(tmp_path, LINES))
    lengths = made_sweep().lengths
    assert training.epoch_batches == pytest.approx(3 * lengths.count / 160)
    assert training.epoch_seconds == pytest.approx(1.0 * lengths.count / 100)
    padded = 60 * 10 + 60 * 10 + 40 * 15
    assert training.padding_ratio == pytest.approx(
        max(0.0, 1 - 160 * lengths.total / lengths.count / padded)
    )


def test_ranks_train_at_the_same_time(tmp_path: Path) -> None:
    alone = training_of(recorded(tmp_path, LINES))
    other = [step((60, 1000), seconds=0.5, rank=1), step((40, 1500), rank=1)]
    lines = [*LINES, start(per_unit=100.0, rank=1), *other]
    both = training_of(recorded(tmp_path, lines))
    assert (both.ranks, both.recordings, both.steps) == (2, 1, 5)
    assert both.epoch_seconds is not None and alone.epoch_seconds is not None
    assert both.epoch_seconds < 0.6 * alone.epoch_seconds


def test_the_last_recording_counts(tmp_path: Path) -> None:
    lines = [start(), step((1, 2), oom="CUDA out of memory"), *LINES]
    run = recorded(tmp_path, lines)
    assert training_of(run).ooms == 0
    assert training_of(run).recordings == 2
    assert "2 recordings" in " ".join(build_page(run).summary)


def test_an_oom_fails_its_rule_and_is_a_warning(tmp_path: Path) -> None:
    (rule,) = parse_rules(["training.ooms > 0"])
    (held,) = judge([rule], RuleInputs(results=recorded(tmp_path, LINES)))
    assert held.outcome == "holds"
    run = recorded(tmp_path, [*LINES, step((60, 1600), oom="CUDA out of memory")])
    (failed,) = judge([rule], RuleInputs(results=run))
    assert failed.outcome == "fails"
    page = build_page(run)
    assert any("CUDA out of memory" in warning for warning in page.warnings)
    assert "Recorded training: 3 steps on made, and out of memory 1 time" in " ".join(
        page.lead
    )


@pytest.mark.parametrize(
    "rule", ["training.peak_bytes > 4e9", "training.time_ratio > 200000%"]
)
def test_other_figures_can_be_held(tmp_path: Path, rule: str) -> None:
    inputs = RuleInputs(results=recorded(tmp_path, LINES))
    (verdict,) = judge(parse_rules([rule]), inputs)
    assert verdict.outcome == "holds"


def test_a_rule_without_a_recording_says_what_makes_one() -> None:
    (verdict,) = judge(parse_rules(["training.ooms > 0"]), rule_inputs())
    assert verdict.outcome == "error"
    assert "batchtune record" in verdict.message


def test_batches_in_another_unit_are_a_warning(tmp_path: Path) -> None:
    run = recorded(tmp_path, [start(), *LINES[1:]])
    assert training_of(run).too_long
    assert training_of(run).padding_ratio is None
    assert any("--per-unit" in warning for warning in build_page(run).warnings)


def test_cut_lines_are_counted(tmp_path: Path) -> None:
    recorded(tmp_path, LINES)
    with (tmp_path / "training.jsonl").open("ab") as file:
        file.write(b'{"rank":0,"bat')
    run = load_run(tmp_path)
    assert training_of(run).cut_lines == 1
    assert training_of(run).steps == 3
    assert any("1 line of training.jsonl" in text for text in build_page(run).warnings)


@pytest.mark.parametrize("report_format", FORMATS)
def test_a_recording_alone_is_a_report(tmp_path: Path, report_format: str) -> None:
    write(tmp_path, LINES)
    run = load_run(tmp_path)
    assert run.lengths is None
    shown = render(report_format, run)
    assert "Recorded training: 3 steps on made" in " ".join(shown.split())
