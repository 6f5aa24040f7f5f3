"""The input and the output of an export, and the row that a framework can express."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple, overload

from batchtune.errors import ResultError
from batchtune.results import (
    SAMPLER_FILE,
    STREAM_CONFIG_FILE,
    STREAM_FILE,
    SWEEP_FILE,
    LoaderTuning,
    Probe,
    Row,
    StreamRow,
    StreamSweep,
    Sweep,
    cost_of,
)
from batchtune.units import format_number, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A run, as exports see it.

    Attributes:
        sweep: Its sweep; None without one.
        stream: Its sweep of a stream; None without one.
        probe: Its probe; None without one.
        loader: The tuning of its data loader; None without one.
        config, stream_config: The paths of its `sampler.yaml` and `stream.yaml`, as a snippet should name them.
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
    """A patched file: its new text, the same if it holds these numbers already, and full sentences for the user."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The recommendation as a config for one framework.

    Attributes:
        name: The value of `--to`.
        title: The framework's own name.
        file: What to call the file.
        render: A tuned run -> the config or snippet, ready to write; raises ResultError if the run lacks the sweep that
            it needs, or the framework can express no row. Comments in it name what the framework can't express.
        patch: A user's own file as text, a tuned run, key_path, name -> the file with the recommended numbers, all
            else as it was (`--patch`); None where batchtune can't.
    """

    name: str
    title: str
    file: str
    render: Callable[[Tuned], str]
    patch: Callable[..., Patched] | None = None


class Chosen(NamedTuple):
    """The bucket table that an export writes, the best that the framework can express.

    `remarks`, sentences without a full stop, say which it is instead of the recommended row, and what that costs.
    """

    row: Row
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
) -> Chosen:
    """Choose the recommended row if it is a bucket table that the framework can express; else the best such table.

    Pools run in batchtune's own sampler alone: where they are recommended, the best table is the one that the sweep
    names next to them. If the framework can't express that, it is one whose batch sizes are all proven, if there is
    one; then that with the lowest estimated time (number of batches, where a time is unknown), then the fewest buckets.
    `why` says why the framework can't express others: "SpeechBrain derives batch sizes from max_batch_length".

    Raises:
        ResultError: The sweep recommends nothing, or holds no table that the framework can express.
    """
    recommended, timed = recommended_row(sweep), sweep.has_times
    tables = [row for row in sweep.rows if row.pool_size is None]
    remarks: list[str] = []
    best: Row | None = recommended
    if recommended.pool_size is not None:
        best = None if sweep.recommended_table is None else sweep.rows[sweep.recommended_table]
        remarks.append(f"batchtune recommends {described(recommended)}, which only its own sampler runs")
    if best is not None and not expresses(best):
        which = "batchtune recommends" if best is recommended else "the best table is"
        remarks.append(f"{which} {described(best)}, which {framework} can't express: {why}")
    if not any(map(expresses, tables)):
        raise ResultError(
            f"The sweep holds no row that {framework} can express: {why if tables else 'all of them are pools'}",
            "Sweep again with all strategies, without --strategy.",
        )
    row = best
    if row is None or not expresses(row):
        row = min(
            filter(expresses, tables),
            key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0, len(row.boundaries)),
        )
    if not remarks:
        return Chosen(row)
    return Chosen(row, ("; ".join([*remarks, this_instead(row, recommended, timed=timed)]),))


def this_instead(row: Row | StreamRow, recommended: Row | StreamRow, *, timed: bool) -> str:
    """Say what a row is, and what it costs more than the recommended one."""
    ours, instead = cost_of(recommended, timed=timed), cost_of(row, timed=timed)
    more = instead / ours - 1 if ours and instead is not None else 0.0
    what = ("more time" if more >= 0 else "less time") if timed else ("more" if more >= 0 else "fewer") + " batches"
    return f"this is {described(row)}, {abs(more):.1%} {what}"


def described(row: Row | StreamRow) -> str:
    """Return a row's name and what an epoch costs: `bucket with a buffer of 1024 (120 batches, 3 s an epoch)`."""
    name = row.sized_name if isinstance(row, Row) else row.name
    time = f", {format_seconds(row.estimated_epoch_seconds)} an epoch" if row.estimated_epoch_seconds else ""
    return f"{name} ({format_number(row.batches)} batches{time})"
