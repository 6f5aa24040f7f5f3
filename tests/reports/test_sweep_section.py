"""What a report says of a sweep, and of the probe below it: sentences, tables, warnings, next commands."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from report_records import (
    SCRIPT,
    failed_verification,
    forced_probe,
    made_lengths,
    made_probe,
    made_sweep,
    made_trial,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    summary_of,
    tables_of,
    warnings_of,
    whole_sweep,
    with_recommended,
    without_recommendation,
)
from reports.changed import page_of, run_of, with_row, with_rows

from batchtune.probe.supervisor import about_script
from batchtune.reports.packing import gradient_warnings, of_same_steps
from batchtune.reports.section import clean, make_table
from batchtune.results import StepGradient, WorkloadRecord

SPEECHBRAIN = "SpeechBrain's num_buckets=20"
BOTH = {"probe": made_probe(), "sweep": made_sweep()}


def with_error_of_model(error):
    """A probe whose model of step times misses its trials by so much."""
    probe = made_probe()
    step_seconds = replace(probe.models.step_seconds, relative_error=error)
    return replace(probe, models=replace(probe.models, step_seconds=step_seconds))


# The headline


@pytest.mark.parametrize(
    ("sweep", "headline"),
    [
        (
            made_sweep(unit=None),
            "Set 13 buckets (optimal) with max_batch_length = 600: ",
        ),
        (
            with_rows(made_sweep(), equal_to_best=True),
            f" than {SPEECHBRAIN}, but the estimates may be off by as much.",
        ),
        (
            with_recommended(
                made_sweep(),
                "speechbrain",
                20,
            ),
            ": 1.05 times faster than a fixed batch size of 24.",
        ),
        (
            with_recommended(made_sweep(), "speechbrain", 10),
            f": 1.30 times slower than {SPEECHBRAIN}.",
        ),
        (
            # Few train with more than 20 buckets.
            with_row(made_sweep(), 10, num_buckets=60),
            " than SpeechBrain's num_buckets=19.",
        ),
        (
            replace(made_sweep(), recommended=55),
            "Set 10 buckets (optimal) with measured batch sizes: ",
        ),
        (
            replace(
                made_sweep(), rows=made_sweep().rows[44:], recommended=0, baselines=[]
            ),
            "max_batch_length = 600 s.",
        ),
    ],
)
def test_the_first_sentence_says_what_to_set_and_what_it_saves(sweep, headline):
    assert headline in summary_of(sweep=sweep)[0]


def test_text_is_compared_with_length_grouped_batches():
    sweep = made_sweep(unit="tokens")
    grouped = replace(
        sweep.baselines[0], name="length-grouped", estimated_epoch_seconds=250.0
    )
    said = summary_of(sweep=replace(sweep, baselines=[*sweep.baselines, grouped]))
    assert said[0].endswith(
        ": 1.25 times faster than Transformers' group_by_length (batch size 24)."
    )
    assert "SpeechBrain" not in " ".join(said)


# How far times can be relied on


@pytest.mark.parametrize(
    ("probe", "sweep", "what"),
    [
        (with_error_of_model(0.4), made_sweep(), "the model of step time misses"),
        (
            with_error_of_model(0.4),
            made_sweep(timed=False),
            "the model of step time misses",
        ),  # so poor a model that the sweep does without
        (
            None,
            with_rows(made_sweep(), estimated_epoch_error_seconds=40.0),
            "the epoch's time is known",
        ),
    ],
    ids=["model", "no times", "row"],
)
def test_times_with_a_large_error_are_unreliable_not_unknown(probe, sweep, what):
    first, second, *others = summary_of(probe=probe, sweep=sweep)
    assert first.endswith(f": 37.9% fewer batches than with {SPEECHBRAIN}.")
    assert second.startswith(f"The step times are not reliable ({what} ")
    assert "40.0%): fewer" in second
    assert not re.search("times faster|to within", " ".join(others))
    (table,) = tables_of(run_of(probe=probe, sweep=sweep), brief=True).values()
    assert "estimated epoch" not in table.columns


# What supports it


def test_a_margin_that_is_not_known_is_not_stated():
    probe = replace(proven_probe(), margin=None)
    assert summary_of(probe=probe, sweep=proven_sweep())[1] == (
        "Every batch size was run, or is no larger than one that was; how much memory that leaves free is not known."
    )


def test_examples_that_are_dealt_twice_are_counted():
    said = (
        "1 example is dealt twice, so that all 8 ranks have the same number of batches; the second time "
        "counts as padding."
    )
    assert said in " ".join(
        summary_of(sweep=with_rows(whole_sweep(), repeated_examples=1))
    )


def test_a_better_current_config_is_called_better():
    sweep = made_sweep()
    better = replace(sweep.recommended_row, estimated_epoch_seconds=100.0)
    said = summary_of(sweep=replace(sweep, current=better))
    kept = r"Keep your current config: [0-9.]+ times faster than 13 buckets \(optimal\)"
    assert re.match(kept, said[0])
    assert "recommended" not in " ".join(said)
    unfit = summary_of(sweep=replace(sweep, current=better, current_fits=False))
    assert unfit[0].startswith("Set 13 buckets")


def test_rough_times_are_no_headline():
    probe = proven_probe()
    said = summary_of(probe=probe, sweep=made_sweep())
    assert "times faster" in said[0]
    scattered = [
        replace(trial, step_seconds=0.1, step_seconds_spread=0.05)
        for trial in probe.trials
    ]
    said = summary_of(probe=replace(probe, trials=scattered), sweep=made_sweep())
    assert "batches than with" in said[0]
    assert said[1].startswith("The step times are only rough (see the warnings)")


# The data and the probe


@pytest.mark.parametrize(
    ("cap", "why"),
    [
        (
            16,
            "16 examples are the most allowed, by --max-batch-size or by steps that keep their own",
        ),
        (None, "the data has no more examples"),
    ],
)
def test_a_search_that_the_memory_did_not_end_says_so(cap, why):
    (*_, point) = made_probe().frontier
    capped = replace(point, batch_size=16, closed_by="data", oom_batch_size=None)
    settings = {"max_batch_size": cap}
    probe = replace(made_probe(), frontier=[capped], settings=settings)
    limit, holds, *_ = summary_of(probe=probe)
    assert "is the most that is proven" not in limit
    assert limit.endswith(f"Larger batches were not tried: {why}.")
    assert holds == "A batch holds 16 examples of up to 24.52 s."
    assert ("data" in page_of(probe=probe).sections[0].tables[0].rows[0]) != bool(cap)


def test_an_unfinished_probe_claims_no_more_than_it_knows():
    probe = replace(made_probe(), unfinished=True)
    assert summary_of(probe=probe)[0].startswith(
        "At least max_batch_length = 600 s fits, by an unfinished probe"
    )
    page = page_of(probe=probe, sweep=made_sweep())
    assert page.lead[1].startswith("The probe is unfinished: the same command")


def test_an_unknown_unit_and_truncated_examples_are_told():
    lengths = replace(made_lengths(None), truncated=7)
    page = page_of(sweep=replace(made_sweep(), lengths=lengths))
    assert page.lead[-1].startswith(
        "7 examples longer than 24.52 (--truncate) count as that long"
    )
    assert page.summary[-1].endswith("; the unit is unknown.")


# Tables


def test_a_current_config_that_cant_fit_is_compared_and_marked():
    sweep = replace(whole_sweep(), current_fits=False)
    (table,) = tables_of(run_of(sweep=sweep), brief=True).values()
    compared = ["fixed batch size of 24", "your current config (does not fit)"]
    assert [row[0] for row in table.rows[1:-1]] == compared


def test_each_bucket_tells_the_trial_that_proves_it():
    *others, last = partly_proven_sweep().buckets
    buckets = [*others, replace(last, examples=0)]
    sweep = replace(partly_proven_sweep(), buckets=buckets)
    tables = tables_of(run_of(probe=proven_probe(), sweep=sweep))
    table = tables["Batch sizes (optimal with 13 buckets)"]
    proof = "trial 13: 170 \u00d7 3.582 s"
    assert table.rows[0] == ("3.582 s", "167", "598.2 s", proof)
    assert [row[-1] for row in table.rows[-4:]] == [*["not proven"] * 3, "\u2013"]


def test_a_long_table_is_thinned_and_says_so():
    rows = [{"n": str(n), "none": None} for n in range(200)]
    table = make_table("t", rows, marked=7, file="probe.json", most=10)
    assert table.columns == ("n",)
    assert (table.rows[0], table.rows[-1], len(table.rows)) == (("0",), ("199",), 11)
    assert table.rows[table.marked] == ("7",)
    assert table.note == "11 of 200 rows shown; all are in probe.json."


# Warnings


def test_own_warnings_are_told_once_each():
    probe = replace(made_probe(), warnings=["the clock was held down", "look out."])
    sweep = replace(made_sweep(), warnings=["take care", "look out.", "take care"])
    told = ["take care.", "look out.", "the clock was held down."]
    assert warnings_of(probe=probe, sweep=sweep) == told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"frontier": made_probe().frontier[:-1]},
            "The frontier ends at 16 s, but the longest example has 24.52 s.",
        ),
        (
            {"trials": [made_trial(0, "crash")]},
            "1 trial failed, but not for lack of memory (crash)",
        ),
        (
            {"models": with_error_of_model(0.25).models},
            "The model of step time misses the trials by 25.0%",
        ),
    ],
)
def test_what_a_probe_leaves_in_doubt_is_told(changes, words):
    assert warnings_of(probe=replace(made_probe(), **changes))[0].startswith(words)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (601.0, ["may run out of memory"]),
        (500.0, ["memory is left unused"]),
        (590.0, []),
    ],
)
def test_a_limit_other_than_the_measured_one_is_told(limit, words):
    sweep = replace(made_sweep(), warnings=[], max_batch_length=limit)
    warnings = warnings_of(probe=made_probe(), sweep=sweep)
    assert len(warnings) == len(words) and all(word in warnings[0] for word in words)


@pytest.mark.parametrize(
    ("probe", "remedy"),
    [
        (None, "no probe here has run them. Run `batchtune probe-oom`, then"),
        (made_probe(), "Run the interrupted `batchtune probe-oom` again"),
    ],
    ids=["none", "interrupted"],
)
def test_sizes_that_are_not_proven_come_with_a_remedy(probe, remedy):
    assert remedy in warnings_of(probe=probe, sweep=partly_proven_sweep())[0]


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [("AdamW", "by 1.27 (square root"), ("SGD", "by 1.61 (linear, for SGD), as a")],
)
def test_a_learning_rate_scales_as_the_optimizer_needs(optimizer, rule):
    probe = made_probe()
    script = replace(SCRIPT, optimizers=[optimizer])
    probe = replace(probe, device=replace(probe.device, script=script))
    assert rule in " ".join(summary_of(probe=probe, sweep=whole_sweep()))


def test_sizes_are_not_proven_by_batches_unlike_a_scripts_own():
    """After --force: in the sentences and the warnings, whatever the turns and shuffled training showed."""
    probe = forced_probe()
    assert not probe.is_proven
    sweep = with_rows(proven_sweep(), unproven=13)
    said = " ".join(summary_of(probe=probe, sweep=sweep))
    assert "Proven in shuffled training" not in said and "was run, or" not in said
    assert "13 of 13 batch sizes are not proven to fit" in said
    why = "that was measured allocates -19.7% compared with the script's own"
    assert why in warnings_of(probe=probe, sweep=sweep)[0]
    assert "None of it is proven: a batch of 8" in " ".join(summary_of(probe=probe))
    notes = " ".join(about_script(probe.device.script))
    assert "no batch size will be proven" in notes


# What to do next


def steps_of(**records):
    """The commands that come next, each with its purpose."""
    return page_of(**records).next_steps


def commands_of(**records):
    return [command for command, _ in steps_of(**records)]


def test_after_a_leak_the_same_is_verified_again():
    leak = replace(failed_verification(), failures=[])
    assert commands_of(**BOTH, verification=leak) == [
        "batchtune verify MANIFEST",
        "batchtune report --full",
    ]


def test_a_next_command_repeats_no_module_and_quotes_folders():
    spec = WorkloadRecord(spec="subprocess:run", options={"shell": True})
    probe = replace(made_probe(), workload=spec)
    steps = commands_of(probe=probe, sweep=made_sweep(), folder=Path("my run"))
    assert steps[1] == "batchtune verify MANIFEST --run 'my run' --workload W --set ..."


def test_next_commands_of_a_script_name_all_that_they_need():
    record = WorkloadRecord(spec="train.py", options={}, command=["python", "train.py"])
    asked = {"memory_bytes": 1 << 34, "ddp": True, "allocator": "native"}
    steps = commands_of(
        probe=replace(made_probe(), workload=record, settings=asked),
        sweep=made_sweep(),
        verification=failed_verification(),
        manifest="batchtune-run/lengths.parquet",
    )
    assert steps[:2] == [
        "batchtune tune batchtune-run/lengths.parquet --memory 17179869184 --ddp --allocator native -- COMMAND",
        "batchtune verify batchtune-run/lengths.parquet -- COMMAND",
    ]


def test_a_script_with_a_stream_is_not_run_with_a_table():
    steps = commands_of(probe=forced_probe(), sweep=made_sweep())
    assert "batchtune sweep-stream MANIFEST" in steps


def test_where_no_row_has_fewer_batches_padding_can_be_compared():
    sweep = without_recommendation(made_sweep())
    fixed = replace(sweep.baselines[0], batches=600)
    assert steps_of(sweep=replace(sweep, baselines=[fixed, *sweep.baselines[1:]]))[
        0
    ] == (
        "batchtune sweep-buckets MANIFEST --min-steps 600",
        "compare padding, not batches",
    )


def test_equal_lengths_have_no_other_number_of_buckets():
    sweep = without_recommendation(made_sweep())
    lengths = replace(sweep.lengths, min=sweep.lengths.max)
    steps = commands_of(sweep=replace(sweep, lengths=lengths))
    assert steps == ["batchtune report --full"]


# Words


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
def test_a_string_becomes_one_harmless_line(text, cleaned):
    assert clean(text) == cleaned


# The gradient of a step whose examples are cut otherwise


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"any_counts": 3e-7}, r"gradient is the same \(difference 3e-07\)"),
        ({"any_counts": 0.12, "equal_counts": 2e-7}, "12.0%: .* over the examples"),
        ({"any_counts": 0.12, "equal_counts": 0.2, "mates": 0.0}, "over the tokens"),
        ({"any_counts": 0.3, "equal_counts": 0.2, "mates": 0.5}, "in-batch negatives"),
        (
            {
                "any_counts": 0.3,
                "equal_counts": 0.2,
                "mates": 0.5,
                "batch_norm": ["3 × BatchNorm1d"],
            },
            r"batch norm \(3 × BatchNorm1d\) takes .*--equal-counts it differs by 20",
        ),
        ({"again": 0.3, "any_counts": 0.4}, "by 40.0%, and by 30.0% if .* are random"),
        ({"unknown": "its batches are packed"}, "not compared: its batches are packed"),
    ],
)
def test_what_a_loss_makes_of_other_micro_batches_is_said(changes, words):
    gradient = StepGradient(**changes)
    row = replace(made_sweep().rows[0], pool_size=64, accumulate=16)
    sweep = replace(
        made_sweep(),
        gradient=gradient,
        gradient_difference=gradient.of_cut(equal_counts=False),
    )
    said = [*of_same_steps(sweep, row), *gradient_warnings(sweep, row)]
    assert re.search(words, " ".join(said))
