"""What a run folder holds, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchtune.errors import ResultError
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    VERIFY_FILE,
    LengthsSummary,
    Probe,
    Sweep,
    Verification,
    read_result,
)

_HOW_TO_MAKE = (
    "`batchtune probe-oom MANIFEST --workload W --run {folder}` writes probe.json, "
    "`batchtune sweep-buckets MANIFEST --run {folder}` writes sweep.json, and "
    "`batchtune tune MANIFEST --workload W --run {folder}` writes both."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResults:
    """The results of one run: a probe, a sweep or both.

    Attributes:
        name: Name of the run folder, without the path to it.
        probe: `probe.json`, or None where there is none.
        sweep: `sweep.json`, or None where there is none.
        verification: `verify.json`, or None where there is none.
    """

    name: str
    probe: Probe | None
    sweep: Sweep | None
    verification: Verification | None = None

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

    Raises:
        ResultError: The folder is missing or holds neither `probe.json` nor `sweep.json`; one of them
            can't be read; or they are of different data.
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
    verify_path = folder / VERIFY_FILE
    verification = read_result(verify_path, Verification) if verify_path.exists() else None
    if verification is not None:
        _check_verification(verification, verify_path)
    return RunResults(name=folder.resolve().name or "run", probe=probe, sweep=sweep, verification=verification)


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


def _check_verification(verification: Verification, path: Path) -> None:
    again = "Make it anew with `batchtune verify`."
    buckets = len(verification.bucket_boundaries)
    proposed = verification.proposal.bucket_batch_sizes if verification.proposal else verification.bucket_batch_sizes
    for what, sizes in (("batch sizes", verification.bucket_batch_sizes), ("proposed batch sizes", proposed)):
        if len(sizes) != buckets:
            raise ResultError(f"{path} is damaged: it has {buckets} boundaries and {len(sizes)} {what}", again)
