"""What an export reads and returns, and which row of a sweep it writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Generic

from batchtune.errors import ResultError
from batchtune.results import (
    SAMPLER_FILE,
    STREAM_CONFIG_FILE,
    STREAM_FILE,
    SWEEP_FILE,
    Algorithm,
    AnyFigures,
    EpochFigures,
    LoaderTuning,
    Probe,
    Row,
    StreamRow,
    StreamSweep,
    Sweep,
    Swept,
    cost_of,
)
from batchtune.units import counted, format_number, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A run, as exports see it.

    `config` and `stream_config` are the paths of its `sampler.yaml` and `stream.yaml`, as a snippet should name them.
    """

    sweep: Sweep | None = None
    stream: StreamSweep | None = None
    probe: Probe | None = None
    loader: LoaderTuning | None = None
    config: str = f"batchtune-run/{SAMPLER_FILE}"
    stream_config: str = f"batchtune-run/{STREAM_CONFIG_FILE}"

    @property
    def training_notes(self) -> list[str]:
        """What training needs to take memory as the probe did, as for `Device`."""
        return [] if self.probe is None else self.probe.device.training_notes

    @property
    def needed_sweep(self) -> Sweep:
        """The sweep, for an export of a bucket table; raises ResultError without one."""
        if self.sweep is None:
            raise self._lacks(SWEEP_FILE, "sweep-buckets MANIFEST")
        return self.sweep

    @property
    def needed_stream(self) -> StreamSweep:
        """The sweep of a stream, for an export of one; raises ResultError without one."""
        if self.stream is None:
            raise self._lacks(STREAM_FILE, "sweep-stream SOURCE")
        return self.stream

    def _lacks(self, file: str, command: str) -> ResultError:
        run = str(PurePosixPath(self.config).parent)
        return ResultError(
            f"{run} holds no {file}: nothing is recommended yet",
            f"`batchtune {command} --run {shlex.quote(run)}` writes it.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The recommendation as a config for one framework.

    Attributes:
        name: The value of `--to`.
        title: The framework's own name.
        file: What to call the file.
        render: Returns the config or snippet for a tuned run, ready to write, with comments on what the framework can't
            express. Raises ResultError if the run lacks the sweep, or the framework can express no row or no such unit.
    """

    name: str
    title: str
    file: str
    render: Callable[[Tuned], str]


@dataclass(frozen=True, slots=True)
class Chosen(Generic[AnyFigures]):
    """The best row that a framework can express.

    `remarks`, sentences without a full stop, say how it differs from the recommended row, and what that costs.
    """

    row: AnyFigures
    remarks: tuple[str, ...] = ()


def recommended_row(sweep: Swept[AnyFigures]) -> AnyFigures:
    """Return the row that the sweep recommends; raise ResultError if it recommends nothing."""
    if sweep.recommended_row is None:
        raise ResultError(
            f"The sweep recommends nothing: {sweep.reason}",
            "Sweep with other settings, such as --num-buckets or --buffer-size, or keep your current ones.",
        )
    return sweep.recommended_row


def choose_table(
    sweep: Sweep,
    framework: str,
    expresses: Callable[[Row], bool] = lambda row: True,
    why: str = "",
) -> Chosen[Row]:
    """Choose the best bucket table that the framework can run, as `_choose` does; `why` says what rules others out.

    Only batchtune's own sampler runs pools: where they are recommended, the best table is the one that the sweep names
    next to them.
    """
    next_best = None
    if sweep.recommended_table is not None:
        next_best = sweep.rows[sweep.recommended_table]
    if recommended_row(sweep).uses_pools:
        why = "only batchtune's own sampler runs pools"
    if recommended_row(sweep).keeps_examples:
        why = "only batchtune's own sampler keeps the examples of each optimizer step"

    def is_expressed(row: Row) -> bool:
        return not row.uses_pools and expresses(row)

    return _choose(sweep, framework, is_expressed, why, next_best)


def choose_stream(
    sweep: StreamSweep, framework: str, *runs: Algorithm
) -> Chosen[StreamRow]:
    """Choose the best row of the algorithms that the framework runs, as `_choose` does."""
    why = f"it only runs the algorithm {' or '.join(runs)}"
    return _choose(
        sweep, framework, lambda row: row.algorithm in runs, why, sweep.speechbrain_row
    )


def _choose(
    sweep: Swept[AnyFigures],
    framework: str,
    expresses: Callable[[AnyFigures], bool],
    why: str,
    next_best: AnyFigures | None,
) -> Chosen[AnyFigures]:
    """Choose the recommended row if the framework can run it, else the next best if it can run that.

    If it can't, prefer rows whose batch sizes are all proven, then the lowest estimated time (number of batches, if a
    time is unknown), then the fewest buckets. Raises ResultError if the sweep recommends
    nothing, or holds no row that the framework can express.
    """
    recommended = recommended_row(sweep)
    if expresses(recommended):
        return Chosen(recommended)
    expressed = [row for row in sweep.rows if expresses(row)]
    if not expressed:
        raise ResultError(
            f"{framework} can run no row of the sweep: {why}",
            "Sweep again with all strategies and algorithms.",
        )
    timed = sweep.has_times

    def preference(row: AnyFigures) -> tuple[bool, float, int]:
        return bool(row.unproven), cost_of(row, timed=timed), len(row.boundaries)

    row = min(expressed, key=preference)
    if next_best is not None and expresses(next_best):
        row = next_best
    more = cost_of(row, timed=timed) / (cost_of(recommended, timed=timed) or 1.0) - 1
    what = "time" if timed else "batches"
    remark = (
        f"batchtune recommends {_described(recommended)}, which {framework} can't express: {why}. This is "
        f"{_described(row)}: {more:+.1%} {what}"
    )
    if (
        isinstance(row, Row)
        and isinstance(recommended, Row)
        and recommended.keeps_examples
    ):
        remark += (
            f". An epoch has {counted(row.steps, 'optimizer step')} with it, not {recommended.steps:,}, and of other "
            "examples: `sweep-buckets --keep steps` finds a table that keeps their number"
        )
    return Chosen(row, (remark,))


def batches_per_rank(row: StreamRow, sweep: StreamSweep) -> int:
    """Return the batches of a nominal epoch on each rank."""
    if row is sweep.recommended_row and sweep.batches_per_rank:
        return sweep.batches_per_rank
    return max(1, row.batches // sweep.world_size)


def _described(row: EpochFigures) -> str:
    """Return a row's name and what an epoch costs: `bucket with a buffer of 1024 (120 batches, 3 s an epoch)`."""
    cost = f"{format_number(row.batches)} batches"
    if row.estimated_epoch_seconds:
        cost += f", {format_seconds(row.estimated_epoch_seconds)} an epoch"
    return f"{row.sized_name} ({cost})"
