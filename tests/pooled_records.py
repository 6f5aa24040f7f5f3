"""Made records of pools, for the tests of reports: LibriSpeech train-clean-100, as in `report_records`."""

from msgspec.structs import replace
from report_records import COUNT, TOTAL_SECONDS, made_row, whole_sweep

# Pools of so many examples → batches, padding, how many of 1000 mates meet again.
POOLS = {
    1000: (652, 0.034, 23),
    4000: (630, 0.015, 90),
    10_000: (622, 0.008, 200),
    COUNT: (612, 0.002, 810),
}


def pooled_sweep(*, recommended=10_000):
    """As `whole_sweep`, with pools, and how random all rows are; pools of that size, or optimal 13, are recommended."""
    sweep = whole_sweep()

    def placed(row):
        return replace(row, length_correlation=1 - 0.1 / row.num_buckets)

    rows = [placed(row) for row in sweep.rows]
    table = sweep.recommended
    for size, (batches, padding, again) in POOLS.items():
        boundaries = [round(24.525 * (step + 1) / 40, 3) for step in range(40)]
        row = made_row(
            "pooled",
            boundaries,
            batches,
            TOTAL_SECONDS / (1 - padding),
            40,
            again / 2,
            timed=True,
        )
        rows.append(
            replace(
                row,
                pool_size=size,
                mates_again=again / 1000,
                length_correlation=0.998,
                simulated_epochs=8,
                batches_deviation=0.0 if size == COUNT else 1.5,
                epoch_seconds_deviation=0.4,
                estimated_epoch_error_seconds=2.5,
                equal_to_best=size > 1000,
                smallest_batch_size=24,
                largest_batch_size=180,
                batch_size_variation=0.37,
                steps=-(-batches // 8),
                ranks=rows[table].ranks,
            )
        )
    pools = range(len(rows) - len(POOLS), len(rows))
    chosen = next(
        (index for index in pools if rows[index].pool_size == recommended), table
    )
    return replace(
        sweep,
        rows=rows,
        current=placed(sweep.current),
        recommended=chosen,
        recommended_table=table,
        reason="pools of 10,000 take 2.2% less than the best table"
        if chosen != table
        else sweep.reason,
        trade_off=sorted(
            (*pools, table),
            key=lambda index: rows[index].estimated_epoch_seconds or 0.0,
        ),
    )
