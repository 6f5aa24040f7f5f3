"""The CI gate: what its rules mean, at their edges."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_records import (
    made_drift,
    made_lengths,
    made_sweep,
    made_verification,
    rule_inputs,
    without_recommendation,
)
from reports.changed import with_row as changed

from batchtune.errors import UsageError
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import drift_sentences

replace = msgspec.structs.replace
SWEEP = made_sweep()


def with_row(**changes):
    return changed(SWEEP, **changes)


def verdict_of(rule, evidence):
    (verdict,) = judge(parse_rules([rule]), evidence)
    return verdict


def outcome(rule, sweep=None, **evidence):
    return verdict_of(rule, rule_inputs(sweep=sweep or SWEEP, **evidence)).outcome


@pytest.mark.parametrize(
    ("value", "rule", "expected"),
    [
        (0.08, "padding_ratio > 8%", "holds"),
        (0.08, "padding_ratio >= 8%", "fails"),
        (0.08, "padding_ratio == 8 %", "fails"),
        (0.08000000000000002, "padding_ratio > 8%", "fails"),
        (0.07999999999999999, "padding_ratio >= 8%", "holds"),
        (0.147, "padding_ratio == 14.7%", "fails"),
        (0.99999, "padding_ratio >= 100%", "holds"),
        (5e-324, "padding_ratio > 0%", "fails"),
    ],
)
def test_ratios_are_compared_as_the_decimals_that_people_read(value, rule, expected):
    assert outcome(rule, with_row(padding_ratio=value)) == expected


def test_a_message_has_the_value_as_the_file_has_it():
    verdict = verdict_of(
        "padding_ratio > 8%", rule_inputs(sweep=with_row(padding_ratio=0.09421))
    )
    assert verdict.message == "padding_ratio is 0.09421, which is > 8%"
    assert (verdict.value, verdict.limit, verdict.outcome) == (0.09421, 0.08, "fails")


@pytest.mark.parametrize(
    ("field", "ours", "theirs", "rule", "expected"),
    [
        ("batches", 1224, 1200, "2%", "holds"),
        ("batches", 1225, 1200, "2%", "fails"),
        ("batches", 100, 100, "0%", "holds"),
        ("padding_ratio", 0.1021, 0.1, "2%", "fails"),
        ("padding_ratio", 0.0, 0.0, "2%", "holds"),
        ("padding_ratio", 0.0001, 0.0, "500%", "fails"),
        ("fill", 0.98, 1.0, "2%", "holds"),
        ("fill", 0.9799, 1.0, "2%", "fails"),
        ("mean_batch_size", 90.0, 100.0, "9.9%", "fails"),
        ("mates_again", 0.103, 0.1, "2%", "fails"),
        ("length_correlation", -0.1, -0.1, "0%", "holds"),
        ("length_correlation", -0.09, -0.1, "9%", "fails"),
    ],
)
def test_worse_is_a_share_of_the_baseline(field, ours, theirs, rule, expected):
    ours_sweep, theirs_sweep = with_row(**{field: ours}), with_row(**{field: theirs})
    assert (
        outcome(f"{field} worse {rule}", ours_sweep, baseline=theirs_sweep) == expected
    )


CAN_NOT_TELL = {
    "a field that is none": ("batchs > 600", {}, "did you mean batches"),
    "a field like no other": ("xyzzy > 1", {}, "not a number that a rule can name"),
    "a field that is text": ("strategy > 1", {}, "not a number"),
    "a method": ("__class__ > 1", {}, "not a number"),
    "no sweep": ("batches > 600", {"sweep": None}, "sweep-buckets"),
    "nothing recommended": (
        "batches > 600",
        {"sweep": without_recommendation(made_sweep())},
        "no table needs fewer batches",
    ),
    "an unknown value": (
        "estimated_epoch_seconds > 1",
        {"sweep": made_sweep(timed=False)},
        "not known",
    ),
    "sizes that were not probed": ("unproven > 0", {}, "unproven is not known (null)"),
    "a record that is null": ("ranks.independent_epoch_seconds > 1", {}, "not known"),
    "no current config": ("current.batches > 600", {}, "--current"),
    "no current config that could fit": ("current.fits == false", {}, "--current"),
    "no verification": ("verify.holds == false", {}, "batchtune verify"),
    "a verification of another table": (
        "verify.holds == false",
        {"verification": replace(made_verification(), bucket_batch_sizes=[1] * 13)},
        "ran other batches",
    ),
    "a verification of other lengths": (
        "verify.holds == false",
        {
            "verification": replace(
                made_verification(),
                lengths=replace(made_lengths(), fingerprint="0" * 64),
            )
        },
        "other lengths",
    ),
    "no manifest": ("stale > 2%", {}, "--manifest"),
    "no baseline": ("batches worse 2%", {}, "--baseline"),
    "a baseline that recommends nothing": (
        "batches worse 2%",
        {"baseline": without_recommendation(made_sweep())},
        "the baseline: the sweep recommends no row",
    ),
    "a baseline of another unit": (
        "batches worse 2%",
        {"baseline": made_sweep(unit="tokens")},
        "are in tokens",
    ),
    "a baseline without the value": (
        "estimated_epoch_seconds worse 2%",
        {"baseline": made_sweep(timed=False)},
        "in the baseline",
    ),
    "a field without a direction": (
        "num_buckets worse 2%",
        {"baseline": made_sweep()},
        "can't be worse",
    ),
    "a field that no baseline has": (
        "current.batches worse 2%",
        {"baseline": made_sweep()},
        "can't be worse",
    ),
    "a flag that is held to a number": ("verify.holds == 1", {}, "true or false"),
    "a count in per cent": ("batches > 8%", {}, "not a ratio"),
    "a share above 1": ("padding_ratio > 8", {}, "from 0 to 1"),
}


@pytest.mark.parametrize("name", CAN_NOT_TELL)
def test_what_can_not_be_told_is_never_a_pass(name):
    rule, changes, words = CAN_NOT_TELL[name]
    verdict = verdict_of(rule, rule_inputs(**{"sweep": made_sweep(), **changes}))
    assert verdict.outcome == "error"
    assert words in verdict.message


NOT_RULES = [
    *(
        "",
        "padding_ratio",
        "padding_ratio => 0.08",
        "padding_ratio >",
        "padding_ratio > nan",
        "5 > batches",
    ),
    *(
        "padding_ratio > 8 percent",
        "padding_ratio > 0,08",
        "batches > 1_000",
        "batches > 1e999",
        "batches > \u0661",
    ),
    *(
        "batches > 600 and fill < 1",
        "padding ratio > 8%",
        "batches worse 2",
        "batches worse -2%",
        "verify.holds > true",
    ),
    *(
        "batches worsethan 2%",
        "verify.holds == truely",
        "verify. holds == true",
        "x" * 100_000,
    ),
]


@pytest.mark.parametrize("text", NOT_RULES, ids=lambda text: text[:30])
def test_a_typo_is_shown_with_an_example(text):
    with pytest.raises(UsageError, match="--fail-if: ") as caught:
        parse_rules([text])
    assert "padding_ratio > 8%" in str(caught.value.hint)
    assert text in caught.value.message or len(caught.value.message) < 200


@given(
    st.text(max_size=40)
    | st.builds(
        "{}{}{}".format,
        st.text("abest_.", max_size=6),
        st.sampled_from([" >= ", "<", " worse ", "== "]),
        st.text("-0123456789.e%ax", max_size=8),
    )
)
def test_any_text_is_a_rule_or_wrong_usage(text):
    try:
        rules = parse_rules([text])
    except UsageError:
        return
    assert judge(rules, rule_inputs(sweep=SWEEP))[0].message


def test_a_rule_given_twice_counts_once():
    assert [
        rule.text for rule in parse_rules(["batches > 1", " batches  >\t1", "fill < 1"])
    ] == [
        "batches > 1",
        "fill < 1",
    ]


def test_drift_is_told_with_what_it_costs():
    assert drift_sentences(made_drift()) == [
        "The lengths of the manifest (28,539 examples) differ from those of the run, with 12 examples beyond the last "
        "boundary.",
        "On these lengths, the recommendation costs 3.3% more than a newly tuned one: 655 batches against 634.",
    ]


def test_drift_of_a_run_that_packs_is_told_of_its_padded_batches():
    sentences = drift_sentences(made_drift(), packs=True)
    assert (
        "On these lengths, the best padded row, which is not the packing, costs"
        in sentences[1]
    )


def test_unchanged_lengths_are_told_as_such():
    assert drift_sentences(made_drift(changed=False)) == [
        "The manifest has the same lengths as the run: 28,539 examples."
    ]
