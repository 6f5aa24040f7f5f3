"""What a report says of pools: in sentences, in tables, and in the verdicts of the gate."""

from __future__ import annotations

from msgspec.structs import replace
from pooled_records import pooled_sweep
from report_records import COUNT, summary_of, tables_of

from batchtune.reports import RunResults
from batchtune.reports.page import build_page
from batchtune.reports.section import UNKNOWN


def test_recommended_pools_tell_their_size_and_what_they_need() -> None:
    first, *others = summary_of(sweep=pooled_sweep())
    assert first == (
        "Set pools of 10,000 examples with max_batch_length = 600 s: 1.37 times faster than your current config."
    )
    needs = "Pools need batchtune's own sampler: "
    assert (
        f"{needs}frameworks that can't take it get the best table, optimal with 13 buckets."
        in others
    )
    alone = replace(pooled_sweep(recommended=COUNT), recommended_table=None)
    none = f"{needs}no bucket table is recommended for frameworks that can't take it."
    assert none in summary_of(sweep=alone)


def test_pools_are_shown_by_their_size() -> None:
    tables = tables_of(RunResults(name="run", sweep=pooled_sweep(recommended=4000)))
    compared = tables["Bucket tables and pools compared"]
    assert [row[2] for row in compared.rows if row[0] == "pooled"] == [
        "1000",
        "4000",
        "10,000",
        "28,539",
    ]
    assert compared.marked is not None and compared.rows[compared.marked][:3] == (
        "pooled",
        UNKNOWN,
        "4000",
    )
    assert tables["Batch sizes (pools of 4000 examples)"].rows[-1] == (
        "24.52 s",
        "24",
        "588.6 s",
    )


def test_pools_alone_that_are_not_recommended_say_why() -> None:
    sweep = pooled_sweep()
    pools = [row for row in sweep.rows if row.pool_size is not None]
    reason = "no pools can be recommended: none has only sizes that were run"
    alone = replace(
        sweep,
        rows=pools,
        recommended=None,
        recommended_table=None,
        trade_off=[],
        reason=reason,
    )
    page = build_page(RunResults(name="run", sweep=alone))
    assert page.lead[0] == f"Nothing is recommended: {reason}."
    assert page.next_steps[0] == (
        "batchtune sweep-buckets MANIFEST",
        "compare bucket tables, too",
    )
