"""What a report says about packing."""

from msgspec.structs import replace
from packed_records import packed_row, with_packing
from report_records import made_sweep
from reports.changed import run_of

from batchtune.reports.packing import packing_section


def section_of(sweep):
    return packing_section(run_of(sweep=sweep), sweep, sweep.packed)


def test_learning_is_one_line_with_both_numbers():
    text = " ".join(section_of(with_packing(made_sweep())).sentences)
    assert "Learning: 160 optimizer steps an epoch, 634 with the best padded" in text
    assert "not of each micro-batch: num_items_in_batch in Transformers, TRL" in text
    assert "loss_agg_mode=token-mean in verl, --calculate-per-token-loss in" in text


def test_packed_rows_stand_beside_padded_ones():
    sweep = replace(
        with_packing(made_sweep(), rows=[packed_row(unproven=3, simulated_epochs=3)]),
        current=made_sweep().rows[0],
    )
    (table,) = section_of(sweep).tables
    names = [row[0] for row in table.rows]
    assert names[:2] == ["packed (even)", "your current config"]
    assert "padded: optimal with 13 buckets" in names
    assert names[-1].startswith("padded: fixed size of ")
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert (cells["largest"], cells["step's length"]) == ("8,190", "±2.0%")
    assert cells["unproven"] == "3"
    text = " ".join(section_of(sweep).sentences)
    assert "3 of 1,920 micro-batches of 3 simulated epochs are not proven" in text
