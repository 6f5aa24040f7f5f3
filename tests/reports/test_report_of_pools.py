"""What a report says of pools: in sentences, in tables, and in the verdicts of the gate."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from pooled_records import pooled_sweep
from report_records import COUNT, made_sweep, made_verification, rule_inputs, summary_of, tables_of

from batchtune.reports import RunResults
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import build_page
from batchtune.reports.section import UNKNOWN
from batchtune.results import Row, Sweep, Verdict


def recommended(sweep: Sweep) -> Row:
    assert sweep.recommended_row is not None
    return sweep.recommended_row


def verdict_of(rule: str, sweep: Sweep, **evidence: Any) -> Verdict:
    (verdict,) = judge(parse_rules([rule]), rule_inputs(sweep=sweep, **evidence))
    return verdict


def test_recommended_pools_tell_their_size_and_what_they_need() -> None:
    first, *others = summary_of(sweep=pooled_sweep())
    assert first == (
        "Set pools of 10,000 examples with max_batch_length = 600 s: 1.37 times faster than your current config."
    )
    needs = "Pools need batchtune's own sampler: "
    assert f"{needs}frameworks that can't take it get the best table, optimal with 13 buckets." in others
    alone = replace(pooled_sweep(recommended=COUNT), recommended_table=None)
    none = f"{needs}no bucket table is recommended for frameworks that can't take it."
    assert none in summary_of(sweep=alone)


def test_recommended_pools_are_compared_with_the_best_table() -> None:
    (table,) = tables_of(RunResults(name="run", sweep=pooled_sweep()), brief=True).values()
    again = table.columns.index("mates again")
    shown = {row[0]: row[again] for row in table.rows}
    assert (shown["recommended"], shown["best table (13 buckets)"], shown["lower bound"]) == ("20%", "4.09%", UNKNOWN)
    assert shown["fixed batch size of 24"] == "0.0806%"  # 23 of 28,538 others


def test_pools_are_shown_by_their_size() -> None:
    tables = tables_of(RunResults(name="run", sweep=pooled_sweep(recommended=4000)))
    compared = tables["Bucket tables and pools compared"]
    assert [row[2] for row in compared.rows if row[0] == "pooled"] == ["1000", "4000", "10,000", "28,539"]
    assert compared.marked is not None and compared.rows[compared.marked][:3] == ("pooled", UNKNOWN, "4000")
    assert tables["Batch sizes (pools of 4000 examples)"].rows[-1] == ("24.52 s", "24", "588.6 s")


def test_pools_alone_that_are_not_recommended_say_why() -> None:
    sweep = pooled_sweep()
    pools = [row for row in sweep.rows if row.pool_size is not None]
    reason = "no pools can be recommended: none has only sizes that were run"
    alone = replace(sweep, rows=pools, recommended=None, recommended_table=None, trade_off=[], reason=reason)
    page = build_page(RunResults(name="run", sweep=alone))
    assert page.lead[0] == f"Nothing is recommended: {reason}."
    assert page.next_steps[0] == ("batchtune sweep-buckets MANIFEST", "compare bucket tables, too")


def test_a_verification_of_other_pools_judges_nothing() -> None:
    sweep, rule = pooled_sweep(), "verify.holds == false"
    row = recommended(sweep)
    ran = {"bucket_boundaries": row.boundaries, "bucket_batch_sizes": row.batch_sizes}
    same = replace(made_verification(), **ran, pool_size=row.pool_size)
    assert verdict_of(rule, sweep, verification=same).outcome == "holds"
    for other in (None, 4000):
        verdict = verdict_of(rule, sweep, verification=replace(same, pool_size=other))
        assert verdict.outcome == "error" and "ran other batches than the sweep recommends" in verdict.message


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mates_again > 20%", "holds"),
        ("mates_again >= 20%", "fails"),
        ("randomness < 0.8", "holds"),
        ("randomness <= 80%", "fails"),
        ("current.randomness < 99%", "holds"),
        ("pool_size > 9999", "fails"),
        ("length_correlation > 99%", "fails"),
        ("simulated_epochs < 8", "holds"),
        ("batches_deviation > 1.5", "holds"),
        ("epoch_seconds_deviation > 0.3", "fails"),
    ],
)
def test_pools_are_held_to_rules(rule: str, expected: str) -> None:
    assert verdict_of(rule, pooled_sweep()).outcome == expected


@pytest.mark.parametrize(
    ("rule", "sweep", "why"),
    [
        (
            "pool_size > 0",
            made_sweep(),
            "pool_size is not known (null): only pools have it, and this is a bucket table",
        ),
        ("batch_overhead > 0", pooled_sweep(), "these pools are cut into batches of as many examples as fit"),
        ("randomness > 80", pooled_sweep(), "randomness is from 0 to 1, and 80 is not: write 8% or 0.08"),
        ("pool_size worse 2%", pooled_sweep(), "pool_size can't be worse"),
    ],
)
def test_what_is_not_known_of_pools_says_why(rule: str, sweep: Sweep, why: str) -> None:
    verdict = verdict_of(rule, sweep, baseline=sweep)
    assert verdict.outcome == "error" and why in verdict.message


@pytest.mark.parametrize(("allowed", "expected"), [("11.2%", "holds"), ("11.1%", "fails")])
def test_less_randomness_is_worse(allowed: str, expected: str) -> None:
    less, more = pooled_sweep(), pooled_sweep()
    rows = [replace(row, mates_again=0.1) if row.pool_size else row for row in more.rows]
    more = replace(more, rows=rows)
    assert verdict_of(f"randomness worse {allowed}", less, baseline=more).outcome == expected
    assert verdict_of("randomness worse 0%", more, baseline=less).outcome == "holds"
