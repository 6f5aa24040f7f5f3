"""Words and tables on what an epoch costs, for the sections on a sweep of tables and on that of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from batchtune.reports.run import RunResults
from batchtune.reports.section import (
    Table,
    format_share,
    format_times,
    known,
    make_table,
)
from batchtune.results import Costed, Row, StreamRow, StreamSweep, Sweep, cost_of
from batchtune.units import (
    format_length,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    with_full_stop,
)

AnyRow: TypeAlias = Row | StreamRow
AnySweep: TypeAlias = Sweep | StreamSweep

CURRENT = "your current config"
# A max_batch_length below this share of the one that fits is worth a warning; a rounded one is not.
_LOW_LIMIT = 0.95
# Times with a larger error say nothing about which batches are faster.
_WORST_ERROR = 0.3


class Times:
    """How far the estimated times of a sweep can be relied on.

    Attributes:
        error: The relative error of the recommended row's time, of two standard errors, or that of the probe's model if
            it is larger; None if neither is known.
        of_row: The recommended row's alone; None if it is not known.
        are_reliable: Whether rows can be compared by their times; otherwise their batches are compared.
    """

    def __init__(self, run: RunResults, sweep: AnySweep) -> None:
        row = sweep.recommended_row
        errors = []
        self.of_row = None
        if (
            row is not None
            and row.estimated_epoch_seconds
            and row.estimated_epoch_error_seconds is not None
        ):
            self.of_row = (
                2 * row.estimated_epoch_error_seconds / row.estimated_epoch_seconds
            )
            errors.append(self.of_row)
        if run.probe is not None and run.probe.models.step_seconds is not None:
            errors.append(run.probe.models.step_seconds.relative_error)
        self.error = max(errors, default=None)
        self.are_reliable = sweep.has_times and (
            self.error is None or self.error <= _WORST_ERROR
        )

    def doubts(self) -> Iterator[str]:
        """Say why batches are compared and not times, if so."""
        if self.are_reliable:
            return
        saved = "the time saved may be much less"
        if self.error is not None and self.error > _WORST_ERROR:
            yield (
                f"The step times are not reliable (error {format_percent(self.error)}): {saved}. Probe again with "
                "--force on a machine that does nothing else."
            )
        else:
            yield f"Step times are not known: {saved}."

    def accuracy(self) -> Iterator[str]:
        """Say how exact the estimated time of the recommended row is, if that is known."""
        if self.are_reliable and self.of_row is not None:
            yield f"The measured steps give the time to within {format_percent(self.of_row)} (two standard errors)."


def advantage(row: AnyRow, name: str, other: Costed, *, timed: bool) -> str:
    """Say how a row compares with another: `1.34 times faster than NAME`, `37.9% fewer batches than with NAME`."""
    seconds = row.estimated_epoch_seconds
    if not timed or not seconds or not other.estimated_epoch_seconds:
        change = 1 - row.batches / other.batches
        if change == 0:
            return f"as many batches as with {name}"
        return f"{format_percent(abs(change))} {'fewer' if change >= 0 else 'more'} batches than with {name}"
    ratio = other.estimated_epoch_seconds / seconds
    if format_ratio(ratio) == "1.00":
        return f"as fast as {name}"
    faster = f"{format_ratio(ratio)} times faster than {name}"
    if ratio < 1:
        faster = f"{format_ratio(1 / ratio)} times slower than {name}"
    if isinstance(other, Row | StreamRow) and row.equal_to_best and other.equal_to_best:
        faster += ", but the estimates may be off by as much"
    return faster


def better_current(sweep: AnySweep, *, timed: bool) -> Iterator[str]:
    """Say so if the user's own config costs less than the recommended row, and fits."""
    row = sweep.recommended_row
    current = sweep.current
    if row is None or current is None or sweep.current_fits is False:
        return
    if timed and row.equal_to_best and current.equal_to_best:
        return
    if (cost_of(current, timed=timed) or 0.0) < (cost_of(row, timed=timed) or 0.0):
        yield f"{CURRENT.capitalize()} is better than what is recommended: keep it."


def described_current(sweep: AnySweep) -> Iterator[str]:
    """Say what was read as the user's own config, and where."""
    settings = sweep.current_settings or {}
    if isinstance(settings.get("describe"), str):
        place = [
            str(settings[name]) for name in ("source", "key_path") if settings.get(name)
        ]
        where = f" ({', '.join(place)})" if place else ""
        yield f"{CURRENT.capitalize()} is {settings['describe']}{where}."


def current_name(sweep: AnySweep) -> str:
    """Return what tables and charts call the user's own config; it says so if its batches do not fit."""
    return f"{CURRENT} (does not fit)" if sweep.current_fits is False else CURRENT


def cost_cells(
    costed: Costed, *, padding: float | None, again: float | None
) -> dict[str, str | None]:
    """Return what every table on costs shows, by the titles of its columns; None is unknown."""
    return {
        "batches": format_number(costed.batches),
        "padding": known(padding, format_percent),
        "mates again": known(again, format_share),
        "estimated epoch": known(costed.estimated_epoch_seconds, format_seconds),
    }


def comparison_table(
    title: str,
    compared: Mapping[str, tuple[Costed, dict[str, str | None]]],
    *,
    timed: bool,
) -> Table:
    """Lay out what an epoch costs, with each cost as a multiple of the first one's; times only if they compare."""
    costs = [cost_of(costed, timed=timed) for costed, _ in compared.values()]
    rows = []
    for (name, (_, cells)), cost in zip(compared.items(), costs, strict=True):
        row = {"": name, **cells, "relative": format_times(cost, costs[0])}
        if not timed:
            row["estimated epoch"] = None
        rows.append(row)
    return make_table(
        title,
        rows,
        left=[""],
        marked=0,
        brief=True,
    )


def sizes_table(
    title: str, row: AnyRow, unit: str | None, file: str, proofs: Sequence[str] = ()
) -> Table:
    """Lay out how many examples a batch holds, by its longest, and the trial that proves it, where one is known."""
    rows = []
    for index, (boundary, size) in enumerate(
        zip(row.boundaries, row.batch_sizes, strict=True)
    ):
        rows.append(
            {
                "up to": format_length(boundary, unit),
                "batch size": format_number(size),
                "largest batch": format_length(boundary * size, unit),
                "proven by": proofs[index] if proofs else None,
            }
        )
    return make_table(f"{title} ({row.name})", rows, left=["proven by"], file=file)


def swept_warnings(run: RunResults, sweep: AnySweep, command: str) -> Iterator[str]:
    """Warn of another max_batch_length than was measured, then yield the sweep's own warnings."""
    if run.probe is not None:
        unit = sweep.lengths.unit
        measured = run.probe.max_batch_length
        differs = (
            f"max_batch_length is {format_length(sweep.max_batch_length, unit)} here, but the probe measured that "
            f"{format_length(measured, unit)} fits"
        )
        again = f"Run `batchtune {command}` again without --max-batch-length."
        if sweep.max_batch_length > measured * (1 + 1e-9):
            yield f"{differs}: training may run out of memory. {again}"
        elif sweep.max_batch_length < measured * _LOW_LIMIT:
            yield f"{differs}: memory is left unused. {again}"
    for warning in sweep.warnings:
        yield with_full_stop(warning)
