"""What a report says of pools: in sentences, in tables, and in the verdicts of the gate."""

from msgspec.structs import replace
from pooled_records import pooled_sweep
from report_records import COUNT, summary_of
from reports.changed import page_of


def test_without_a_table_other_frameworks_get_none():
    alone = replace(pooled_sweep(recommended=COUNT), recommended_table=None)
    why = "Pools need batchtune's own sampler: no bucket table is recommended for frameworks that can't take it."
    assert why in summary_of(sweep=alone)


def test_pools_alone_that_are_not_recommended_say_why():
    sweep = pooled_sweep()
    pools = [row for row in sweep.rows if row.pool_size is not None]
    reason = "no pools can be recommended: none has only sizes that were run"
    none = {"recommended": None, "recommended_table": None, "trade_off": []}
    page = page_of(sweep=replace(sweep, rows=pools, reason=reason, **none))
    assert page.lead[0] == f"Nothing is recommended: {reason}."
    again = ("batchtune sweep-buckets MANIFEST", "compare bucket tables, too")
    assert page.next_steps[0] == again
