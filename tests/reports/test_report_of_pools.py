"""What a report says of pools: in sentences, in tables, and in the verdicts of the gate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pooled_records import pooled_sweep
from report_records import COUNT, made_drift, made_sweep, made_verification, rule_inputs

from batchtune.buckets.recommend import recommend
from batchtune.reports import RunResults, summary_sentences
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.page import drift_sentences, next_steps, report_tables
from batchtune.reports.sweep_tables import comparison_table, curve_table, rows_table
from batchtune.reports.table import UNKNOWN
from batchtune.reports.trade_offs import faster_pools_sentence, pool_sentences, trade_off_sentences
from batchtune.results import Row, Sweep, Verdict

ROWS = st.lists(st.tuples(st.integers(600, 700), st.integers(1, 999), st.integers(1, 20)), min_size=1, max_size=5)


def recommended(sweep: Sweep) -> Row:
    assert sweep.recommended_row is not None
    return sweep.recommended_row


def sentence(sweep: Sweep, begins: str) -> str:
    (found,) = (text for text in trade_off_sentences(sweep, recommended(sweep)) if text.startswith(begins))
    return found


def headline(sweep: Sweep) -> str:
    return summary_sentences(RunResults(name="run", probe=None, sweep=sweep))[0]


def verdict_of(rule: str, sweep: Sweep, **evidence: Any) -> Verdict:
    (verdict,) = judge(parse_rules([rule]), rule_inputs(sweep=sweep, **evidence))
    return verdict


def test_how_often_mates_meet_again_is_told() -> None:
    assert sentence(pooled_sweep(), "20% of batch mates") == (
        "20% of batch mates are mates again in the next epoch, against 0.45% with your current config and 0.0806% with "
        "a fixed batch size of 24; the lengths of mates correlate by 0.998."
    )


def test_the_curve_of_tables_and_pools_tells_their_randomness() -> None:
    sweep = pooled_sweep()
    curve = curve_table(sweep)
    assert curve.marked is not None
    assert curve.rows[curve.marked] == ("pooled 10,000", "0.8000", "0.998", "45.88", "0.37", "1.01×")


def test_pools_tell_what_they_cant_do() -> None:
    sampler, shapes, lengths = pool_sentences(pooled_sweep(), recommended(pooled_sweep()))
    assert sampler == (
        "Pools need batchtune's own sampler: frameworks that can't take it get the best table, optimal with 13 buckets "
        "(an estimated 3 min 20 s an epoch, 2.2% more)."
    )
    assert shapes.startswith("Pools make batches of many shapes") and "--multiple-of" in shapes
    assert lengths == (
        "How many batches pools give depends on the shuffle: 622 ± 1.5 in 8 simulated epochs (mean and standard "
        "deviation); the sampler's len() is exact. The time varies by 0.204%."
    )


def test_pools_without_a_table_name_none() -> None:
    sweep = replace(pooled_sweep(recommended=COUNT), recommended_table=None)
    sampler, _, lengths = pool_sentences(sweep, recommended(sweep))
    assert sampler.endswith("no bucket table is recommended for frameworks that can't take it.")
    assert "612 in each of 8 simulated epochs" in lengths


def test_pools_that_beat_the_recommended_table_are_named() -> None:
    sweep = pooled_sweep(recommended=None)
    assert sentence(sweep, "Pools of") == (
        "Pools of 4000 examples would take an estimated 3 min 17 s an epoch, 1.4% less, but 9% of their batch mates "
        "are mates again in the next epoch instead of 4.09%; --min-randomness 0.91 allows that."
    )
    padded = replace(sweep, settings={**sweep.settings, "multiple_of": 8})
    assert sentence(padded, "Pools of").endswith("but make batches of more shapes than --multiple-of leaves.")


@pytest.mark.parametrize("change", [{"unproven": 1}, {"batches": 1190}, {"estimated_epoch_seconds": 199.0}])
def test_pools_that_cant_be_recommended_are_not_named(change: dict[str, Any]) -> None:
    sweep = pooled_sweep(recommended=None)
    rows = [replace(row, **change) if row.pool_size else row for row in sweep.rows]
    sweep = replace(sweep, rows=rows)
    assert faster_pools_sentence(sweep, recommended(sweep)) is None


@given(tables=ROWS, pools=ROWS)
@settings(deadline=None)
def test_the_randomness_that_allows_pools_recommends_some(
    tables: list[tuple[int, int, int]], pools: list[tuple[int, int, int]]
) -> None:
    sweep = made_sweep(timed=False)
    rows = []
    for (batches, again, size), is_table in [*((one, True) for one in tables), *((one, False) for one in pools)]:
        row = replace(sweep.rows[-1], batches=batches, mates_again=again / 1000)
        cut = replace(row, boundaries=[*range(1, size + 1)], batch_sizes=[24] * size)
        rows.append(cut if is_table else replace(row, pool_size=1000 * size))
    index, _, table = recommend(rows, sweep.baselines)
    assert index is not None and table is not None
    text = faster_pools_sentence(replace(sweep, rows=rows, recommended=index, recommended_table=table), rows[index])
    if text is not None:
        least = float(text.partition("--min-randomness ")[2].split()[0])
        allowed = recommend(rows, sweep.baselines, min_randomness=least).row
        assert allowed is not None and rows[allowed].pool_size is not None


def test_pools_are_shown_by_their_size() -> None:
    sweep = pooled_sweep(recommended=4000)
    table = rows_table(sweep)
    assert (table.title, table.columns[1].title) == ("Bucket tables compared with pools", "size")
    assert [row[1] for row in table.rows if row[0] == "pooled"] == ["1000", "4000", "10,000", "28,539"]
    assert table.marked is not None and table.rows[table.marked][:2] == ("pooled", "4000")
    assert ("optimal", "13") in [row[:2] for row in table.rows]


def test_recommended_pools_are_compared_with_the_best_table() -> None:
    sweep = pooled_sweep()
    table = comparison_table(sweep, recommended(sweep), timed=True)
    again = [column.title for column in table.columns].index("meet again")
    shown = {row[0]: row[again] for row in table.rows}
    assert (shown["recommended"], shown["best table (13 buckets)"], shown["lower bound"]) == ("20%", "4.09%", UNKNOWN)
    assert shown["fixed batch size of 24"] == "0.0806%"  # 23 of 28,538 others


def test_what_limits_a_batch_in_pools_is_laid_out() -> None:
    sweep = pooled_sweep()
    rows = [replace(row, batch_overhead=12.0) if row.pool_size else row for row in sweep.rows]
    limits = list(report_tables(RunResults(name="run", probe=None, sweep=replace(sweep, rows=rows))))[2]
    assert limits.title == "Largest batch size, by longest example (pools of 10,000 examples)"
    assert limits.rows[-1] == ("24.52 s", "24", "588.6 s")
    assert limits.notes[0] == "24 of 40 lengths shown; all are in sampler.yaml."
    assert "an overhead of 12 s a batch" in limits.notes[1]


def test_recommended_pools_are_named_by_their_size() -> None:
    assert headline(pooled_sweep()) == (
        "Set pools of 10,000 examples with max_batch_length = 600 s: 1.37 times faster than your current config."
    )


def test_pools_alone_that_are_not_recommended_say_why() -> None:
    sweep = pooled_sweep()
    pools = [row for row in sweep.rows if row.pool_size is not None]
    reason = "no pools can be recommended: none has only sizes that were run"
    alone = replace(sweep, rows=pools, recommended=None, recommended_table=None, trade_off=[], reason=reason)
    assert headline(alone) == "No pools can be recommended: none has only sizes that were run."
    results = RunResults(name="run", probe=None, sweep=alone)
    assert next(iter(next_steps(results))) == ("batchtune sweep-buckets MANIFEST", "compare bucket tables, too")


def test_a_verification_of_other_pools_judges_nothing() -> None:
    sweep, rule = pooled_sweep(), "verify.holds == false"
    row = recommended(sweep)
    ran = {"bucket_boundaries": row.boundaries, "bucket_batch_sizes": row.batch_sizes}
    same = replace(made_verification(), **ran, pool_size=row.pool_size)
    assert verdict_of(rule, sweep, verification=same).outcome == "holds"
    for other in (None, 4000):
        verdict = verdict_of(rule, sweep, verification=replace(same, pool_size=other))
        assert verdict.outcome == "error" and "ran other pools than the sweep recommends" in verdict.message


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


def test_drift_from_pools_is_told_as_theirs() -> None:
    sweep = pooled_sweep()
    assert drift_sentences(made_drift(lengths=sweep.lengths), recommended(sweep))[1] == (
        "On them the pools cost 3.3% more than newly tuned ones of that size: 655 batches against 634."
    )
