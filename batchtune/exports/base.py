"""The input and the output of an export, and the row that a framework can express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from batchtune.errors import ResultError
from batchtune.results import Probe, Row, Sweep, have_times
from batchtune.units import counted, format_number, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A run, as exports see it.

    Attributes:
        sweep: Its sweep.
        probe: Its probe; None without one.
        config: The path of its `sampler.yaml`, as a snippet should name it.
    """

    sweep: Sweep
    probe: Probe | None = None
    config: str = "batchtune-run/sampler.yaml"


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
        render: A tuned run -> the config or snippet, ready to write; raises ResultError if the framework can express
            no row. Comments in it name what the framework can't express.
        patch: A user's own file as text, a tuned run, key_path, name -> the file with the recommended numbers, all
            else as it was (`--patch`); None where batchtune can't.
    """

    name: str
    title: str
    file: str
    render: Callable[[Tuned], str]
    patch: Callable[..., Patched] | None = None


class Chosen(NamedTuple):
    """The row that an export writes, the best that the framework can express.

    `remarks`, sentences without a full stop, say which row it is instead of the recommended one, and what that costs.
    """

    row: Row
    remarks: tuple[str, ...] = ()


def recommended_row(sweep: Sweep) -> Row:
    """Return the row that the sweep recommends; raise ResultError if it recommends nothing."""
    if sweep.recommended_row is None:
        raise ResultError(
            f"The sweep recommends no bucket table: {sweep.reason}",
            "Sweep more bucket counts with --num-buckets, or keep the fixed batch size.",
        )
    return sweep.recommended_row


def choose_row(
    sweep: Sweep, framework: str, expresses: Callable[[Row], bool] = lambda row: True, why: str = ""
) -> Chosen:
    """Choose the recommended row if the framework can express it; else the best that it can.

    That is the recommended bucket table where pools are recommended and the framework can express it; else one whose batch sizes are all proven, if there is one; then that with the lowest estimated time
    (number of batches, where a time is unknown), then the fewest buckets. `why` says why the framework can't express
    others: "SpeechBrain derives batch sizes from max_batch_length".

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that the framework can express.
    """
    recommended = recommended_row(sweep)
    if expresses(recommended):
        return Chosen(recommended)
    rows = [row for row in sweep.rows if expresses(row)]
    if not rows:
        raise ResultError(
            f"The sweep holds no row that {framework} can express: {why}",
            "Sweep again with all strategies, without --strategy.",
        )
    timed = have_times(sweep.rows)

    def cost(row: Row) -> float:
        return row.estimated_epoch_seconds if timed and row.estimated_epoch_seconds is not None else float(row.batches)

    def described(row: Row) -> str:
        sized = " sized by the frontier" if row.sizing == "frontier" else ""
        time = f", {format_seconds(row.estimated_epoch_seconds)} an epoch" if row.estimated_epoch_seconds else ""
        buckets = counted(len(row.boundaries), "bucket")
        return f"{row.strategy} with {buckets}{sized} ({format_number(row.batches)} batches{time})"

    table = None if sweep.recommended_table is None else sweep.rows[sweep.recommended_table]
    if table is not None and expresses(table):
        row = table
    else:
        row = min(rows, key=lambda row: (bool(row.unproven), cost(row), len(row.boundaries)))
    more = cost(row) / cost(recommended) - 1 if cost(recommended) else 0.0
    remark = (
        f"batchtune recommends {described(recommended)}, which {framework} can't express: {why}; "
        f"this is {described(row)}, {abs(more):.1%} {'more' if more >= 0 else 'less'}"
    )
    return Chosen(row, (remark,))
