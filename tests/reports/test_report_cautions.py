"""The warnings of a report."""

from __future__ import annotations

import msgspec
import pytest
from report_records import made_probe, made_sweep

from batchtune.reports import RunResults
from batchtune.reports.cautions import warning_sentences
from batchtune.results import CostModel, Models, Probe, Sweep


def warnings_of(probe: Probe | None = None, sweep: Sweep | None = None) -> list[str]:
    return warning_sentences(RunResults(name="run", probe=probe, sweep=sweep))


def test_results_in_order_give_no_warning() -> None:
    assert warnings_of(made_probe(), msgspec.structs.replace(made_sweep(), warnings=[])) == []


def test_the_sweeps_own_warnings_come_first_and_once_each() -> None:
    sweep = msgspec.structs.replace(made_sweep(), warnings=["take care", "look out.", "take care"])
    assert warnings_of(sweep=sweep) == ["take care.", "look out."]


def test_the_probes_own_warnings_are_told_once_each() -> None:
    probe = msgspec.structs.replace(made_probe(), warnings=["the clock was held down", "look out.", "look out."])
    assert warnings_of(probe) == ["the clock was held down.", "look out."]


def test_a_longest_example_that_does_not_fit_is_told() -> None:
    probe = made_probe()
    cut = msgspec.structs.replace(probe, frontier=probe.frontier[:-1])
    assert warnings_of(cut)[0].startswith("The frontier ends at 16 s, but the longest example has 24.52 s.")


def test_a_poor_fit_is_told_with_its_error() -> None:
    poor = CostModel(floor=0, constant=1, linear=1, quadratic=0, relative_error=0.25)
    probe = msgspec.structs.replace(made_probe(), models=Models(peak_bytes=None, step_seconds=poor))
    assert warnings_of(probe)[0].startswith("The model of step time misses the trials by 25.0%")


@pytest.mark.parametrize(("limit", "words"), [(601.0, "may run out of memory"), (500.0, "memory is left unused")])
def test_a_limit_other_than_the_measured_one_is_told(limit: float, words: str) -> None:
    sweep = msgspec.structs.replace(made_sweep(), warnings=[], max_batch_length=limit)
    assert [words in warning for warning in warnings_of(made_probe(), sweep)] == [True]


def test_a_limit_rounded_down_is_no_warning() -> None:
    sweep = msgspec.structs.replace(made_sweep(), warnings=[], max_batch_length=590.0)
    assert warnings_of(made_probe(), sweep) == []
