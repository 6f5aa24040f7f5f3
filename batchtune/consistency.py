"""What numbers in a result file must have to do with each other: a file may have been edited, or come from anywhere.

The types of the records say what each number may be. Here each function yields what is wrong, a phrase that names the
field; nothing where all is well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchtune.results import LengthsSummary, Probe, Row, Run, Sweep, Trial, TwoDimensionalRow, Verification

# What numbers that follow from each other may differ by.
_ROUNDING = 1e-6
# Of a batch: beyond, a 64-bit integer may not hold the number of its examples.
_LARGEST_SIZE = 4e18
# In seconds; less than a clock can tell.
_SHORTEST_STEP = 1e-12


def of_run(run: Run) -> Iterator[str]:
    """Check `run.json`."""
    return _lengths(run.lengths)


def of_probe(probe: Probe) -> Iterator[str]:
    """Check `probe.json`."""
    yield from _lengths(probe.lengths)
    yield from _limit(probe.max_batch_length, probe.lengths)
    for index, trial in enumerate(probe.trials):
        for wrong in of_trial(trial, index):
            yield f"trials, entry {index}: {wrong}"
    if not probe.frontier:
        yield "frontier is empty"
    for before, after in itertools.pairwise(probe.frontier):
        if before.length >= after.length:
            yield f"frontier: the length {after.length} follows {before.length}"
    with_targets = {point.target_length is not None for point in (*probe.frontier, *probe.joint_frontier)}
    if len(with_targets) > 1:
        yield "frontier: only some points have a target_length"
    if probe.joint_frontier and with_targets == {False}:
        yield "joint_frontier has no target_length"
    for point in (*probe.frontier, *probe.joint_frontier):
        if point.trial is not None and point.trial >= len(probe.trials):
            yield f"frontier: trial {point.trial} of {len(probe.trials)} proves {point.batch_size} × {point.length}"


def of_trial(trial: Trial, index: int) -> Iterator[str]:
    """Check a trial, the one at this place in `trials.jsonl` or `probe.json`."""
    if trial.index != index:
        yield f"the index {trial.index} can't be right here"
    for seconds in (trial.step_seconds, trial.mean_step_seconds):
        if seconds is not None and 0 < seconds < _SHORTEST_STEP:
            yield f"no step takes {seconds} s"


def of_sweep(sweep: Sweep) -> Iterator[str]:
    """Check `sweep.json`."""
    yield from _lengths(sweep.lengths)
    yield from _limit(sweep.max_batch_length, sweep.lengths)
    rows = {f"row {index}": row for index, row in enumerate(sweep.rows)}
    for name, row in {**rows, **({"current": sweep.current} if sweep.current is not None else {})}.items():
        for wrong in _row(row):
            yield f"{name}: {wrong}"
    for baseline in sweep.baselines:
        if baseline.padded_length <= 0:
            yield f"baseline {baseline.name!r}: padded_length is {baseline.padded_length}"
    for index, pairs in enumerate(sweep.two_dimensional):
        for wrong in _pairs(pairs):
            yield f"two_dimensional, row {index}: {wrong}"
    chosen = [
        ("recommended", sweep.recommended),
        ("knee", sweep.knee),
        *(("trade_off", one) for one in sweep.trade_off),
    ]
    missing = [(name, index) for name, index in chosen if index is not None and index >= len(sweep.rows)]
    for name, index in missing:
        yield f"{name} is row {index} of {len(sweep.rows)}"
    if not missing and sweep.recommended_row is not None:
        for wrong in _disagreements(sweep.recommended_row, sweep):
            yield f"row {sweep.recommended}: {wrong}"
    if any(low > high for low, high in itertools.pairwise(sweep.quantiles)):
        yield "quantiles do not ascend"


def of_verification(verification: Verification) -> Iterator[str]:
    """Check `verify.json`."""
    yield from _lengths(verification.lengths)
    yield from _ascending(verification.bucket_boundaries)
    buckets, proposal = len(verification.bucket_boundaries), verification.proposal
    proposed = proposal.bucket_batch_sizes if proposal is not None else verification.bucket_batch_sizes
    for what, sizes in (("batch sizes", verification.bucket_batch_sizes), ("proposed batch sizes", proposed)):
        if len(sizes) != buckets:
            yield f"it has {buckets} boundaries and {len(sizes)} {what}"
    for failure in verification.failures:
        if failure.bucket >= buckets:
            yield f"failures: bucket {failure.bucket} of {buckets}"


def _lengths(lengths: LengthsSummary) -> Iterator[str]:
    if lengths.min > lengths.max:
        yield f"lengths: min is {lengths.min} and max {lengths.max}"
    low, high = lengths.max, lengths.max * lengths.count
    if not low * (1 - _ROUNDING) <= lengths.total <= high * (1 + _ROUNDING):
        yield f"lengths: total is {lengths.total}, for {lengths.count} examples up to {lengths.max}"


def _limit(max_batch_length: float, lengths: LengthsSummary) -> Iterator[str]:
    if max_batch_length > _LARGEST_SIZE * lengths.min:
        yield f"max_batch_length is {max_batch_length}, for lengths from {lengths.min}"


def _ascending(boundaries: Sequence[float]) -> Iterator[str]:
    if not boundaries:
        yield "there are no boundaries"
    if any(before >= after for before, after in itertools.pairwise(boundaries)):
        yield "boundaries do not ascend"


def _row(row: Row) -> Iterator[str]:
    yield from _ascending(row.boundaries)
    if len(row.boundaries) != len(row.batch_sizes):
        yield f"it has {len(row.boundaries)} boundaries and {len(row.batch_sizes)} batch sizes"
    if row.padded_length <= 0:
        yield f"padded_length is {row.padded_length}"


def _pairs(row: TwoDimensionalRow) -> Iterator[str]:
    if not row.buckets or len(row.buckets) != len(row.batch_sizes):
        yield f"it has {len(row.buckets)} buckets and {len(row.batch_sizes)} batch sizes"
    if any(before > after for before, after in itertools.pairwise(row.buckets)):
        yield "buckets do not ascend"


def _disagreements(row: Row, sweep: Sweep) -> Iterator[str]:
    """Find where the numbers of the recommended row do not follow from each other."""
    count, total = sweep.lengths.count, sweep.lengths.total
    if not math.isclose(row.mean_batch_size * row.batches, count + (row.repeated_examples or 0), rel_tol=_ROUNDING):
        yield f"batches is {row.batches} and mean_batch_size {row.mean_batch_size}, for {count:,} examples"
    if not math.isclose(row.padding_ratio, 1 - total / row.padded_length, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        yield f"padding_ratio is {row.padding_ratio} and padded_length {row.padded_length}, for {total:,} in all"
    batches = sum(bucket.batches for bucket in sweep.buckets)
    if sweep.buckets and batches != row.batches:
        yield f"batches is {row.batches}, but those of its buckets are {batches}"
