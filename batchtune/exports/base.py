"""The input and the output of an export, and the row that a framework can express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchtune.errors import ResultError
from batchtune.results import Probe, Row, Sweep
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


@dataclass(frozen=True, slots=True)
class Patched:
    """A patched file.

    Attributes:
        text: The new text; the same where the file holds these numbers already.
        notes: Full sentences that the user should read.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The row that an export writes.

    Attributes:
        row: The best that the framework can express.
        remarks: Sentences without a full stop, for comments: which row was taken instead of the recommended one, and
            what that costs. Empty where the framework can express the recommended one.
    """

    row: Row
    remarks: tuple[str, ...] = ()


def recommended_row(sweep: Sweep) -> Row:
    """Return the row that the sweep recommends.

    Raises:
        ResultError: It recommends nothing.
    """
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

    The best is one whose batch sizes are all proven, if there is one; then that with the lowest estimated time
    (number of batches, where a time is unknown), then the fewest buckets.

    Args:
        sweep: The sweep.
        framework: Its name, for remarks.
        expresses: Whether the framework can express a row.
        why: Why it can't express others, "SpeechBrain derives batch sizes from max_batch_length".

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that the framework can express.
    """
    recommended = recommended_row(sweep)
    if expresses(recommended):
        return Chosen(row=recommended)
    rows = [row for row in sweep.rows if expresses(row)]
    if not rows:
        raise ResultError(
            f"The sweep holds no row that {framework} can express: {why}",
            "Sweep again with all strategies, without --strategy.",
        )
    timed = all(row.estimated_epoch_seconds is not None for row in sweep.rows)

    def cost(row: Row) -> float:
        return row.estimated_epoch_seconds if timed and row.estimated_epoch_seconds is not None else float(row.batches)

    row = min(rows, key=lambda row: (bool(row.unproven), cost(row), len(row.boundaries)))
    more = cost(row) / cost(recommended) - 1 if cost(recommended) else 0.0
    remark = (
        f"batchtune recommends {_name(recommended)}, which {framework} can't express: {why}; "
        f"this is {_name(row)}, {abs(more):.1%} {'more' if more >= 0 else 'less'}"
    )
    return Chosen(row=row, remarks=(remark,))


def _name(row: Row) -> str:
    """`optimal with 13 buckets sized by the frontier (634 batches, 10 min an epoch)`."""
    sized = " sized by the frontier" if row.sizing == "frontier" else ""
    time = f", {format_seconds(row.estimated_epoch_seconds)} an epoch" if row.estimated_epoch_seconds else ""
    return (
        f"{row.strategy} with {counted(len(row.boundaries), 'bucket')}{sized} ({format_number(row.batches)} "
        f"batches{time})"
    )
