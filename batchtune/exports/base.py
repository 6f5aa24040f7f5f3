"""What an export reads and returns, and which row of a sweep it writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Generic, NamedTuple, TypeVar, overload

from batchtune.errors import ResultError
from batchtune.results import (
    SAMPLER_FILE,
    STREAM_CONFIG_FILE,
    STREAM_FILE,
    SWEEP_FILE,
    Algorithm,
    LoaderTuning,
    Probe,
    Row,
    StreamRow,
    StreamSweep,
    Sweep,
    cost_of,
)
from batchtune.units import format_number, format_seconds

AnyRow = TypeVar("AnyRow", Row, StreamRow)
# Whether costs are times, and whether the cost is higher → the words for it.
_COST_WORDS = {
    (True, True): "more time",
    (True, False): "less time",
    (False, True): "more batches",
    (False, False): "fewer batches",
}


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
    def run(self) -> str:
        """The path of the run folder."""
        return str(PurePosixPath(self.config).parent)

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
        return ResultError(
            f"{self.run} holds no {file}: nothing is recommended yet",
            f"`batchtune {command} --run {shlex.quote(self.run)}` writes it.",
        )


class Patched(NamedTuple):
    """A patched file: its new text, unchanged if it holds these numbers already, and full sentences for the user."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The recommendation as a config for one framework.

    Attributes:
        name: The value of `--to`.
        title: The framework's own name.
        file: What to call the file.
        render: Returns the config or snippet for a tuned run, ready to write, with comments on what the framework can't
            express. Raises ResultError if the run lacks the sweep, or the framework can express no row or no such unit.
        patch: Called with a user's own file as text, a tuned run, key_path and name (`--patch`): puts the recommended
            numbers into it and changes nothing else. None if batchtune can't.
    """

    name: str
    title: str
    file: str
    render: Callable[[Tuned], str]
    patch: Callable[..., Patched] | None = None


@dataclass(frozen=True, slots=True)
class Chosen(Generic[AnyRow]):
    """The best row that a framework can express.

    `remarks`, sentences without a full stop, say how it differs from the recommended row, and what that costs.
    """

    row: AnyRow
    remarks: tuple[str, ...] = ()


@overload
def recommended_row(sweep: Sweep) -> Row: ...
@overload
def recommended_row(sweep: StreamSweep) -> StreamRow: ...
def recommended_row(sweep: Sweep | StreamSweep) -> Row | StreamRow:
    """Return the row that the sweep recommends; raise ResultError if it recommends nothing."""
    if sweep.recommended_row is None:
        hints = {
            Sweep: "Sweep other numbers of buckets with --num-buckets, or keep the fixed batch size.",
            StreamSweep: "Sweep larger buffers, or keep the current settings.",
        }
        raise ResultError(f"The sweep recommends nothing: {sweep.reason}", hints[type(sweep)])
    return sweep.recommended_row


def choose_table(
    sweep: Sweep, framework: str, expresses: Callable[[Row], bool] = lambda row: True, why: str = ""
) -> Chosen[Row]:
    """Choose the recommended row if it is a bucket table that the framework can express; else the best such table.

    Only batchtune's own sampler runs pools: where they are recommended, the best table is the one that the sweep names
    next to them. If the framework can't express that, prefer tables whose batch sizes are all proven, then the lowest
    estimated time (number of batches, if a time is unknown), then the fewest buckets. `why` says why the framework
    can't express others. Raises ResultError if the sweep recommends nothing, or holds no such table.
    """
    recommended = recommended_row(sweep)
    timed = sweep.has_times
    tables = [row for row in sweep.rows if row.pool_size is None]
    remarks: list[str] = []
    row: Row | None = recommended
    if recommended.pool_size is not None:
        row = None
        if sweep.recommended_table is not None:
            row = sweep.rows[sweep.recommended_table]
        remarks.append(f"batchtune recommends {_described(recommended)}, which only its own sampler runs")
    if row is not None and not expresses(row):
        which = "batchtune recommends" if row is recommended else "the best table is"
        remarks.append(f"{which} {_described(row)}, which {framework} can't express: {why}")
        row = None
    expressed = list(filter(expresses, tables))
    if not expressed:
        reason = why if tables else "all of them are pools"
        raise ResultError(
            f"The sweep holds no row that {framework} can express: {reason}",
            "Sweep again with all strategies, without --strategy.",
        )
    if row is None:
        row = min(
            expressed, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0, len(row.boundaries))
        )
    if not remarks:
        return Chosen(row)
    return Chosen(row, ("; ".join([*remarks, _this_instead(row, recommended, timed=timed)]),))


def choose_stream(sweep: StreamSweep, who: str, *runs: Algorithm) -> Chosen[StreamRow]:
    """Choose the recommended row if `who` runs its algorithm; else the best row of the algorithms that it runs.

    For SpeechBrain's own algorithm, that is the row that the sweep names. For others, prefer rows whose batches are all
    proven, then the lowest estimated time (number of batches, if a time is unknown), then the smallest buffer. Raises
    ResultError if the sweep recommends nothing, or holds no such row.
    """
    recommended = recommended_row(sweep)
    timed = sweep.has_times
    rows = [row for row in sweep.rows if row.algorithm in runs]
    if not rows:
        raise ResultError(
            f"The sweep of the stream holds no row that {who} can run (algorithm {' or '.join(runs)})",
            "Sweep again with all algorithms: `batchtune sweep-stream`.",
        )
    if recommended.algorithm in runs:
        return Chosen(recommended)
    row = None
    if all(row.by_speechbrain for row in rows):
        row = sweep.speechbrain_row
    if row is None:
        row = min(rows, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0, row.buffer_size))
    instead = _this_instead(row, recommended, timed=timed)
    return Chosen(row, (f"batchtune recommends {_described(recommended)}, which {who} does not run; {instead}",))


def batches_per_rank(row: StreamRow, sweep: StreamSweep) -> int:
    """Return the batches of a nominal epoch on each rank."""
    if row is sweep.recommended_row and sweep.batches_per_rank:
        return sweep.batches_per_rank
    return max(1, row.batches // sweep.world_size)


def _this_instead(row: Row | StreamRow, recommended: Row | StreamRow, *, timed: bool) -> str:
    """Say what a row is, and what it costs more than the recommended one."""
    ours = cost_of(recommended, timed=timed)
    instead = cost_of(row, timed=timed)
    more = 0.0
    if ours and instead is not None:
        more = instead / ours - 1
    words = _COST_WORDS[timed, more >= 0]
    return f"this is {_described(row)}, {abs(more):.1%} {words}"


def _described(row: Row | StreamRow) -> str:
    """Return a row's name and what an epoch costs: `bucket with a buffer of 1024 (120 batches, 3 s an epoch)`."""
    name = row.sized_name if isinstance(row, Row) else row.name
    cost = f"{format_number(row.batches)} batches"
    if row.estimated_epoch_seconds:
        cost += f", {format_seconds(row.estimated_epoch_seconds)} an epoch"
    return f"{name} ({cost})"
