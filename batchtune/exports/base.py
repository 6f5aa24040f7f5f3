"""What an export is given, what it gives, and which row a framework can express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchtune.errors import ResultError
from batchtune.results import Probe, Row, Sweep
from batchtune.units import format_number, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A run, as exports see it.

    Attributes:
        sweep: Its sweep.
        probe: Its probe, or None where there is none.
        config: The path of its `sampler.yaml`, as a snippet should name it.
    """

    sweep: Sweep
    probe: Probe | None = None
    config: str = "batchtune-run/sampler.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One framework's words for a recommendation.

    Attributes:
        name: What `--to` takes.
        title: The framework's own name.
        file: What to call the file.
        render: A tuned run -> the config or snippet, ready to write; raises ResultError where there is nothing to
            write. What the framework can't express is said in comments in it.
    """

    name: str
    title: str
    file: str
    render: Callable[[Tuned], str]


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


def choose_row(sweep: Sweep, framework: str, expresses: Callable[[Row], bool], why: str) -> Chosen:
    """The recommended row where the framework can express it; else the best that it can.

    The best is one whose batch sizes are all proven, where there is one; then that with the lowest estimated time
    (number of batches, where a time is unknown), then the fewest buckets.

    Args:
        sweep: The sweep.
        framework: Its name, for remarks.
        expresses: Whether the framework can express a row.
        why: Why it can't express others, "SpeechBrain derives batch sizes from max_batch_length".

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that the framework can express.
    """
    if sweep.recommended is not None and not 0 <= sweep.recommended < len(sweep.rows):
        raise ResultError(
            f"The sweep recommends row {sweep.recommended} of {len(sweep.rows)}",
            "Make it anew with `batchtune sweep-buckets`.",
        )
    recommended = sweep.recommended_row
    if recommended is None:
        raise ResultError(
            f"The sweep recommends no bucket table: {sweep.reason}",
            "Sweep more bucket counts with --num-buckets, or keep the fixed batch size.",
        )
    if expresses(recommended):
        return Chosen(row=recommended)
    rows = [row for row in sweep.rows if expresses(row)]
    if not rows:
        raise ResultError(
            f"The sweep holds no row that {framework} can express: {why}",
            "Sweep again with all strategies, without --strategy.",
        )
    row = min(rows, key=lambda row: (bool(row.unproven), _cost(row, sweep), len(row.boundaries)))
    more = _cost(row, sweep) / _cost(recommended, sweep) - 1 if _cost(recommended, sweep) else 0.0
    remark = (
        f"batchtune recommends {_name(recommended)} ({_costs(recommended)}), which {framework} can't express: {why}; "
        f"this is {_name(row)} ({_costs(row)}), {abs(more):.1%} {'more' if more >= 0 else 'less'}"
    )
    return Chosen(row=row, remarks=(remark,))


def _cost(row: Row, sweep: Sweep) -> float:
    timed = all(other.estimated_epoch_seconds is not None for other in sweep.rows)
    return row.estimated_epoch_seconds if timed and row.estimated_epoch_seconds is not None else float(row.batches)


def _name(row: Row) -> str:
    sized = " sized by the frontier" if row.sizing == "frontier" else ""
    return f"{row.strategy} with {len(row.boundaries)} bucket{'' if len(row.boundaries) == 1 else 's'}{sized}"


def _costs(row: Row) -> str:
    seconds = row.estimated_epoch_seconds
    return f"{format_number(row.batches)} batches" + (f", {format_seconds(seconds)} an epoch" if seconds else "")
