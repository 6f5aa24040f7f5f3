"""What a run folder holds, read and checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchtune.errors import ResultError
from batchtune.proofs import with_unproven
from batchtune.reports.gate.verdict import Verdict
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    VERIFY_FILE,
    Baseline,
    Drift,
    LengthsSummary,
    Probe,
    Row,
    Sweep,
    Verification,
    read_result,
)

_HOW_TO_MAKE = (
    "`batchtune probe-oom MANIFEST --workload W --run {folder}` writes probe.json, "
    "`batchtune sweep-buckets MANIFEST --run {folder}` writes sweep.json, and "
    "`batchtune tune MANIFEST --workload W --run {folder}` writes both."
)

# Where the command line puts files unless the user names another folder; commands that are proposed need not name it.
DEFAULT_FOLDER = Path("batchtune-run")

# What numbers that follow from each other may differ by.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResults:
    """The results of one run: a probe, a sweep or both.

    Attributes:
        name: Name of the run folder, without the path to it.
        probe: `probe.json`, or None where there is none.
        sweep: `sweep.json`, or None where there is none.
        verification: `verify.json`, or None where there is none.
        verdicts: What the gate says of the rules that the run was held to; empty without any.
        drift: How far other lengths are from the run's; None where none were given.
        folder: Where the files lie, as the user named it; only commands that are proposed name it.
    """

    name: str
    probe: Probe | None
    sweep: Sweep | None
    verification: Verification | None = None
    verdicts: tuple[Verdict, ...] = ()
    drift: Drift | None = None
    folder: Path = DEFAULT_FOLDER

    def __post_init__(self) -> None:
        if self.probe is None and self.sweep is None:
            raise ValueError("a run without a probe and without a sweep has no results")

    @property
    def lengths(self) -> LengthsSummary:
        """The data set that the results are about."""
        if self.sweep is not None:
            return self.sweep.lengths
        assert self.probe is not None
        return self.probe.lengths

    @property
    def max_batch_length(self) -> float:
        """The sweep's max_batch_length; the probe's where there is no sweep."""
        if self.sweep is not None:
            return self.sweep.max_batch_length
        assert self.probe is not None
        return self.probe.max_batch_length


def load_run(folder: Path) -> RunResults:
    """Reads the results in a run folder.

    Batch sizes of an older batchtune count as unproven.

    Raises:
        ResultError: The folder is missing or holds neither `probe.json` nor `sweep.json`; one of them
            can't be read; they are of different data; or a number in them is edited or damaged.
    """
    how = _HOW_TO_MAKE.format(folder=folder)
    if not folder.exists():
        raise ResultError(f"There is no run folder {folder}", how)
    if not folder.is_dir():
        raise ResultError(f"{folder} is a file; a run folder is needed here", "Give the folder that holds it.")
    probe_path, sweep_path = folder / PROBE_FILE, folder / SWEEP_FILE
    probe = read_result(probe_path, Probe) if probe_path.exists() else None
    sweep = read_result(sweep_path, Sweep) if sweep_path.exists() else None
    if probe is None and sweep is None:
        raise ResultError(f"{folder} holds neither {PROBE_FILE} nor {SWEEP_FILE}", how)
    if sweep is not None:
        _check_sweep(sweep, sweep_path)
    if probe is not None and sweep is not None and probe.lengths.fingerprint != sweep.lengths.fingerprint:
        raise ResultError(
            f"{probe_path} and {sweep_path} are of different data: {_name_data(probe.lengths)} and "
            f"{_name_data(sweep.lengths)}",
            "Make the older one anew from the same manifest and with the same filters.",
        )
    if sweep is not None:
        sweep = with_unproven(sweep, probe)
    verify_path = folder / VERIFY_FILE
    verification = read_result(verify_path, Verification) if verify_path.exists() else None
    if verification is not None:
        _check_verification(verification, verify_path)
    return RunResults(
        name=folder.resolve().name or "run", probe=probe, sweep=sweep, verification=verification, folder=folder
    )


def _name_data(lengths: LengthsSummary) -> str:
    return f"{lengths.count:,} examples (fingerprint {lengths.fingerprint[:12]})"


def _check_sweep(sweep: Sweep, path: Path) -> None:
    """Checks what the types of the records can't say."""
    again = "Make it anew with `batchtune sweep-buckets`."
    if sweep.recommended is not None and not 0 <= sweep.recommended < len(sweep.rows):
        raise ResultError(f"{path} is damaged: it recommends row {sweep.recommended} of {len(sweep.rows)}", again)
    for index, row in enumerate(sweep.rows):
        if len(row.boundaries) != len(row.batch_sizes):
            raise ResultError(
                f"{path} is damaged: row {index} has {len(row.boundaries)} boundaries and "
                f"{len(row.batch_sizes)} batch sizes",
                again,
            )
    for what, wrong in _wrong_numbers(sweep):
        raise ResultError(f"{path} is edited or damaged: {what}: {wrong}", again)


def _wrong_numbers(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Numbers that no sweep writes: which record has them, and what is wrong."""
    if not 0 < sweep.max_batch_length < math.inf:
        yield "max_batch_length", f"is {sweep.max_batch_length}"
    for index, row in enumerate(sweep.rows):
        for wrong in _wrong_in_row(row):
            yield f"row {index}", wrong
    for wrong in _wrong_in_row(sweep.current) if sweep.current is not None else ():
        yield "current", wrong
    for baseline in sweep.baselines:
        for wrong in _wrong_costs(baseline):
            yield f"baseline {baseline.name}", wrong
    bound = sweep.lower_bound
    for name in ("batches", "padded_length", "estimated_epoch_seconds"):
        if (getattr(bound, name) or 0) < (1 if name == "batches" else 0):
            yield "lower_bound", f"{name} is {getattr(bound, name)}"
    recommended = sweep.recommended_row
    for wrong in _disagreements(recommended, sweep) if recommended is not None else ():
        yield f"row {sweep.recommended}", wrong
    if sweep.quantiles != sorted(sweep.quantiles):
        yield "quantiles", "do not ascend"


def _wrong_in_row(row: Row) -> Iterator[str]:
    yield from _wrong_costs(row)
    for name in ("num_buckets", "used_buckets", "effective_buckets", "mean_batch_size"):
        if getattr(row, name) < (1 if name == "num_buckets" else 0):
            yield f"{name} is {getattr(row, name)}"
    may_be_zero = ("fill", "largest_padded_length", "batch_size_variation", "steps", "repeated_examples", "unproven")
    for name in (*may_be_zero, "estimated_epoch_error_seconds"):
        if (getattr(row, name) or 0) < 0:
            yield f"{name} is {getattr(row, name)}"
    if any(before >= after for before, after in itertools.pairwise([0.0, *row.boundaries])):
        yield "boundaries do not ascend from above 0"
    if any(size < 1 for size in row.batch_sizes):
        yield f"batch_sizes has {min(row.batch_sizes)}"


def _wrong_costs(costs: Row | Baseline) -> Iterator[str]:
    if costs.batches < 1:
        yield f"batches is {costs.batches}"
    if costs.padded_length <= 0:
        yield f"padded_length is {costs.padded_length}"
    if not 0 <= costs.padding_ratio <= 1:
        yield f"padding_ratio is {costs.padding_ratio}"
    if (costs.estimated_epoch_seconds or 0) < 0:
        yield f"estimated_epoch_seconds is {costs.estimated_epoch_seconds}"


def _disagreements(row: Row, sweep: Sweep) -> Iterator[str]:
    """Where the numbers of the recommended row do not follow from each other."""
    count, total = sweep.lengths.count, sweep.lengths.total
    if not math.isclose(row.mean_batch_size * row.batches, count + (row.repeated_examples or 0), rel_tol=_ROUNDING):
        yield f"batches is {row.batches} and mean_batch_size {row.mean_batch_size}, for {count:,} examples"
    if not math.isclose(row.padding_ratio, 1 - total / row.padded_length, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        yield f"padding_ratio is {row.padding_ratio} and padded_length {row.padded_length}, for {total:,} in all"
    batches = sum(bucket.batches for bucket in sweep.buckets)
    if sweep.buckets and batches != row.batches:
        yield f"batches is {row.batches}, but those of its buckets are {batches}"


def _check_verification(verification: Verification, path: Path) -> None:
    again = "Make it anew with `batchtune verify`."
    buckets = len(verification.bucket_boundaries)
    proposed = verification.proposal.bucket_batch_sizes if verification.proposal else verification.bucket_batch_sizes
    for what, sizes in (("batch sizes", verification.bucket_batch_sizes), ("proposed batch sizes", proposed)):
        if len(sizes) != buckets:
            raise ResultError(f"{path} is damaged: it has {buckets} boundaries and {len(sizes)} {what}", again)
