"""The CI gate: what its rules mean on each kind of result, at their edges, and why something is not known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_records import all_failed, bottleneck, made_dali, made_iterable, made_loader
from msgspec.structs import replace
from packed_records import packed_row, with_packing
from pooled_records import pooled_sweep
from report_records import (
    failed_verification,
    made_drift,
    made_lengths,
    made_sweep,
    made_verification,
    partly_proven_sweep,
    proven_sweep,
    rule_inputs,
    whole_sweep,
    without_recommendation,
)
from reports.changed import with_row
from streamed_records import made_stream, whole_stream

from batchtune.errors import UsageError
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import drift_sentences

TABLE = {"sweep": made_sweep()}
NOTHING = {"sweep": None}
POOLS = {"sweep": pooled_sweep()}
STREAM = {"sweep": None, "stream": whole_stream()}
BARE_STREAM = {"sweep": None, "stream": made_stream()}
BETTER_STREAM = {
    **BARE_STREAM,
    "baseline_stream": with_row(made_stream(), batches=620, mixing=0.5),
}
PACKED = {
    "sweep": with_packing(made_sweep()),
    "baseline": with_packing(made_sweep(), rows=[packed_row(batches=620)]),
}
LOADER = {"sweep": None, "loader": made_loader()}
BETTER_LOADER = {**LOADER, "baseline_loader": bottleneck()}
WHOLE = {"sweep": whole_sweep()}
UNFIT = {"sweep": replace(whole_sweep(), current_fits=False)}
FITS = {"sweep": replace(whole_sweep(), current_fits=True)}
PARTLY = {"sweep": partly_proven_sweep(), "baseline": proven_sweep()}
PROVEN = {"sweep": proven_sweep(), "baseline": proven_sweep()}
VERIFIED = {**TABLE, "verification": made_verification()}
FAILED = {**TABLE, "verification": failed_verification()}
DRIFT = {**TABLE, "drift": made_drift()}


def verdict_of(rule, **records):
    (verdict,) = judge(parse_rules([rule]), rule_inputs(**records))
    return verdict


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
    sweep = with_row(made_sweep(), padding_ratio=value)
    assert verdict_of(rule, sweep=sweep).outcome == expected


def test_a_message_has_the_value_in_per_cent_too():
    sweep = with_row(made_sweep(), padding_ratio=0.09421)
    verdict = verdict_of("padding_ratio > 8%", sweep=sweep)
    assert verdict.message == "padding_ratio is 9.421% (0.09421), which is > 8%"
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
    compared = {
        "sweep": with_row(made_sweep(), **{field: ours}),
        "baseline": with_row(made_sweep(), **{field: theirs}),
    }
    assert verdict_of(f"{field} worse {rule}", **compared).outcome == expected


@pytest.mark.parametrize(
    ("records", "rule", "expected"),
    [
        (TABLE, "batches > 6.34e2", "holds"),
        (TABLE, "batches>+6e2", "fails"),
        (WHOLE, "current.batches > 600", "fails"),
        (WHOLE, "bound.batches > 600", "fails"),
        (WHOLE, "ranks.independent_epoch_seconds > 1", "fails"),
        (FITS, "current.fits == false", "holds"),
        (UNFIT, "current.fits == false", "fails"),
        (PROVEN, "unproven worse 0%", "holds"),
        (PARTLY, "unproven worse 0%", "fails"),
        (VERIFIED, "verify.holds == false", "holds"),
        (FAILED, "verify.holds == false", "fails"),
        (VERIFIED, "verify.time_ratio > 102%", "holds"),
        (DRIFT, "beyond > 0", "fails"),
        (DRIFT, "changed == true", "fails"),
        (DRIFT, "changed != TRUE", "holds"),
        (DRIFT, "stale > 2%", "fails"),
        (POOLS, "mates_again > 20%", "holds"),
        (POOLS, "randomness <= 80%", "fails"),
        (POOLS, "current.randomness < 99%", "holds"),
        (POOLS, "pool_size > 9999", "fails"),
        (POOLS, "max_batch_length < 601", "fails"),
        (STREAM, "stream.batches > 631", "fails"),
        (STREAM, "stream.randomness < 90%", "holds"),
        (STREAM, "stream.equal_to_best == false", "holds"),
        (STREAM, "stream.current.randomness < 0.9", "holds"),
        (STREAM, "shards.sorted == true", "fails"),
        (STREAM, "shards.advice.shards > 63", "fails"),
        (STREAM, "probe.unfinished == true", "holds"),
        (LOADER, "gpu_idle > 0.5%", "fails"),
        (LOADER, "loader.gpu_idle > 0.6%", "holds"),
        (LOADER, "loader.wait_p99_seconds > 0.1", "fails"),
        (LOADER, "loader.reproducible == false", "holds"),
        (BETTER_LOADER, "gpu_idle worse 10%", "holds"),
        (BETTER_LOADER, "loader.examples_per_second worse 20%", "fails"),
        (BETTER_LOADER, "loader.examples_per_second worse 30%", "holds"),
        (PACKED, "packed.batches worse 2%", "fails"),
        (BETTER_STREAM, "stream.batches worse 2%", "holds"),
        (BETTER_STREAM, "stream.batches worse 1%", "fails"),
        (BETTER_STREAM, "stream.mixing worse 10%", "fails"),
    ],
)
def test_every_result_is_held_to_rules(records, rule, expected):
    assert verdict_of(rule, **records).outcome == expected


# Of the batches or lengths of another run.
OTHER_BATCHES = replace(made_verification(), bucket_batch_sizes=[1] * 13)
OTHER_LENGTHS = replace(
    made_verification(), lengths=replace(made_lengths(), fingerprint="0" * 64)
)


@pytest.mark.parametrize(
    ("records", "rule", "why"),
    [
        (TABLE, "xyzzy > 1", "not a number that a rule can name"),
        (TABLE, "strategy > 1", "not a number"),
        (TABLE, "__class__ > 1", "not a number"),
        (STREAM, "stream.padding > 8%", "did you mean stream.padding_ratio?"),
        (
            STREAM,
            "batches > 3",
            "fields of the stream begin with stream., such as stream.batches",
        ),
        (NOTHING, "batches > 600", "sweep-buckets"),
        (
            NOTHING,
            "stream.batches > 3",
            "the run has no stream.json: run `batchtune sweep-stream`",
        ),
        (
            {"sweep": without_recommendation(made_sweep())},
            "batches > 600",
            "no table needs fewer batches",
        ),
        (
            {"sweep": None, "loader": all_failed()},
            "gpu_idle > 5%",
            "the tuning of the loader recommends no row: Nothing",
        ),
        (
            {"sweep": made_sweep(timed=False)},
            "estimated_epoch_seconds > 1",
            "not known",
        ),
        (TABLE, "unproven > 0", "unproven is not known (null)"),
        (TABLE, "ranks.independent_epoch_seconds > 1", "not known"),
        (TABLE, "pool_size > 0", "only pools have it, and this is a bucket table"),
        (
            BARE_STREAM,
            "shards.advice.maxcount > 0",
            "(null): the shards do as they are",
        ),
        (TABLE, "current.batches > 600", "--current"),
        (TABLE, "current.fits == false", "--current"),
        (
            BARE_STREAM,
            "stream.current.batches > 3",
            "`batchtune sweep-stream` with --current",
        ),
        (
            {"sweep": None, "loader": made_dali()},
            "gpu_idle > 5%",
            "no step times are known: give --step-ms, or probe",
        ),
        (
            {"sweep": None, "loader": made_iterable()},
            "loader.reproducible == true",
            "with --check-reproducible",
        ),
        (TABLE, "verify.holds == false", "batchtune verify"),
        (
            {**TABLE, "verification": OTHER_BATCHES},
            "verify.holds == false",
            "ran other batches",
        ),
        (
            {**TABLE, "verification": OTHER_LENGTHS},
            "verify.holds == false",
            "other lengths",
        ),
        (TABLE, "training.ooms > 0", "batchtune record"),
        (TABLE, "stale > 2%", "--manifest"),
        (
            TABLE,
            "batches worse 2%",
            "no other run to compare with is given: use --baseline",
        ),
        (
            {**TABLE, "baseline_stream": made_stream()},
            "batches worse 2%",
            "the baseline has no sweep.json",
        ),
        (
            {**BARE_STREAM, "baseline": made_sweep()},
            "stream.batches worse 2%",
            "the baseline has no stream.json",
        ),
        (
            {**LOADER, "baseline": made_sweep()},
            "gpu_idle worse 2%",
            "the baseline has no loader.json",
        ),
        (
            {**TABLE, "baseline": without_recommendation(made_sweep())},
            "batches worse 2%",
            "the baseline: the sweep recommends no row",
        ),
        (
            {**TABLE, "baseline": made_sweep(unit="tokens")},
            "batches worse 2%",
            "are in tokens",
        ),
        (
            {**TABLE, "baseline": made_sweep(timed=False)},
            "estimated_epoch_seconds worse 2%",
            "in the baseline",
        ),
        (
            {**PACKED, "baseline": made_sweep()},
            "packed.batches worse 2%",
            "the baseline: packers were not compared",
        ),
        (BETTER_LOADER, "loader.rounds worse 5%", "can't be worse"),
        (PROVEN, "current.batches worse 2%", "can't be worse"),
        (VERIFIED, "verify.holds == 1", "true or false"),
        (TABLE, "batches > 8%", "not a ratio"),
        (
            POOLS,
            "randomness > 80",
            "randomness is from 0 to 1, and 80 is not: write 8% or 0.08",
        ),
    ],
)
def test_what_is_not_known_is_never_a_pass_and_says_why(records, rule, why):
    verdict = verdict_of(rule, **records)
    assert verdict.outcome == "error" and why in verdict.message


def test_rows_of_tables_and_streams_do_not_mix():
    both = {"sweep": made_sweep(), "stream": made_stream()}
    assert verdict_of("batches > 633", **both).value == 634
    assert verdict_of("stream.batches > 633", **both).value == 632


@pytest.mark.parametrize(
    ("allowed", "expected"), [("11.2%", "holds"), ("11.1%", "fails")]
)
def test_less_randomness_is_worse(allowed, expected):
    less = pooled_sweep()
    more = with_row(less, mates_again=0.1)
    rule = f"randomness worse {allowed}"
    assert verdict_of(rule, sweep=less, baseline=more).outcome == expected
    rule = "randomness worse 0%"
    assert verdict_of(rule, sweep=more, baseline=less).outcome == "holds"


@pytest.mark.parametrize(
    ("size", "expected"), [(10_000, "holds"), (None, "error"), (4000, "error")]
)
def test_a_verification_of_other_pools_judges_nothing(size, expected):
    row = pooled_sweep().recommended_row
    verification = replace(
        made_verification(),
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        pool_size=size,
    )
    verdict = verdict_of("verify.holds == false", **POOLS, verification=verification)
    assert verdict.outcome == expected


NOT_RULES = [
    "",
    "padding_ratio",
    "padding_ratio => 0.08",
    "padding_ratio >",
    "padding_ratio > nan",
    "5 > batches",
    "padding_ratio > 8 percent",
    "padding_ratio > 0,08",
    "batches > 1_000",
    "batches > 1e999",
    "batches > \u0661",
    "batches > 600 and fill < 1",
    "padding ratio > 8%",
    "batches worse 2",
    "batches worse -2%",
    "verify.holds > true",
    "batches worsethan 2%",
    "verify.holds == truely",
    "verify. holds == true",
    "x" * 100_000,
]


@pytest.mark.parametrize("text", NOT_RULES, ids=lambda text: text[:30])
def test_a_typo_is_shown_with_an_example(text):
    with pytest.raises(UsageError, match="--fail-if: ") as caught:
        parse_rules([text])
    assert "padding_ratio > 8%" in caught.value.hint
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
    assert judge(rules, rule_inputs(**TABLE))[0].message


def test_a_rule_given_twice_counts_once():
    rules = parse_rules(["batches > 1", " batches  >\t1", "fill < 1"])
    assert [rule.text for rule in rules] == ["batches > 1", "fill < 1"]


@pytest.mark.parametrize(
    ("drift", "packs", "said"),
    [
        (
            made_drift(),
            False,
            "The lengths of the manifest (28,539 examples) differ from those of the run, with 12 examples beyond the "
            "last boundary. On these lengths, the recommendation costs 3.3% more than a newly tuned one: 655 batches "
            "against 634.",
        ),
        (made_drift(), True, "the best padded row, which is not the packing, costs"),
        (
            made_drift(changed=False),
            False,
            "The manifest has the same lengths as the run: 28,539 examples.",
        ),
    ],
    ids=["changed", "packed", "unchanged"],
)
def test_drift_is_told_with_what_it_costs(drift, packs, said):
    assert said in " ".join(drift_sentences(drift, packs=packs))
