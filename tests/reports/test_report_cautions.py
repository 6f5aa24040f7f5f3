"""The warnings of a report."""

from __future__ import annotations

import msgspec
import pytest
from report_records import made_probe, made_sweep, partly_proven_sweep, proven_probe, proven_sweep

from batchtune.reports import RunResults
from batchtune.reports.page import warning_sentences
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


def not_run(sweep: Sweep, probe: Probe | None) -> str:
    """The only warning."""
    (told,) = warnings_of(probe, msgspec.structs.replace(sweep, warnings=[]))
    return told


def unproven(sweep: Sweep, count: int = 4, **row_changes: object) -> Sweep:
    assert sweep.recommended is not None
    rows = list(sweep.rows)
    changes = {"unproven": count, **row_changes}
    rows[sweep.recommended] = msgspec.structs.replace(rows[sweep.recommended], **changes)
    return msgspec.structs.replace(sweep, rows=rows)


def test_where_all_was_run_there_is_no_warning() -> None:
    assert warnings_of(proven_probe(), msgspec.structs.replace(proven_sweep(), warnings=[])) == []


def test_sizes_are_unproven_because_the_limit_was_not_measured() -> None:
    assert not_run(partly_proven_sweep(), proven_probe()) == (
        "4 of 13 batch sizes are not proven to fit: max_batch_length = 700 s is more than the 600 s that was measured "
        "to fit. Sweep again without --max-batch-length."
    )


def test_an_interrupted_probe_is_why_sizes_are_not_proven() -> None:
    told = not_run(unproven(proven_sweep(), 13), made_probe())
    assert told.startswith("None of the 13 batch sizes is proven to fit: the probe was interrupted before")
    assert told.endswith("then run `batchtune sweep-buckets` again.")


def test_sizes_are_unproven_because_padding_was_not_measured() -> None:
    sweep = msgspec.structs.replace(proven_sweep(), settings={"multiple_of": 8})
    row = sweep.recommended_row
    assert row is not None
    told = not_run(unproven(sweep, 1, boundaries=[*row.boundaries[:-1], 32.0]), proven_probe())
    assert told.startswith(
        "1 of 13 batch sizes is not proven to fit: batches are up to 32 s long, and none longer than 24.52 s was run."
    )
    assert "with --multiple-of, run `batchtune tune` with --force" in told


def test_sizes_are_unproven_because_the_probe_had_a_cap() -> None:
    probe = msgspec.structs.replace(proven_probe(), settings={"max_batch_size": 64})
    told = not_run(unproven(proven_sweep()), probe)
    assert "no batch of more than 64 examples was run (--max-batch-size). Sweep with --max-batch-size 64 too" in told


def test_sizes_are_unproven_because_no_longer_batch_passed() -> None:
    probe = msgspec.structs.replace(proven_probe(), frontier=proven_probe().frontier[:-1])
    told = warnings_of(probe, msgspec.structs.replace(unproven(proven_sweep(), 1), warnings=[]))
    assert "none longer than 23.1 s was run. Leave longer examples out with --max-length" in told[1]


@pytest.mark.parametrize("probe", [None, proven_probe()])
def test_unproven_sizes_always_come_with_a_remedy(probe: Probe | None) -> None:
    told = not_run(unproven(proven_sweep()), probe)
    assert told.startswith("4 of 13 batch sizes are not proven to fit: ") and "Run `batchtune" in told
