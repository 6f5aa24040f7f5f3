"""What a run folder holds, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchtune.errors import ResultError
from batchtune.proofs import with_unproven
from batchtune.reports.gate.verdict import Verdict
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    VERIFY_FILE,
    Drift,
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

# Where the command line puts files unless the user names another folder; commands that are proposed need not name it.
DEFAULT_FOLDER = Path("batchtune-run")


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
            can't be read, or is edited or damaged; or they are of different data.
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
    return RunResults(
        name=folder.resolve().name or "run", probe=probe, sweep=sweep, verification=verification, folder=folder
    )


def _name_data(lengths: LengthsSummary) -> str:
    return f"{lengths.count:,} examples (fingerprint {lengths.fingerprint[:12]})"
