"""What a report says of a data loader: in sentences, in tables, and in the verdicts of the gate."""

from loader_records import (
    loaded,
    made_iterable,
    made_loader,
)
from msgspec.structs import replace
from report_records import summary_of, tables_of, warnings_of
from reports.changed import with_row

from batchtune.reports.page import build_page

# Sentences


def headline(loader):
    return summary_of(loader=loader)[0]


def test_a_row_is_named_by_what_tells_it_apart():
    made = made_iterable()
    assert headline(made) == "Measured the loader as it is: 52.5 examples/s."
    rows = [
        replace(made.rows[0], arguments={"num_workers": 2, "pin_memory": pinned})
        for pinned in (False, True)
    ]
    both = replace(made, rows=rows, recommended=1)
    assert "Set pin_memory=true for" in headline(both)
    only = "Measured num_workers=2 pin_memory=true: 52.5 examples/s."
    assert only in headline(replace(made, rows=rows[1:]))


def test_workers_that_repeat_each_other_have_no_rate():
    works = with_row(made_loader(recommended=0), 9, outcome="ok", first_batch_seconds=1)
    repeated = with_row(works, 10, outcome="repeats", error="each delivers all")
    assert "failed" not in " ".join(warnings_of(loader=repeated))
    table = tables_of(loaded(repeated))["Settings that failed"]
    assert table.rows[0][1] == "workers repeat each other"


def test_an_interrupted_tuning_is_warned_of_and_to_be_repeated():
    page = build_page(loaded(made_loader(interrupted=True)))
    assert page.warnings[0].startswith("The tuning was interrupted after")
    assert [step for step, _ in page.next_steps] == [
        "batchtune tune-loader TARGET",
        "batchtune report --full",
    ]


def test_settings_that_can_not_be_told_apart_are_called_equal():
    equal = with_row(made_loader(), 6, equal_to_best=True)
    table = tables_of(loaded(equal))["Settings of the loader"]
    assert (table.columns[-1], table.rows[6][-1]) == ("equal to best", "yes")
