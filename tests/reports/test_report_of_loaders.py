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
from batchtune.results import LoaderRow

# Sentences


def test_a_row_is_named_by_what_tells_it_apart():
    rows = [
        LoaderRow(
            arguments={"num_workers": 2, **more},
            workers=2,
            outcome="ok",
            examples_per_second=3.0,
        )
        for more in ({"pin_memory": False}, {"pin_memory": True})
    ]
    assert (
        "Set pin_memory=true for"
        in summary_of(
            loader=replace(
                made_iterable(),
                rows=rows,
                recommended=1,
            )
        )[0]
    )
    as_it_is = "Measured the loader as it is: 52.5 examples/s."
    assert summary_of(loader=made_iterable())[0] == as_it_is
    only = replace(made_iterable(), rows=rows[1:], recommended=0)
    assert (
        "Measured num_workers=2 pin_memory=true: 3 examples/s."
        in summary_of(loader=only)[0]
    )


def test_workers_that_repeat_each_other_have_no_rate():
    repeated = with_row(
        made_loader(recommended=0),
        10,
        outcome="repeats",
        error="each delivers the whole data set",
    )
    repeated = with_row(repeated, 9, outcome="ok", first_batch_seconds=1.0)
    assert not any("failed" in text for text in warnings_of(loader=repeated))
    assert (
        tables_of(loaded(repeated))["Settings that failed"].rows[0][1]
        == "workers repeat each other"
    )


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
