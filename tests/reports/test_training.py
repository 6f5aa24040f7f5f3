"""What reports and rules say of a recorded training."""

import os
import tracemalloc

import msgspec
import pytest
from msgspec.structs import replace
from report_records import made_probe, made_sweep
from training_lines import START, step, write

from batchtune.epochs.measured_costs import costs_of
from batchtune.errors import ResultError
from batchtune.files import open_to_append
from batchtune.reports import FORMATS, load_run, render
from batchtune.reports.gate import RuleInputs, judge, parse_rules
from batchtune.reports.page import build_page
from batchtune.results import (
    read_training,
    write_result,
)

LINES = [
    START,
    step((60, 10), seconds=None, peak_bytes=None),
    step((60, 10), seconds=0.4, peak_bytes=2 * 10**9),
    step((40, 15), seconds=0.6, peak_bytes=3 * 10**9),
]


def recorded(folder, lines):
    """The run of a probe and a sweep with a recorded training."""
    write_result(folder / "probe.json", made_probe())
    write_result(folder / "sweep.json", made_sweep())
    write(folder, lines)
    return load_run(folder)


def test_timed_steps_are_compared_with_the_probes_prediction(tmp_path):
    training = recorded(tmp_path, LINES).training
    assert training.steps == 3
    assert training.mean_step_seconds == pytest.approx(0.5)
    assert training.peak_bytes == 3 * 10**9
    seconds = costs_of(made_probe()).step_seconds
    expected = float(seconds([60.0, 40.0], [10.0, 15.0]).mean())
    assert training.predicted_step_seconds == pytest.approx(expected)
    assert training.predicted_peak_bytes is not None


def test_an_epoch_is_as_many_examples_as_the_data_has(tmp_path):
    """Steps without a time belong to it; what ran out of memory trained on nothing."""
    others = [step((20, 10), rank=1), step((60, 16), oom="CUDA out of memory")]
    training = recorded(tmp_path, [*LINES, *others]).training
    lengths = made_sweep().lengths
    assert training.epoch_batches == pytest.approx(4 * lengths.count / 180)
    padded = 60 * 10 + 60 * 10 + 40 * 15 + 20 * 10
    padding_ratio = 1 - 180 * lengths.total / lengths.count / padded
    assert training.padding_ratio == pytest.approx(max(0.0, padding_ratio))


def test_the_last_recording_with_steps_counts(tmp_path):
    aborted = replace(START, recording="aborted")
    lines = [START, step((1, 2), oom="CUDA out of memory"), *LINES, aborted]
    training = recorded(tmp_path, lines).training
    assert (training.ooms, training.steps) == (0, 3)


def test_an_oom_fails_its_rule_and_is_a_warning(tmp_path):
    oom = step((60, 16), oom="CUDA out of memory")
    lines_by_outcome = {"error": [START], "holds": LINES, "fails": [*LINES, oom]}
    for outcome, lines in lines_by_outcome.items():
        run = recorded(tmp_path, lines)
        rules = parse_rules(["training.ooms > 0"])
        (verdict,) = judge(rules, RuleInputs(results=run))
        assert verdict.outcome == outcome
    page = build_page(run)
    assert "CUDA out of memory" in " ".join(page.warnings)
    said = "Recorded training: 3 steps on made, and out of memory 1 time"
    assert said in " ".join(page.lead)


def test_lines_that_were_cut_short_are_left_out_and_counted(tmp_path):
    """As when a disk was full for a while, or the power failed."""
    path = write(tmp_path, LINES)
    with path.open("ab") as file:
        file.write(b'\n{"rank":0,"bat\n{"rank":-1,"batches":[]}\n\x00\x00\n')
        file.write(msgspec.json.encode(step((2, 10), recording="unknown")))
        file.write(b"\n" + msgspec.json.encode(step((2, 10))))
        file.write(b'\n{"rank":0,"bat')
    run = load_run(tmp_path)
    assert (run.training.steps, run.training.damaged_lines) == (4, 5)
    assert any("5 lines of training.jsonl" in text for text in build_page(run).warnings)


def test_trainings_that_record_at_the_same_time_are_told_apart(tmp_path):
    """Rank 1 of the second may even be faster than the one that writes its start."""
    first = replace(START, recording="first")
    second = replace(START, recording="second")
    of_first = step((2, 10), recording="first")
    of_second = step((3, 9), recording="second")
    fastest = replace(of_second, rank=1)
    both = [of_first, of_second] * 3
    path = write(tmp_path, [fastest, first, second, *both, first, of_first])
    counts = [len(recording.steps) for recording in read_training(path)]
    assert counts == [3, 4, 1]


def test_what_no_recorder_writes_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "training.jsonl"
    os.mkfifo(path)
    with pytest.raises(ResultError, match="not an ordinary file"):
        read_training(path)
    with pytest.raises(ResultError, match=r"training.jsonl can't be written"):
        open_to_append(path)
    path.unlink()
    write(tmp_path, LINES)
    os.truncate(path, 6 << 30)
    tracemalloc.start()
    with pytest.raises(ResultError, match="a line of more than 16 MiB"):
        read_training(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 << 20


@pytest.mark.parametrize("report_format", FORMATS)
def test_a_recording_alone_is_a_report(tmp_path, report_format):
    write(tmp_path, LINES)
    run = load_run(tmp_path)
    assert run.lengths is None
    shown = render(report_format, run)
    assert "Recorded training: 3 steps on made" in " ".join(shown.split())
