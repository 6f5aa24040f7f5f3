"""The Lhotse export, run by Lhotse's own sampler."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from real_lengths import librispeech_seconds
from report_records import made_sweep

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import ResultError
from batchtune.exports import export_of
from batchtune.exports.base import Tuned
from batchtune.exports.lhotse import least_buffer
from batchtune.lengths import Lengths
from batchtune.results import Row, Sweep, SweepSettings

EXPORT = export_of("lhotse")


@pytest.fixture(scope="module")
def librispeech() -> np.ndarray:
    return librispeech_seconds()[::4]


@pytest.fixture(scope="module")
def swept(librispeech: np.ndarray) -> Sweep:
    chosen = SweepSettings(strategies=("optimal",), num_buckets=(13,))
    return sweep(Lengths.of(librispeech, unit="s"), 600, chosen, Costs())


def render(result: Sweep) -> str:
    return EXPORT.render(Tuned(sweep=result))


def module_of(text: str) -> dict[str, Any]:
    pytest.importorskip("lhotse")
    names: dict[str, Any] = {"__name__": "snippet"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "snippet", "exec"), names)
    return names


def batches(text: str, cuts: Iterable[Any], **options: Any) -> list[list[float]]:
    """The durations in each batch of an epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            [cut.duration for cut in batch]
            for batch in module_of(text)["make_sampler"](cuts, **options)
        ]


def dummy_cuts(durations: Iterable[float]) -> list[Any]:
    cut = pytest.importorskip("lhotse").MonoCut
    return [
        cut(id=str(i), start=0, duration=float(value), channel=0)
        for i, value in enumerate(durations)
    ]


def recommended(result: Sweep) -> Row:
    assert result.recommended_row is not None
    return result.recommended_row


def with_row(
    boundaries: list[float], sizes: list[int], unit: str | None = "s"
) -> Sweep:
    row = msgspec.structs.replace(
        recommended(made_sweep()), boundaries=boundaries, batch_sizes=sizes
    )
    lengths = msgspec.structs.replace(
        made_sweep().lengths, unit=unit, max=boundaries[-1]
    )
    return msgspec.structs.replace(
        made_sweep(), rows=[row], recommended=0, lengths=lengths
    )


def test_lhotse_makes_as_many_batches_as_the_row_of_real_lengths(
    librispeech: np.ndarray, swept: Sweep
) -> None:
    row = recommended(swept)
    found = batches(render(swept), dummy_cuts(librispeech))
    assert len(found) == row.batches
    assert sorted(length for batch in found for length in batch) == sorted(librispeech)
    for batch in found:
        assert (
            len(batch)
            <= row.batch_sizes[int(np.searchsorted(row.boundaries, max(batch)))]
        )


def test_the_least_buffer_is_enough(librispeech: np.ndarray, swept: Sweep) -> None:
    row = recommended(swept)
    found = batches(
        render(swept),
        dummy_cuts(librispeech[:6000]),
        buffer_size=least_buffer(row.batch_sizes),
    )
    counts = np.bincount(
        np.searchsorted(row.boundaries, librispeech[:6000]),
        minlength=len(row.boundaries),
    )
    assert len(found) == int(np.sum(-(-counts // np.array(row.batch_sizes))))


def test_milliseconds_become_seconds() -> None:
    assert module_of(render(with_row([1500.0, 24525.0], [9, 2], "ms")))[
        "BOUNDARIES"
    ] == [1.5, 24.525]


def test_a_table_that_ends_before_the_longest_example_is_refused() -> None:
    result = with_row([1.0, 2.0], [3, 2])
    lengths = msgspec.structs.replace(result.lengths, max=2.5)
    with pytest.raises(
        ResultError, match=r"ends at 2, before the longest example of 2\.5"
    ):
        render(msgspec.structs.replace(result, lengths=lengths))
