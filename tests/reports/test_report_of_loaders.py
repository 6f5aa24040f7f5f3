"""What a report says of a data loader: in sentences, in tables, and in the verdicts of the gate."""

from __future__ import annotations

from typing import Any

import pytest
from loader_records import (
    SHARED_MEMORY,
    all_failed,
    bottleneck,
    loaded,
    made_dali,
    made_iterable,
    made_loader,
)
from msgspec.structs import replace
from report_records import summary_of, tables_of, warnings_of

from batchtune.reports.page import build_page
from batchtune.results import LoaderRow, LoaderTuning


def with_row(
    loader: LoaderTuning, index: int | None = None, **changes: Any
) -> LoaderTuning:
    """A loader with other numbers in its recommended row, or another."""
    place = loader.recommended if index is None else index
    return replace(
        loader,
        rows=[
            replace(row, **changes) if i == place else row
            for i, row in enumerate(loader.rows)
        ],
    )


# Sentences


@pytest.mark.parametrize(
    ("loader", "headline"),
    [
        (
            made_loader(),
            "Set num_workers=4 prefetch_factor=2 for the loader: 870.7 examples/s, and the step waits for data 0.6% of "
            "the time.",
        ),
        (
            bottleneck(),
            "The loader is the bottleneck: with the best setting, num_workers=6 prefetch_factor=2, the step waits for "
            "data 34.0% of the time.",
        ),
        (
            made_dali(),
            "Set eval_mode=eager num_threads=2 for the loader: 467.6 examples/s.",
        ),
        (made_iterable(), "Measured the loader as it is: 52.5 examples/s."),
        (all_failed(), "Nothing is recommended: all 2 settings failed."),
    ],
    ids=["step", "bottleneck", "no step", "one setting", "failed"],
)
def test_the_headline_says_what_to_set_and_if_the_step_waits(
    loader: LoaderTuning, headline: str
) -> None:
    assert summary_of(loader=loader)[0] == headline


def test_a_row_is_named_by_what_tells_it_apart() -> None:
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
    only = replace(made_iterable(), rows=rows[1:], recommended=0)
    assert (
        "Measured num_workers=2 pin_memory=true: 3 examples/s."
        in summary_of(loader=only)[0]
    )


@pytest.mark.parametrize(
    "sentence",
    [
        "An epoch with the step is estimated at 34.5 s.",
        "The step takes 38.4 ms for a batch on average, by the probe on NVIDIA H200, which is 833.3 examples/s.",
        "Why: With num_workers=4 prefetch_factor=2 a step of 38.4 ms waits for 0.6% of the time.",
        "Reproducible: two epochs from one seed gave the same 40 batches, bit for bit.",
        "Its rate is the median of 3 trials, which differ by 3.0%.",
        "Measured: train.py:make_dataset root=data (torch), batches of 32 × 1600 × 80 (features), 892 in an epoch.",
    ],
)
def test_evidence_is_said(sentence: str) -> None:
    assert sentence in summary_of(loader=made_loader())


def test_failed_settings_are_counted_and_quoted() -> None:
    assert warnings_of(loader=made_loader())[0] == (
        "2 of 11 settings of the loader failed; num_workers=8 prefetch_factor=2: RuntimeError: DataLoader "
        "worker (pid 4711) is killed by signal: Bus error."
    )
    failed = tables_of(loaded())["Settings that failed"]
    assert len(failed.rows) == 2
    assert failed.rows[0] == (
        "num_workers=8 prefetch_factor=2",
        "/dev/shm is too small",
        " ".join(SHARED_MEMORY.split()),
    )


def test_workers_that_repeat_each_other_have_no_rate() -> None:
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


def test_interruptions_and_differing_batches_are_warned_of() -> None:
    assert warnings_of(loader=made_loader(interrupted=True))[0].startswith(
        "The tuning was interrupted after"
    )
    assert warnings_of(loader=made_dali())[0] == (
        "Not reproducible: two epochs from one seed differ from batch 1 on: log_mel has other values."
    )


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (made_loader(), ["batchtune-run/loader.yaml"]),
        (
            made_dali(),
            ["batchtune-run/loader.yaml", "batchtune tune-loader TARGET --step-ms MS"],
        ),
        (
            bottleneck(),
            ["batchtune-run/loader.yaml"],
        ),
        (made_loader(interrupted=True), ["batchtune tune-loader TARGET"]),
        (all_failed(), ["batchtune tune-loader TARGET"]),
    ],
)
def test_what_comes_next(loader: LoaderTuning, expected: list[str]) -> None:
    assert [step for step, _ in build_page(loaded(loader)).next_steps] == [
        *expected,
        "batchtune report --full",
    ]


def test_settings_that_can_not_be_told_apart_are_called_equal() -> None:
    equal = with_row(made_loader(), 6, equal_to_best=True)
    table = tables_of(loaded(equal))["Settings of the loader"]
    assert (table.columns[-1], table.rows[6][-1]) == ("equal to best", "yes")
