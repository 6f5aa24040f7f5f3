"""Sections: what a report says on one result, before any format; and the words and tables that several share.

A format knows nothing else.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from batchtune.buckets.advice import (
    close_in_steps,
    keeps_current,
    keeps_steps,
)
from batchtune.errors import without_commands
from batchtune.reports import NextStep, RunResults
from batchtune.results import (
    AnyRow,
    AnySweep,
    Baseline,
    Costed,
    LowerBound,
    PackedRow,
    Proof,
    Row,
    StreamRow,
    Sweep,
    cost_of,
)
from batchtune.trust import WORST_COMPARED_ERROR, rough_times
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    format_size,
    with_full_stop,
)

C = TypeVar("C", bound=Costed)
V = TypeVar("V")
Cells = Mapping[str, str | None]
"""A row of a table: title of the column → cell; None is unknown."""
Padded = Row | Baseline
"""Padded batches of a sweep, and what they cost."""

UNKNOWN = "\u2013"  # an en dash: unknown, or no question here; never 0
TIMES = "\u00d7"  # the multiplication sign
_MAX_TEXT = 400
_MAX_ROWS = 100
CURRENT = "your current config"
STEPS = "steps"
STEP_LENGTH = "step's length"
# A max_batch_length below this share of the one that fits is worth a warning; a rounded one is not.
_LOW_LIMIT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of clean strings.

    Attributes:
        columns: The title of each.
        rows: One tuple a row, as long as `columns`.
        left: The columns that hold names or sentences; the others hold numbers, set to the right.
        spare: Columns that a narrow terminal leaves out, in this order.
        marked: Index of the row to set off from the others, or None.
        note: Says how many rows are not shown; empty if all are.
        brief: Whether a brief report shows it, too.
        folded: Whether it is so long that only a page that can fold it shows it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str] = frozenset()
    spare: tuple[str, ...] = ()
    marked: int | None = None
    note: str = ""
    brief: bool = False
    folded: bool = False

    def narrower(self) -> Table:
        """Return the table without its first spare column."""
        place = self.columns.index(self.spare[0])
        columns, *rows = (
            (*cells[:place], *cells[place + 1 :])
            for cells in (self.columns, *self.rows)
        )
        return replace(self, columns=columns, rows=tuple(rows), spare=self.spare[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a report says on one result.

    Attributes:
        sentences: Say what to set, then what supports it, most important first.
        brief: How many of the sentences a brief report shows; with 0 it shows none of the tables either.
        warnings: Each with its remedy; first those of batches that are not safe.
        next_steps: In the order to take them.
    """

    title: str
    sentences: Sequence[str]
    brief: int = 1
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = ()
    next_steps: Sequence[NextStep] = ()


def make_table(
    title: str,
    rows: Sequence[Cells],
    *,
    left: Collection[str] = (),
    spare: Sequence[str] = (),
    marked: int | None = None,
    file: str = "",
    most: int = _MAX_ROWS,
    of: int = 0,
    brief: bool = False,
    folded: bool = False,
) -> Table:
    """Return a table of clean strings, of at most `most` rows and the marked one.

    Args:
        title: Shown above it.
        rows: At least one, each with the same columns; a column without a known cell is left out.
        left: The columns that hold names or sentences.
        spare: Those that a narrow terminal leaves out, in this order.
        marked: Index of the row to set off.
        file: Holds the rows that are not shown.
        most: How many rows to show, evenly spaced.
        of: How many rows the file has, if these are chosen from them.
        brief: Whether a brief report shows it.
        folded: Whether only a page that can fold it shows it.
    """
    columns = [
        column for column in rows[0] if any(row[column] is not None for row in rows)
    ]
    shown = spread(len(rows), most, marked)
    note = ""
    total = max(of, len(rows))
    if len(shown) < total:
        note = f"{len(shown):,} of {total:,} rows shown; all are in {file}."
    return Table(
        title=clean(title),
        columns=tuple(map(clean, columns)),
        rows=tuple(
            tuple(clean(rows[index][column] or UNKNOWN) for column in columns)
            for index in shown
        ),
        left=frozenset(map(clean, left)),
        spare=tuple(column for column in spare if column in columns),
        marked=None if marked is None else shown.index(marked),
        note=note,
        brief=brief,
        folded=folded,
    )


def failures_table(
    title: str,
    failures: Iterable[tuple[str, str, str | None]],
    *,
    of: str,
    file: str,
    most: int = 10,
) -> list[Table]:
    """Lay out what failed, its outcome and its message; `of` is the title of the first column. No table without any."""
    rows = [
        {of: failed, "outcome": outcome, "message": message or UNKNOWN}
        for failed, outcome, message in failures
    ]
    if not rows:
        return []
    return [make_table(title, rows, left=list(rows[0]), file=file, most=most)]


def facts_table(
    title: str, facts: Mapping[str, str | None], *, folded: bool = False
) -> Table:
    """Lay out names and values; None is unknown."""
    rows = [{"name": name, "value": value} for name, value in facts.items()]
    return make_table(title, rows, left=["name", "value"], folded=folded)


def settings_table(title: str, settings: Mapping[str, Any]) -> Table:
    """Return settings as a file records them, as a folded table."""
    facts = {name: str(value) for name, value in settings.items()}
    return facts_table(title, facts, folded=True)


def spread(count: int, most: int, keep: int | None = None) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced, both ends in; and the one to `keep`."""
    if count <= most:
        return list(range(count))
    chosen = {round(step * (count - 1) / (most - 1)) for step in range(most)}
    if keep is not None:
        chosen.add(keep)
    return sorted(chosen)


def clean(text: str) -> str:
    """Return one line of text that can do nothing to the place where it is shown.

    Result files may come from anywhere: white space of any kind becomes one space, control and formatting
    characters (terminal escapes, changes of writing direction) become U+FFFD, text that GitHub would take for a
    command is parted, and text longer than 400 characters is cut with an ellipsis.
    """
    line = without_commands(" ".join(text.split()))
    line = "".join(
        "\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char
        for char in line
    )
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def known(value: V | None, words: Callable[[V], str]) -> str | None:
    """Return a value in words; None where it is unknown."""
    return None if value is None else words(value)


def format_share(share: float) -> str:
    """Return a share, which may be small, as per cent with 3 significant digits: `12.9%`, `0.0946%`."""
    return "less than 0.001%" if 0 < share < 1e-5 else f"{100 * share:.3g}%"


def format_shape(batch_size: float, length: float, unit: str | None) -> str:
    """Return a batch shape: `165 × 10.5 s`."""
    return f"{format_number(batch_size)} {TIMES} {format_length(length, unit)}"


class Times:
    """How far the estimated times of a sweep can be relied on.

    Attributes:
        of_row: The relative error of the recommended row's time, of two standard errors; None if it is not known.
        large: Which of that error and the error of the probe's model is too large to compare times,
            in words.
        rough: Why the measured times are only rough, as warnings.
        are_reliable: Whether rows can be compared by their times; otherwise their batches are compared.
    """

    def __init__(self, run: RunResults, sweep: AnySweep) -> None:
        row = sweep.recommended_row
        errors: dict[str, float] = {}
        self.of_row = None
        if (
            row is not None
            and row.estimated_epoch_seconds
            and row.estimated_epoch_error_seconds is not None
        ):
            self.of_row = (
                2 * row.estimated_epoch_error_seconds / row.estimated_epoch_seconds
            )
            errors["the epoch's time is known to within"] = self.of_row
        if run.probe is not None and run.probe.models.step_seconds is not None:
            error = run.probe.models.step_seconds.relative_error
            errors["the model of step time misses the trials by"] = error
        self.large = [
            f"{what} {format_percent(error)}"
            for what, error in errors.items()
            if error > WORST_COMPARED_ERROR
        ]
        self.rough = []
        if run.probe is not None:
            self.rough = rough_times(run.probe.device, run.probe.trials)
        self.are_reliable = sweep.has_times and not self.large and not self.rough

    def doubts(self) -> Iterator[str]:
        """Say why batches are compared and not times, if so."""
        if self.are_reliable:
            return
        saved = "fewer batches may save much less time than they suggest"
        if self.large:
            yield (
                f"The step times are not reliable ({'; '.join(self.large)}): {saved}. Probe again with --force on a "
                "machine that does nothing else."
            )
        elif self.rough:
            yield f"The step times are only rough (see the warnings): {saved}."
        else:
            yield f"Step times are not known: {saved}."

    def accuracy(self) -> Iterator[str]:
        """Say how exact the estimated time of the recommended row is, if that is known."""
        if self.are_reliable and self.of_row is not None:
            error = format_percent(self.of_row)
            yield f"The epoch's time is known to within {error} (two standard errors of the measured steps)."


def headline(
    what: str,
    row: AnyRow,
    alternatives: Mapping[str, Costed],
    sweep: AnySweep,
    *,
    timed: bool,
    verb: str = "Set",
) -> str:
    """Say what to set, compared with the first alternative, if any (`: 1.34 times faster than NAME`).

    If the user's own config is better, say to keep it.
    """
    steps_kept = keeps_steps(sweep)
    if sweep.current is not None and keeps_current(sweep, row, timed=timed):
        advantage = _advantage(
            sweep.current, what, row, timed=timed, steps_kept=steps_kept
        )
        return f"Keep {CURRENT}: {advantage}."
    for name, other in alternatives.items():
        advantage = _advantage(row, name, other, timed=timed, steps_kept=steps_kept)
        return f"{verb} {what}: {advantage}."
    return f"{verb} {what}."


def _advantage(
    row: AnyRow, name: str, other: Costed, *, timed: bool, steps_kept: bool
) -> str:
    """Say how a row compares with another: `1.34 times faster than NAME`, `37.9% fewer batches than with NAME`."""
    seconds = row.estimated_epoch_seconds
    is_timed = timed and seconds and other.estimated_epoch_seconds
    close = row.keeps_examples or close_in_steps(other, row)
    if not is_timed and steps_kept and close:
        change = 1 - row.padded_length / other.padded_length
        less = "less" if change >= 0 else "more"
        return f"{format_percent(abs(change))} {less} to compute, with padding, than with {name}"
    if not is_timed:
        change = 1 - row.batches / other.batches
        if change == 0:
            return f"as many batches as with {name}"
        return f"{format_percent(abs(change))} {'fewer' if change >= 0 else 'more'} batches than with {name}"
    assert seconds and other.estimated_epoch_seconds
    ratio = other.estimated_epoch_seconds / seconds
    if format_ratio(ratio) == "1.00":
        return f"as fast as {name}"
    faster = f"{format_ratio(ratio)} times faster than {name}"
    if ratio < 1:
        faster = f"{format_ratio(1 / ratio)} times slower than {name}"
    if isinstance(other, Row | StreamRow) and row.equal_to_best and other.equal_to_best:
        faster += ", but the estimates may be off by as much"
    return faster


def proof_in_training(proof: Proof | None, by: str = "verify") -> str:
    """Say how the batches ran in shuffled training, and which command does that."""
    if proof is None:
        return (
            "The sizes ran alone and interleaved, and are not yet proven in shuffled training: "
            f"`batchtune {by}` proves them."
        )
    ran = counted(proof.steps, "shuffled batch")
    if proof.pairs:
        ran += f" and {counted(proof.pairs, 'pair')}"
    ran += f" in {counted(proof.processes, 'process')}"
    if proof.replayed_steps:
        ran += (
            f"; the memory requests of {counted(proof.replayed_steps, 'step')} were replayed in "
            f"{counted(proof.replayed_processes, 'other order')}"
        )
    if not proof.holds:
        return f"Not proven in shuffled training: {proof.reason} (before: {ran})."
    reserved = ""
    if proof.highest_reserved_bytes is not None:
        share = proof.highest_reserved_bytes / max(1, proof.limit_bytes)
        reserved = f", highest reserved {format_percent(share)} of the limit"
    earlier = ""
    if proof.tables > 1:
        earlier = f"; {counted(proof.tables - 1, 'earlier table')} failed"
    retries = cache_emptied(proof.alloc_retries)
    return f"Proven in shuffled training: {ran}: no OOM{retries}{reserved}{earlier}."


def brief_facts(
    run: RunResults, times: Times, sweep: AnySweep, proof: Iterable[str]
) -> list[str]:
    """Return what even a brief report says after its headline: doubts, the proof, and what the user's own config is."""
    return [
        *times.doubts(),
        *proof,
        *training_notes(run),
        *steps_kept(sweep),
        *current_described(sweep),
    ]


def training_notes(run: RunResults) -> list[str]:
    """Return what training needs to take memory as the probe did, in sentences."""
    if run.probe is None:
        return []
    return [with_full_stop(note) for note in run.probe.device.training_notes]


def steps_kept(sweep: AnySweep) -> Iterator[str]:
    """Say how many optimizer steps an epoch keeps, and of how large batches, if that was asked for."""
    packing = sweep.packed if isinstance(sweep, Sweep) else None
    # By default, packing fills its token budget.
    is_kept = packing is None or packing.row.steps >= (sweep.min_steps or 0)
    if sweep.min_steps is not None and is_kept:
        kept = f"An epoch keeps at least {counted(sweep.min_steps, 'optimizer step')}"
        row = sweep.recommended_row
        if packing is None and row is not None:
            smallest = format_number(row.smallest_batch_size)
            largest = format_number(row.largest_batch_size)
            kept += f"; batches hold {smallest} to {largest} examples"
        yield f"{kept} (--keep nothing fills the memory)."


def current_described(sweep: AnySweep) -> Iterator[str]:
    """Say what the user's own config is, and where it was read, if there is one."""
    settings = sweep.current_settings or {}
    if isinstance(settings.get("describe"), str):
        place = [
            str(settings[name]) for name in ("source", "key_path") if settings.get(name)
        ]
        where = f" ({', '.join(place)})" if place else ""
        yield f"{CURRENT.capitalize()} is {settings['describe']}{where}."


def fewer_steps(steps: int, current_steps: int) -> Iterator[str]:
    """Say how to keep the optimizer steps of the user's own config, if the recommended row has fewer."""
    if steps < current_steps:
        yield (
            f"An epoch takes {counted(steps, 'optimizer step')}, {current_steps:,} with {CURRENT}: --min-steps "
            f"{current_steps} keeps as many, so that training learns as it does now."
        )


def current_name(sweep: AnySweep) -> str:
    """Return what tables and charts call the user's own config; it says so if its batches do not fit."""
    return f"{CURRENT} (does not fit)" if sweep.current_fits is False else CURRENT


def best_of_sweep(sweep: AnySweep, row: AnyRow, *, timed: bool) -> tuple[str, int]:
    """Return what a comparison calls the best row, which stands first, and the index of what is recommended."""
    if keeps_current(sweep, row, timed=timed):
        return "best of the sweep", 1  # the user's own config, which comes next
    return "recommended", 0


def cost_cells(costed: Costed, *, timed: bool = True) -> Cells:
    """Return what every table on costs shows, by the titles of its columns; None is unknown, as times not `timed`."""
    seconds = costed.estimated_epoch_seconds if timed else None
    return {
        "batches": format_number(costed.batches),
        "padding": known(costed.padding_ratio, format_percent),
        "mates again": known(costed.mates_again, format_share),
        "estimated epoch": known(seconds, format_seconds),
    }


def step_cells(costed: Row | PackedRow | Baseline | LowerBound) -> Cells:
    """Return the optimizer steps of an epoch, if they are not its batches, and how much a step's true length varies."""
    steps = costed.steps
    if steps == costed.batches:
        steps = None
    deviation = known(costed.step_tokens_deviation, format_percent)
    return {
        STEPS: known(steps, format_number),
        STEP_LENGTH: known(deviation, "±{}".format),
    }


def comparison_table(
    title: str,
    compared: Mapping[str, C],
    cells_of: Callable[[C], Cells],
    *,
    timed: bool,
    steps_kept: bool,
    marked: int | None = 0,
    cost_name: str | None = None,
) -> Table:
    """Lay out what an epoch costs, with each cost as a multiple of the first one's, in a column `cost_name`.

    Without a name it says what is compared: times are `relative`, padded lengths the `compute`; batches have a column
    of their own. `marked` is the index of the recommended one; None if none is.
    """
    if cost_name is None:
        cost_name = "relative" if timed else "compute"
    rows = []
    reference = 0.0
    for name, costed in compared.items():
        cost = cost_of(costed, timed=timed, steps_kept=steps_kept)
        reference = reference or cost
        relative = None
        if cost and (timed or steps_kept):
            relative = f"{format_ratio(cost / reference)}{TIMES}"
        rows.append({"": name, **cells_of(costed), cost_name: relative})
    spare = [STEP_LENGTH, STEPS]
    return make_table(title, rows, left=[""], spare=spare, marked=marked, brief=True)


def sizes_table(
    title: str, row: AnyRow, unit: str | None, file: str, proofs: Sequence[str] = ()
) -> Table:
    """Lay out how many examples a batch holds, by its longest, and the trial that proves it, where one is known."""
    rows = []
    columns = (row.boundaries, row.batch_sizes, proofs)
    for boundary, size, proof in itertools.zip_longest(*columns):
        rows.append(
            {
                "up to": format_length(boundary, unit),
                "batch size": format_number(size),
                "largest batch": format_length(boundary * size, unit),
                "proven by": proof,
            }
        )
    return make_table(f"{title} ({row.name})", rows, left=["proven by"], file=file)


def cache_emptied(retries: int | None) -> str:
    """Say how often the allocator emptied its cache, as a part of a sentence; nothing if it did not."""
    if not retries:
        return ""
    return f", but the allocator emptied its cache {counted(retries, 'time')} to go on"


def left_free(run: RunResults) -> str:
    """Say how much memory proven batches leave free and why that is enough, after a comma or a semicolon."""
    probe = run.probe
    if probe is None or probe.margin is None or not probe.margin.free_bytes:
        return "; how much memory that leaves free is not known"
    margin = probe.margin
    share = format_percent(margin.free_bytes / probe.device.limit_bytes)
    return (
        f", and leaves at least {format_size(margin.free_bytes)} ({share} of the limit) free: peaks of equal batches "
        f"differ by {format_size(margin.spread_bytes)} at most"
    )


def swept_warnings(run: RunResults, sweep: AnySweep, command: str) -> Iterator[str]:
    """Warn of another max_batch_length than was measured, then yield the sweep's own warnings."""
    if run.probe is not None and run.probe.packed is None:
        unit = sweep.lengths.unit
        measured = run.probe.max_batch_length
        differs = (
            f"max_batch_length is {format_length(sweep.max_batch_length, unit)} here, but the probe measured that "
            f"{format_length(measured, unit)} fits"
        )
        again = f"Run `batchtune {command}` again without --max-batch-length."
        if sweep.max_batch_length > measured * (1 + 1e-9):
            yield f"{differs}: training may run out of memory. {again}"
        elif sweep.max_batch_length < measured * _LOW_LIMIT and not (
            sweep.min_steps
            or (isinstance(sweep, Sweep) and sweep.settings.throughput_fraction)
        ):
            yield f"{differs}: memory is left unused. {again}"
    yield from map(with_full_stop, sweep.warnings)
