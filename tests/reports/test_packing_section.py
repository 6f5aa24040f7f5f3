"""What a report says about packing."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from packed_records import packed_row, with_packing
from report_records import made_sweep

from batchtune.reports import RunResults
from batchtune.reports.packing import packing_section
from batchtune.reports.section import Section
from batchtune.results import PackedRow, Sweep


def section_of(sweep: Sweep) -> Section:
    run = RunResults(name="run", folder=Path("run"), sweep=sweep)
    assert sweep.packed is not None
    return packing_section(run, sweep, sweep.packed)


def with_current(current: PackedRow) -> Sweep:
    settings = {"describe": "verl, cap=8192", "source": "--current"}
    return with_packing(made_sweep(), current=current, current_settings=settings)


def replaced_row(sweep: Sweep, row: PackedRow) -> Sweep:
    assert sweep.packed is not None
    return replace(sweep, packing=replace(sweep.packed, rows=[row]))


def test_learning_is_one_line_with_both_numbers() -> None:
    text = " ".join(section_of(with_packing(made_sweep())).sentences)
    assert "Learning: 160 optimizer steps an epoch, 634 with the best padded" in text
    assert "the tokens of a step vary by ±2.0%, there by ±14.0%" in text
    assert "num_items_in_batch in Transformers, TRL and axolotl, loss_agg_mode" in text
    text = " ".join(section_of(with_current(packed_row("verl", steps=99))).sentences)
    assert "160 optimizer steps an epoch, 99 with your current config" in text
    assert "not of each micro-batch: loss_agg_mode=token-mean in verl." in text


def test_packed_rows_stand_beside_padded_ones() -> None:
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
    assert cells["largest"] == "8,190" and cells["unproven"] == "3"
    text = " ".join(section_of(sweep).sentences)
    assert "3 of 1,920 micro-batches of 3 simulated epochs are not proven" in text


def test_what_changing_saves_is_time_where_it_is_known() -> None:
    current = packed_row("verl", batches=800, estimated_epoch_seconds=150.0)
    row = packed_row(estimated_epoch_seconds=120.0)
    text = " ".join(section_of(replaced_row(with_current(current), row)).sentences)
    assert "saves 20.0% of the time for the same tokens" in text
    assert "2 min 00 s instead of 2 min 30 s" in text
    assert "with 160 optimizer steps instead of 160" in text
    assert "Times, and how even ranks are, follow from the probe's time law" in text


def test_what_changing_saves_is_said_at_the_same_budget_alone() -> None:
    current = packed_row("verl", batches=800, slowest_rank=1.2)
    sweep = with_current(current)
    text = " ".join(section_of(sweep).sentences)
    assert "Your current config is verl, cap=8192 (--current)." in text
    assert "makes 20.0% fewer micro-batches of the same tokens." in text
    ranks = replace(sweep, settings={**sweep.settings, "world_size": 2})
    text = " ".join(section_of(ranks).sentences)
    assert "1.0% longer than the mean instead of 20.0%, by FLOPs" in text
    text = " ".join(
        section_of(with_current(packed_row("verl", max_tokens=4096))).sentences
    )
    assert "its micro-batches do not compare with those of 8,192" in text
    assert "of the same tokens" not in text
