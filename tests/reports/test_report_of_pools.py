"""What a report says of pools: in sentences, in tables, and in the verdicts of the gate."""

from msgspec.structs import replace
from pooled_records import pooled_sweep
from report_records import COUNT, summary_of

from batchtune.reports import RunResults
from batchtune.reports.page import build_page


def test_without_a_table_other_frameworks_get_none():
    alone = replace(pooled_sweep(recommended=COUNT), recommended_table=None)
    assert (
        "Pools need batchtune's own sampler: no bucket table is recommended for frameworks that can't take it."
        in summary_of(sweep=alone)
    )


def test_pools_alone_that_are_not_recommended_say_why():
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
