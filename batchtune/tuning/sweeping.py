"""The sweep with what the run folder knows: `probe.json` gives its costs, `sweep.json` is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchtune.cost import Frontier, JointFrontier, StepTimes, scaled
from batchtune.errors import ResultError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    Probe,
    Row,
    Sweep,
    read_result,
    write_result,
)
from batchtune.trust import WORST_TIME_ERROR
from batchtune.tuning.current import Current
from batchtune.tuning.distribution import ProvenBy
from batchtune.tuning.run_folder import clear_run, lengths_of, other_lengths
from batchtune.tuning.sweep import Costs, SweepSettings, sweep


def run_sweep(
    lengths: Lengths,
    settings: SweepSettings,
    folder: Path,
    *,
    max_batch_length: float | None = None,
    force: bool = False,
    on_row: Callable[[Row], None] | None = None,
    current: Current | None = None,
) -> Sweep:
    """Sweeps bucket counts and strategies with the run folder's probe, if it has one, and writes `sweep.json`.

    Args:
        lengths: The data set.
        settings: What to compare.
        folder: The run folder; made where missing.
        max_batch_length: The largest padded length of a batch, whatever the probe found; None: what it found.
        force: Throw away what the folder holds of other data.
        on_row: Told of each row.
        current: What the user has now.

    Raises:
        ResultError: The folder holds results of other data, or neither it nor the caller knows max_batch_length.
    """
    foreign = holds_other_lengths(lengths, folder, force=force)
    probe = None if foreign or not (folder / PROBE_FILE).exists() else read_result(folder / PROBE_FILE, Probe)
    limit = max_batch_length if max_batch_length is not None else probe.max_batch_length if probe else None
    if limit is None:
        raise ResultError(
            f"how large a batch may be is not known: there is no {PROBE_FILE} in {folder}",
            "Measure it with `batchtune probe-oom`, or give it with --max-batch-length.",
        )
    costs = costs_of(probe) if probe else Costs()
    if max_batch_length is not None:
        costs = _capped(costs, max_batch_length)
    found = sweep(lengths, limit, settings, costs, on_row, current=current)
    if foreign:
        clear_run(folder)
    write_result(folder / SWEEP_FILE, found)
    return found


def costs_of(probe: Probe) -> Costs:
    """What a probe says a batch costs: what is proven to fit, and the step times, by the model between measured ones.

    Where the model misses even the measurements by far, no times are known. Nothing is proven by a probe of version
    0.1.0, which ran few of its batches in turns and kept no margin.
    """
    model = probe.models.step_seconds
    if model is not None and model.relative_error > WORST_TIME_ERROR:
        model = None
    frontier = Frontier.of(probe.frontier)
    joint = JointFrontier.of([*probe.frontier, *probe.joint_frontier]) if probe.joint_frontier else None
    return Costs(
        frontier=frontier,
        continued_frontier=frontier.continued,
        joint_frontier=joint,
        joint_proven=joint and joint.proven,
        joint_lengths=np.unique(joint.lengths) if joint else np.empty(0),
        proven=frontier.proven if probe.is_proven else lambda lengths: np.zeros(lengths.shape, dtype=np.int64),
        proven_by=_proven_by(probe, frontier),
        step_seconds=None if model is None else _in_turns(StepTimes.of(probe.trials, model), probe),
        device_name=probe.device.name,
    )


def _proven_by(probe: Probe, frontier: Frontier) -> ProvenBy:
    """The trial of the first point that is no shorter and no smaller; None beyond what is proven."""

    def proven_by(longest: float, batch_size: int) -> int | None:
        if batch_size > int(frontier.proven(longest)):
            return None
        fitting = (point for point in probe.frontier if point.length >= longest and point.batch_size >= batch_size)
        return next(fitting).trial

    return proven_by


def _in_turns(times: StepTimes, probe: Probe) -> StepTimes:
    """The times that steps take one after another with other shapes, as training runs them.

    Corrections are ratios to the model, so scaling it scales every time.
    """
    ratio = probe.confirmation.time_ratio if probe.confirmation else None
    return times if ratio is None else replace(times, model=scaled(times.model, ratio))


def holds_other_lengths(lengths: Lengths, folder: Path, *, force: bool) -> bool:
    """Whether the folder's results are of other lengths, which only `force` allows to go on with.

    Raises:
        ResultError: They are, and `force` is not given.
    """
    theirs = lengths_of(folder)
    if theirs is None or theirs.fingerprint == lengths.fingerprint:
        return False
    if force:
        return True
    other = other_lengths(lengths, theirs)
    raise ResultError(
        f"{folder} holds a run of {other.what}",
        f"{other.remedy}Give another folder with --run, or --force to start over in this one.",
    )


def _capped(costs: Costs, max_batch_length: float) -> Costs:
    """The same, but no batch longer than the user wants."""
    frontier, joint, further = costs.frontier, costs.joint_frontier, costs.continued_frontier

    def wanted(lengths: FloatArray) -> IntArray:
        return np.maximum(1, (max_batch_length / lengths).astype(np.int64))

    return replace(
        costs,
        frontier=frontier and (lambda lengths: np.minimum(frontier(lengths), wanted(lengths))),
        continued_frontier=further and (lambda lengths: np.minimum(further(lengths), wanted(lengths))),
        joint_frontier=joint and (lambda lengths, targets: np.minimum(joint(lengths, targets), wanted(lengths))),
    )
