"""Hints at lengths, or a max_batch_length, in a wrong unit."""

from __future__ import annotations

import pytest

from batchtune.buckets.cautions import limit_unit_hint, workload_unit_hint
from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import Lengths, Unit

SECONDS = [3.0, 9.0, 12.0, 15.0, 24.0]


def lengths(times: float, unit: Unit | None) -> Lengths:
    return Lengths.of([times * one for one in SECONDS], unit=unit)


@pytest.mark.parametrize(
    ("times", "unit", "told"),
    [
        (1, "s", []),
        (1000, "ms", ["--length-scale 1/1000 --unit s (the longest is then 24 s)"]),
        (16000, "samples", ["--length-scale 1/16000 --unit s (the longest is then 24 s, for samples at 16 kHz)"]),
        (1000, None, ["nothing says what they count", "if they are ms", "if they are samples"]),
    ],
)
def test_lengths_expected_in_seconds_get_a_conversion_hint(times: float, unit: Unit | None, told: list[str]) -> None:
    hint = workload_unit_hint(lengths(times, unit), "train.py:MyStep") or ""
    assert bool(hint) == bool(told)
    assert all(part in hint for part in told)


def test_a_built_in_workload_knows_the_unit() -> None:
    assert workload_unit_hint(lengths(1000, "ms"), "builtin:conformer-ctc") is None


@pytest.mark.parametrize(
    ("times", "unit", "limit", "told"),
    [
        (1000, "ms", 600, "max_batch_length 600 ms is shorter than the median example (12,000 ms). Is it in another "
         "unit? The lengths are in ms: if 600 s is meant, give --max-batch-length 600000"),
        (16000, "samples", 600, "if 600 s is meant, give --max-batch-length 9600000 (for samples at 16 kHz)"),
        (1000, None, 600, "nothing says what the lengths count"[1:]),
        (100, "frames", 2000, "shorter than the longest example (2400 frames)"),
        (1, "s", 20, None),
        (1, "tokens", 10, "shorter than the median example (12 tokens)"),
    ],
)  # fmt: skip
def test_a_limit_that_looks_like_seconds_gets_a_hint(
    times: float, unit: Unit | None, limit: float, told: str | None
) -> None:
    hint = limit_unit_hint(lengths(times, unit), limit)
    assert (hint is None) == (told is None)
    assert told is None or told in (hint or "")


def test_a_sweep_says_first_that_the_unit_may_be_wrong() -> None:
    found = sweep(lengths(1000, "ms"), 600.0, SweepSettings(num_buckets=(2,)), Costs())
    assert found.recommended is None
    assert found.reason.startswith("max_batch_length 600 ms is shorter than the median example")
    assert found.warnings[0].startswith("max_batch_length 600 ms is shorter than the median example")
