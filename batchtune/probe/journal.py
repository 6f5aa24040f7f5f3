"""Continues the journal of a probe, if it is of the same lengths, workload and settings."""

from __future__ import annotations

import hashlib
from pathlib import Path

from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    TRIALS_FILE,
    Run,
    Trial,
    WorkloadRecord,
    read_result,
)
from batchtune.run_folder import ANOTHER, knows_anything, other_lengths, read_trials


def workload_sha256(settings: ProbeSettings) -> str | None:
    """Return the hash of the workload's file; None without one."""
    path = Path(settings.workload.rpartition(":")[0])
    return (
        hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".py" and path.is_file()
        else None
    )


def open_run(
    lengths: Lengths, settings: ProbeSettings, folder: Path
) -> tuple[Run | None, list[Trial]]:
    """Return the run that the folder holds, if it can be continued, and its trials.

    A run in which nothing passed is only continued if it is the same: another one takes its place, and its own errors
    (a workload that is not there) come first.

    Raises ResultError if it is of other lengths, another workload or other settings, or if files are damaged.
    """
    if not (folder / RUN_FILE).exists():
        if (folder / TRIALS_FILE).exists() or (folder / PROBE_FILE).exists():
            raise ResultError(
                f"{folder} holds a probe, but no {RUN_FILE} that says of what", ANOTHER
            )
        return None, read_trials(folder / TRIALS_FILE)  # a link is refused
    run = read_result(folder / RUN_FILE, Run)
    differences = []
    if run.lengths.fingerprint != lengths.fingerprint:
        differences.append(other_lengths(lengths, run.lengths))
    if run.workload != WorkloadRecord(spec=settings.workload, options=settings.options):
        differences.append(f"the workload {run.workload.words}")
    differences += [
        f"{name} = {run.settings.get(name)}, now {value}"
        for name, value in settings.recorded().items()
        if name != "max_lengths"
        and run.settings.get(name)
        != value  # trials hold, however many of them there are
    ]
    if differences and not knows_anything(folder):
        return None, []
    if differences:
        raise ResultError(
            f"{folder} holds a run of something else: {'; '.join(differences)}", ANOTHER
        )
    trials = read_trials(folder / TRIALS_FILE)
    for trial in trials:
        if trial.length < lengths.shortest or (trial.target_length is None) != (
            lengths.targets is None
        ):
            raise ResultError(
                f"{folder / TRIALS_FILE}, line {trial.index + 1}: not a trial of these lengths: length "
                f"{trial.length:g}, target length {trial.target_length}",
                ANOTHER,
            )
    return run, trials
