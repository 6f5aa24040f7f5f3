"""Which rows of a sweep are shown, and how."""

from __future__ import annotations

import msgspec
import pytest
from report_records import made_sweep, proven_sweep, whole_sweep, with_recommended, without_recommendation

from batchtune.reports.sweep_tables import chosen_rows, comparison_table, rows_table
from batchtune.results import Sweep


def shown(sweep: Sweep, strategy: str, sizing: str = "length") -> list[int]:
    rows = [sweep.rows[index] for index in chosen_rows(sweep)]
    return [row.num_buckets for row in rows if (row.strategy, row.sizing) == (strategy, sizing)]


def titles(sweep: Sweep) -> list[str]:
    return [column.title for column in rows_table(sweep).columns]


def test_tables_with_fewer_buckets_than_asked_for_say_why() -> None:
    sweep = made_sweep()
    rows = [
        msgspec.structs.replace(row, boundaries=row.boundaries[:9], batch_sizes=row.batch_sizes[:9])
        if row.strategy in ("linear", "optimal") and row.num_buckets == 10
        else row
        for row in sweep.rows
    ]
    notes = rows_table(msgspec.structs.replace(sweep, rows=rows)).notes
    assert "“9 of 10” buckets (optimal): more were allowed, but would take longer." in notes
    assert "“9 of 10” buckets (linear): the others coincided, because few lengths differ." in notes


def test_the_recommended_row_is_shown_with_its_neighbours() -> None:
    assert shown(made_sweep(), "optimal") == [10, 12, 13, 14, 20]


def test_each_sizing_shows_its_fewest_and_most_buckets() -> None:
    assert shown(made_sweep(), "optimal", "frontier") == [10, 20]


def test_the_best_row_of_a_strategy_is_shown() -> None:
    sweep = made_sweep(timed=False)
    index = next(i for i, row in enumerate(sweep.rows) if (row.strategy, row.num_buckets) == ("linear", 15))
    rows = list(sweep.rows)
    rows[index] = msgspec.structs.replace(rows[index], batches=605)
    assert shown(msgspec.structs.replace(sweep, rows=rows), "linear") == [10, 15, 20]


def test_todays_practice_is_shown_among_more_buckets() -> None:
    sweep = made_sweep()
    rows = [
        msgspec.structs.replace(row, num_buckets=60, batches=900) if row.num_buckets == 19 else row
        for row in sweep.rows
    ]
    assert 20 in shown(msgspec.structs.replace(sweep, rows=rows), "speechbrain")


def test_the_mark_is_on_the_recommended_row() -> None:
    sweep = with_recommended(made_sweep(), "linear", 14)
    table = rows_table(sweep)
    assert table.marked is not None
    assert table.rows[table.marked][:2] == ("linear", "14")


def test_nothing_is_marked_without_a_recommendation() -> None:
    assert rows_table(without_recommendation(made_sweep())).marked is None


def test_what_is_left_out_is_said() -> None:
    assert rows_table(made_sweep()).notes[0] == "15 of 66 rows shown; all are in sweep.json."


def test_nothing_is_said_of_rows_left_out_where_all_are_shown() -> None:
    sweep = made_sweep()
    few = msgspec.structs.replace(sweep, rows=sweep.rows[:2], recommended=0)
    assert not any("rows shown" in note for note in rows_table(few).notes)


def test_the_time_column_is_left_out_without_times() -> None:
    assert "estimated epoch" in titles(made_sweep())
    assert "estimated epoch" not in titles(made_sweep(timed=False))


def test_ratios_are_of_batches_without_times() -> None:
    table = rows_table(made_sweep(timed=False))
    assert table.marked is not None
    assert table.rows[table.marked][-1] == "1.88\u00d7"  # 1190 / 634


def test_ratios_are_left_out_without_the_fixed_baseline() -> None:
    assert "against fixed" not in titles(msgspec.structs.replace(made_sweep(), baselines=[]))


def test_baselines_and_bound_are_a_group_after_the_rows() -> None:
    table = rows_table(made_sweep())
    assert table.break_before is not None
    names = [row[0] for row in table.rows[table.break_before :]]
    assert names == ["fixed-random", "fixed-sorted", "lower bound"]


def test_a_row_with_fewer_buckets_than_asked_for_says_so() -> None:
    sweep = made_sweep()
    row = msgspec.structs.replace(sweep.rows[0], boundaries=[12.0, 24.525], batch_sizes=[50, 24])
    table = rows_table(msgspec.structs.replace(sweep, rows=[row], recommended=None))
    assert table.rows[0][1] == "2 of 10"


def test_a_sweep_without_rows_still_shows_its_baselines() -> None:
    empty = msgspec.structs.replace(made_sweep(), rows=[], recommended=None)
    assert len(rows_table(empty).rows) == 3


@pytest.mark.parametrize(("fits", "name"), [(True, "current"), (None, "current"), (False, "current (does not fit)")])
def test_a_current_config_that_cant_fit_is_marked(fits: bool | None, name: str) -> None:
    table = rows_table(msgspec.structs.replace(whole_sweep(), current_fits=fits))
    assert name in [row[0] for row in table.rows]
    assert any("does not fit: its batches are larger" in note for note in table.notes) == (fits is False)


def test_a_current_config_that_cant_fit_is_compared_and_marked() -> None:
    sweep = msgspec.structs.replace(whole_sweep(), current_fits=False)
    assert sweep.recommended_row is not None
    assert [row[0] for row in comparison_table(sweep, sweep.recommended_row, timed=True).rows] == [
        "recommended",
        "fixed batch size of 24",
        "your current config (does not fit)",
        "lower bound",
    ]


def test_tables_with_unproven_sizes_are_marked() -> None:
    table = rows_table(proven_sweep())
    assert table.marked is not None
    buckets = [row[1] for row in table.rows[: table.break_before]]
    assert buckets[table.marked] == "13"
    assert {cell[-1] for index, cell in enumerate(buckets) if index != table.marked} == {"*"}
    assert "* marks tables with batch sizes that are not proven to fit." in table.notes
    assert not any("*" in note for note in rows_table(made_sweep()).notes)
