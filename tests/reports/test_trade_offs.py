"""What a report says beside what to set: equals, randomness, ranks, saturation, tables over two lengths."""

from __future__ import annotations

import msgspec
import pytest
from report_records import made_sweep, whole_sweep, without_recommendation

from batchtune.reports import FORMATS, RunResults, render, summary_sentences
from batchtune.reports.trade_offs import trade_off_sentences
from batchtune.results import Saturation, Sweep


def sentence(sweep: Sweep, begins: str) -> str:
    (found,) = (text for text in sentences_of(sweep) if text.startswith(begins))
    return found


def sentences_of(sweep: Sweep) -> list[str]:
    assert sweep.recommended_row is not None
    return list(trade_off_sentences(sweep, sweep.recommended_row))


def test_a_sweep_that_knows_nothing_more_says_nothing_more() -> None:
    sentences = sentences_of(made_sweep(timed=False))
    assert [text.split(" ", 1)[1][:20] for text in sentences] == ["of batch mates are m", "hold 3 to 425 exampl"]


def test_the_users_settings_now_come_before_any_other() -> None:
    first, *others = summary_sentences(RunResults(name="run", probe=None, sweep=whole_sweep()))
    assert (
        first == "Set 13 buckets (optimal) with max_batch_length = 600 s: 1.34 times faster than your current config."
    )
    assert (
        "An epoch on 8 ranks needs 634 batches; your current config (train.yaml) needs 1021 and a fixed batch size of "
        "24 needs 1190."
    ) in others
    assert "1.34 times faster than your current config (4 min 27 s)" in " ".join(others)


def test_the_error_of_the_time_is_told() -> None:
    assert sentence(whole_sweep(), "The measured steps") == (
        "The measured steps give the time to within 2.5% (two standard errors)."
    )


def test_the_learning_rate_scales_with_the_batch_size() -> None:
    assert sentence(whole_sweep(), "Batches hold") == (
        "Batches hold 3 to 425 examples, 45.01 on average (coefficient of variation 0.61); a learning rate tuned for "
        "your current config scales by 1.61 (linear) or 1.27 (square root), as a hint."
    )


def test_what_waiting_costs_is_told() -> None:
    assert sentence(whole_sweep(), "On 8 ranks") == (
        "On 8 ranks an epoch takes 27.5 s (10.0% of waiting) if each rank takes any batch, 25.5 s (2.0% of waiting) "
        "if all take batches of the same bucket; 80 steps, each rank with any batch."
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


def test_a_largest_limit_that_is_needed_is_not_mentioned() -> None:
    sweep = whole_sweep()
    assert sweep.saturation is not None
    full = msgspec.structs.replace(sweep.saturation, max_batch_length=600.0)
    texts = sentences_of(msgspec.structs.replace(sweep, saturation=full))
    assert not [text for text in texts if "already reaches" in text]


def test_what_two_dimensions_gain_is_told() -> None:
    assert sentence(whole_sweep(), "Buckets over both") == (
        "Buckets over both lengths, as NeMo takes them, would be 1.10 times as fast as over the first alone, with 20 "
        "buckets by the frontier, on one rank (sweep.json has the table)."
    )


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
