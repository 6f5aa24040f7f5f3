"""What a report says beside what to set: equals, randomness, ranks, saturation, tables over two lengths."""

from __future__ import annotations

import msgspec
import pytest
from report_records import made_sweep, whole_sweep, without_recommendation

from batchtune.reports import FORMATS, RunResults, render, summary_sentences
from batchtune.reports.sweep_tables import trade_off_tables
from batchtune.reports.trade_offs import trade_off_sentences
from batchtune.results import Saturation, Sweep


def sentence(sweep: Sweep, begins: str) -> str:
    (found,) = (text for text in trade_off_sentences(sweep) if text.startswith(begins))
    return found


def test_a_sweep_that_knows_nothing_more_says_nothing_more() -> None:
    sentences = list(trade_off_sentences(made_sweep(timed=False)))
    assert [text.split(" ", 1)[1][:20] for text in sentences] == ["of batch mates are m", "hold 3 to 425 exampl"]
    assert list(trade_off_tables(made_sweep(timed=False))) == []


def test_the_users_settings_now_come_before_any_other() -> None:
    first, second, third, *_ = summary_sentences(RunResults(name="run", probe=None, sweep=whole_sweep()))
    assert (
        first == "Set 13 buckets (optimal) with max_batch_length = 600 s: 1.34 times faster than your current config."
    )
    assert second == (
        "An epoch on 8 ranks needs 634 batches; your current config (train.yaml) needs 1021 and a fixed batch size of "
        "24 needs 1190."
    )
    assert "1.34 times faster than your current config (4 min 27 s)" in third


def test_tables_within_the_error_are_equal() -> None:
    assert sentence(whole_sweep(), "The measured steps") == (
        "The measured steps give the time to within 2.5% (two standard errors); 22 of 66 tables are equal to the "
        "fastest within that error."
    )


def test_the_learning_rate_scales_with_the_batch_size() -> None:
    assert sentence(whole_sweep(), "Batches hold") == (
        "Batches hold 3 to 425 examples, 45.01 on average (coefficient of variation 0.61); a learning rate tuned for "
        "your current config scales by 1.61 (linear) or 1.27 (square root), as a hint."
    )


def test_what_waiting_costs_is_told() -> None:
    assert sentence(whole_sweep(), "On 8 ranks") == (
        "On 8 ranks an epoch takes 27.5 s if each rank takes any batch (10.0% more than if none waited), "
        "25.5 s (2.0% more) if all take batches of the same bucket; 80 steps, each rank with any batch."
    )


@pytest.mark.parametrize(("repeated", "said"), [(1, "1 example is dealt twice"), (56, "56 examples are dealt twice")])
def test_what_is_dealt_twice_is_told(repeated: int, said: str) -> None:
    sweep = whole_sweep()
    rows = [msgspec.structs.replace(row, repeated_examples=repeated) for row in sweep.rows]
    assert sentence(msgspec.structs.replace(sweep, rows=rows), said) == (
        f"{said}, so that each of the 8 ranks has as many batches; the second time counts as padding."
    )


def test_a_smaller_limit_that_is_as_fast_is_told() -> None:
    assert sentence(whole_sweep(), "max_batch_length = 300 s") == (
        "max_batch_length = 300 s already reaches 95.0% of the best throughput of any max_batch_length, with 22.51 "
        "examples a batch on average: often the better choice for training."
    )


def test_a_table_of_the_frontier_has_no_smaller_limit() -> None:
    sweep = whole_sweep()
    frontier = next(index for index, row in enumerate(sweep.rows) if row.sizing == "frontier")
    sweep = msgspec.structs.replace(sweep, recommended=frontier)
    assert not [text for text in trade_off_sentences(sweep) if "already reaches" in text]


def test_a_largest_limit_that_is_needed_is_not_mentioned() -> None:
    sweep = whole_sweep()
    assert sweep.saturation is not None
    full = msgspec.structs.replace(sweep.saturation, max_batch_length=600.0)
    texts = trade_off_sentences(msgspec.structs.replace(sweep, saturation=full))
    assert not [text for text in texts if "already reaches" in text]


def test_what_two_dimensions_gain_is_told() -> None:
    assert sentence(whole_sweep(), "Buckets over both") == (
        "Buckets over both lengths, as NeMo takes them, would be 1.10 times as fast as over the first alone, with 20 "
        "buckets by the frontier, on one rank (sweep.json has the table)."
    )


def test_the_curve_marks_the_recommended_row() -> None:
    curve = next(trade_off_tables(whole_sweep()))
    assert curve.title == "Speed against randomness"
    assert curve.marked is not None and curve.rows[curve.marked][0] == "optimal 13"


def test_every_format_shows_it_all() -> None:
    for name in FORMATS:
        assert "train.yaml" in render(name, RunResults(name="run", probe=None, sweep=whole_sweep())), name


def test_zeros_that_a_file_may_hold_crash_no_format() -> None:
    sweep = without_recommendation(whole_sweep())
    replace = msgspec.structs.replace
    zeros = replace(
        sweep,
        rows=[replace(row, effective_buckets=0.0, estimated_epoch_seconds=0.0) for row in sweep.rows],
        saturation=Saturation(fraction=0.0, max_batch_length=1.0, mean_batch_size=0.0),
        two_dimensional=[replace(sweep.two_dimensional[0], batches=1, estimated_epoch_seconds=0.0)],
    )
    for name in FORMATS:
        assert render(name, RunResults(name="run", probe=None, sweep=sweep))
        assert render(name, RunResults(name="run", probe=None, sweep=zeros))
        assert render(
            name, RunResults(name="run", probe=None, sweep=replace(zeros, recommended=whole_sweep().recommended))
        )
