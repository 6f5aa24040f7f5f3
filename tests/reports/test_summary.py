"""The sentences of a summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from report_records import (
    failed_verification,
    made_probe,
    made_sweep,
    made_verification,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    with_recommended,
    without_recommendation,
)

from batchtune.reports import RunResults, summary_sentences
from batchtune.reports.page import build_page, next_steps
from batchtune.reports.rows import today_row
from batchtune.results import Probe, Row, Sweep, WorkloadRecord
from batchtune.units import format_ratio


def summary_of(sweep: Sweep, probe: Probe | None = None) -> list[str]:
    return summary_sentences(RunResults(name="run", probe=probe, sweep=sweep))


def test_the_first_sentence_says_what_to_set_and_what_it_saves() -> None:
    first, *others = summary_of(made_sweep())
    assert first == (
        "Set 13 buckets (optimal) with max_batch_length = 600 s: 1.34 times faster than SpeechBrain's num_buckets=20."
    )
    assert (
        "An epoch needs 634 batches; SpeechBrain's num_buckets=20 needs 1021 and a fixed batch size of 24 needs 1190."
        in others
    )


def test_on_several_ranks_the_batches_are_those_of_all() -> None:
    sweep = msgspec.structs.replace(made_sweep(), settings={"world_size": 8})
    assert "An epoch on 8 ranks needs 634 batches;" in " ".join(summary_of(sweep))


def test_a_better_current_config_is_called_better() -> None:
    sweep = made_sweep()
    assert sweep.recommended_row is not None
    better = msgspec.structs.replace(sweep.recommended_row, estimated_epoch_seconds=100.0)
    sentences = summary_of(msgspec.structs.replace(sweep, current=better))
    assert "Your current config is better than the recommended table: keep it." in sentences


def test_a_gain_within_the_error_of_the_estimates_says_so() -> None:
    sweep = made_sweep()
    equal = [msgspec.structs.replace(row, equal_to_best=True) for row in sweep.rows]
    assert summary_of(msgspec.structs.replace(sweep, rows=equal))[0].endswith(
        ": 1.34 times faster than SpeechBrain's num_buckets=20, but the estimates may be off by as much."
    )


def test_estimated_times_are_compared_where_they_are_known() -> None:
    assert (
        "One epoch is estimated at 3 min 20 s: 1.34 times faster than SpeechBrain's num_buckets=20 "
        "(4 min 27 s) and 1.41 times faster than a fixed batch size of 24 (4 min 42 s)."
    ) in summary_of(made_sweep())


def test_without_times_batches_are_compared_and_it_says_so() -> None:
    first, second, *_ = summary_of(made_sweep(timed=False))
    assert first.endswith(": 37.9% fewer batches than with SpeechBrain's num_buckets=20.")
    assert second == "Step times are not known, so tables are compared by batches; the time saved may be much less."


def unreliable(sweep: Sweep) -> Sweep:
    rows = [msgspec.structs.replace(row, estimated_epoch_error_seconds=40.0) for row in sweep.rows]
    return msgspec.structs.replace(sweep, rows=rows)


def test_times_with_a_large_error_are_not_compared() -> None:
    first, second, *others = summary_of(unreliable(made_sweep()))
    assert first.endswith(": 37.9% fewer batches than with SpeechBrain's num_buckets=20.")
    assert second.startswith("The estimated times are not reliable: their error is 40.0%.")
    assert not any("times faster" in text for text in others)
    page = build_page(RunResults(name="run", sweep=unreliable(made_sweep())))
    assert "estimated epoch" not in [column.title for column in page.tables[0].columns]


def test_a_step_model_with_a_large_error_is_not_relied_on() -> None:
    probe = made_probe()
    assert probe.models.step_seconds is not None
    for error, compared in ((0.31, "fewer batches"), (0.29, "times faster")):
        model = msgspec.structs.replace(probe.models.step_seconds, relative_error=error)
        poor = msgspec.structs.replace(probe, models=msgspec.structs.replace(probe.models, step_seconds=model))
        assert compared in summary_of(made_sweep(), poor)[0]


def test_that_every_batch_was_run_is_told_with_the_margin() -> None:
    assert summary_of(proven_sweep(), proven_probe())[1] == (
        "Every batch size was run, or is no larger than one that was, and leaves 400 MiB (0.3% of the limit) free."
    )


def test_a_system_that_tells_no_peaks_has_no_known_margin() -> None:
    probe = msgspec.structs.replace(proven_probe(), margin=None)
    assert summary_of(proven_sweep(), probe)[1] == (
        "Every batch size was run, or is no larger than one that was; how much memory that leaves free is not known."
    )


def test_batch_sizes_that_were_not_run_are_counted() -> None:
    told = summary_of(partly_proven_sweep(), proven_probe())
    assert told[1] == "4 of 13 batch sizes are not proven to fit: the warnings say why."


def test_without_a_probe_nothing_is_said_of_what_was_run() -> None:
    assert not any("was run" in sentence or "proven" in sentence for sentence in summary_of(made_sweep()))


def test_the_bound_is_told_with_the_distance_from_it() -> None:
    assert "Lower bound: 604 batches; this needs 5.0% more." in summary_of(made_sweep(timed=False))


def test_padding_is_held_against_todays_practice() -> None:
    assert (
        "Padding is 3.1% of all cells, against 22.0% with SpeechBrain's num_buckets=20 and 22.4% with a "
        "fixed batch size of 24."
    ) in summary_of(made_sweep())


def test_the_sweeps_reason_ends_with_a_full_stop() -> None:
    assert summary_of(made_sweep())[1] == (
        "Why: optimal with 13 buckets is within 1% of the best, and fewer buckets keep more randomness."
    )


def test_no_recommendation_is_said_first_with_the_sweeps_reason() -> None:
    assert summary_of(without_recommendation(made_sweep())) == [
        "No bucket table is recommended: no table needs fewer batches than a fixed batch size of 24.",
        "A fixed batch size of 24 needs 1190 batches for an epoch.",
    ]


def test_todays_practice_is_not_compared_with_itself() -> None:
    said = summary_of(with_recommended(made_sweep(), "speechbrain", 20))
    assert said[0].endswith(" 600 s: 1.05 times faster than a fixed batch size of 24.")
    assert "An epoch needs 1021 batches; a fixed batch size of 24 needs 1190." in said


def test_text_is_compared_with_length_grouped_batches() -> None:
    sweep = made_sweep(unit="tokens")
    grouped = msgspec.structs.replace(sweep.baselines[0], name="length-grouped", estimated_epoch_seconds=250.0)
    said = summary_of(msgspec.structs.replace(sweep, baselines=[*sweep.baselines, grouped]))
    assert said[0].endswith(": 1.25 times faster than Transformers' group_by_length (batch size 24).")
    assert "SpeechBrain" not in " ".join(said)


@pytest.mark.parametrize("unit", ["s", "tokens"])
def test_without_times_a_brief_report_says_so_too(unit: str) -> None:
    sweep = made_sweep(timed=False, unit=unit)
    said = build_page(RunResults(name="run", sweep=sweep)).lead
    assert said[1] == "Step times are not known, so tables are compared by batches; the time saved may be much less."


def test_a_slower_recommendation_is_called_slower() -> None:
    sweep = with_recommended(made_sweep(), "speechbrain", 10)
    assert "1.24 times slower than a fixed batch size of 24" in " ".join(summary_of(sweep))


def test_a_table_of_the_frontier_names_measured_batch_sizes() -> None:
    sweep = made_sweep()
    index = next(i for i, row in enumerate(sweep.rows) if row.sizing == "frontier")
    first = summary_of(msgspec.structs.replace(sweep, recommended=index))[0]
    assert first.startswith("Set 10 buckets (optimal) with measured batch sizes: ")


def test_a_sweep_with_nothing_to_compare_has_a_summary() -> None:
    sweep = made_sweep()
    rows = [row for row in sweep.rows if row.strategy == "optimal"]
    bare = msgspec.structs.replace(sweep, rows=rows, baselines=[], recommended=0, reason="")
    assert summary_of(bare) == [
        "Set 10 buckets (optimal) with max_batch_length = 600 s.",
        "An epoch needs 641 batches.",
        "One epoch is estimated at 3 min 22 s.",
        "Lower bound: 604 batches; this needs 6.1% more. In time: 3 min 13 s; this takes 4.7% more.",
        "Padding is 4.0% of all cells.",
        "3.15% of batch mates are mates again in the next epoch.",
        "Batches hold 3 to 425 examples, 44.52 on average (coefficient of variation 0.61).",
    ]


def test_a_probe_alone_tells_the_limit_and_the_next_command() -> None:
    assert summary_sentences(RunResults(name="run", probe=made_probe(), sweep=None)) == [
        "max_batch_length = 600 s is the most that fits at every length, measured on NVIDIA H200, limited to "
        "126 GiB of 140 GiB.",
        "A batch holds from 24 examples of 24.52 s to 434 of 1.41 s.",
        "`batchtune sweep-buckets` finds the buckets that waste the least with it.",
    ]


def test_lengths_of_unknown_unit_are_bare_numbers() -> None:
    assert "max_batch_length = 600: " in summary_of(made_sweep(unit=None))[0]


@pytest.mark.parametrize(("swept", "today"), [((5, 10, 15), 15), ((10, 20, 60), 20), ((5, 60), None), ((), None)])
def test_todays_practice_is_speechbrain_with_10_to_20_buckets(swept: tuple[int, ...], today: int | None) -> None:
    sweep = made_sweep()
    rows: list[Row] = [msgspec.structs.replace(sweep.rows[0], num_buckets=number) for number in swept]
    row = today_row(msgspec.structs.replace(sweep, rows=rows))
    assert (row[1].num_buckets if row else None) == today


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.50"), (1.6, "1.60"), (9.994, "9.99"), (9.996, "10.0"), (99.94, "99.9"), (99.96, "100")],
)
def test_a_ratio_has_three_digits_and_keeps_its_zeros(value: float, text: str) -> None:
    assert format_ratio(value) == text


BOTH = RunResults(name="run", probe=made_probe(), sweep=made_sweep())
LEAK = msgspec.structs.replace(failed_verification(), failures=[])


@pytest.mark.parametrize(
    ("results", "first"),
    [
        (RunResults(name="run", probe=made_probe(), sweep=None), ["batchtune sweep-buckets MANIFEST"]),
        (
            RunResults(name="run", probe=None, sweep=without_recommendation(made_sweep())),
            ["batchtune sweep-buckets MANIFEST --num-buckets 2:60"],
        ),
        (
            RunResults(name="run", probe=None, sweep=made_sweep()),
            [
                "batchtune-run/sampler.yaml",
                "batchtune probe-oom MANIFEST --workload W",
                "batchtune export --to FRAMEWORK",
            ],
        ),
        (BOTH, ["batchtune-run/sampler.yaml", "batchtune verify MANIFEST", "batchtune export --to FRAMEWORK"]),
        (
            replace(BOTH, verification=made_verification()),
            ["batchtune-run/sampler.yaml", "batchtune export --to FRAMEWORK"],
        ),
        (
            replace(BOTH, verification=failed_verification()),
            ["batchtune tune MANIFEST --workload W --force", "batchtune verify MANIFEST"],
        ),
        (replace(BOTH, verification=LEAK), ["batchtune verify MANIFEST"]),
    ],
    ids=["probe", "nothing", "sweep", "both", "verified", "failed", "leak"],
)
def test_what_comes_next_follows_from_what_there_is(results: RunResults, first: list[str]) -> None:
    assert [command for command, _ in next_steps(results)] == [*first, "batchtune report --full"]


def test_a_next_command_repeats_no_module_that_a_record_names() -> None:
    assert BOTH.probe is not None
    spec = WorkloadRecord(spec="subprocess:run", options={"shell": True})
    results = replace(BOTH, probe=msgspec.structs.replace(BOTH.probe, workload=spec))
    assert "batchtune verify MANIFEST --workload W --set ..." in [command for command, _ in next_steps(results)]


def test_a_next_command_quotes_an_unusual_folder() -> None:
    commands = [command for command, _ in next_steps(replace(BOTH, folder=Path("my run")))]
    assert commands[1] == "batchtune verify 'my run' MANIFEST"
