"""What else a sweep tells: the user's settings now, equals, speed against randomness, ranks, saturation."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.table import TIMES, UNKNOWN, Column, Table
from batchtune.reports.words import format_percent, format_times
from batchtune.results import Row, Saturation, Sweep, TwoDimensionalRow, epoch_costs
from batchtune.units import counted, format_length, format_number, format_seconds

_MAX_SATURATION_POINTS = 10
_MAX_CURVE_POINTS = 12


def trade_off_sentences(sweep: Sweep) -> Iterator[str]:
    """What to know beside what to set, most important first."""
    row = sweep.recommended_row
    if row is not None:
        yield from _dealt(sweep, row)
        yield from _waiting(sweep, row)
    if sweep.saturation is not None:
        yield from _saturation(sweep, sweep.saturation)
    if row is not None:
        yield from _equals(sweep, row)
    yield from _knee(sweep)
    if row is not None:
        yield from _randomness(sweep, row)
    yield from _two_dimensions(sweep)


def trade_off_tables(sweep: Sweep) -> list[Table]:
    """The curve of speed against randomness, throughput by max_batch_length, tables over two lengths."""
    tables = []
    curve = [index for index in sweep.trade_off if 0 <= index < len(sweep.rows)]
    if len(curve) > 1:
        tables.append(_curve_table(sweep, curve))
    if sweep.saturation is not None and len(sweep.saturation.points) > 1:
        tables.append(_saturation_table(sweep, sweep.saturation))
    if sweep.two_dimensional:
        tables.append(_two_dimensional_table(sweep))
    return tables


def _equals(sweep: Sweep, row: Row) -> Iterator[str]:
    """How many rows can't be told apart by time."""
    error, seconds = row.estimated_epoch_error_seconds, row.estimated_epoch_seconds
    if error is None or not seconds:
        return
    sentence = f"The measured steps tell the time to within {format_percent(2 * error / seconds)} (two standard errors)"
    equal = sum(other.equal_to_best is True for other in sweep.rows)
    if equal > 1:
        sentence += f"; {equal} of {len(sweep.rows)} tables are equal to the fastest within that error"
    yield f"{sentence}."


def _knee(sweep: Sweep) -> Iterator[str]:
    if sweep.knee is None or not 0 <= sweep.knee < len(sweep.rows):
        return
    row = sweep.rows[sweep.knee]
    costs = epoch_costs(sweep.rows)
    times = format_times(costs[sweep.knee], min(costs))
    at = f", at {times} the cost of the fastest" if times else ""
    yield (
        f"The curve of speed against randomness bends at {row.strategy} with {counted(len(row.boundaries), 'bucket')}: "
        f"{row.effective_buckets:.1f} effective buckets{at}."
    )


def _randomness(sweep: Sweep, row: Row) -> Iterator[str]:
    """How the batch size varies, and what that means for the learning rate."""
    if row.smallest_batch_size is None or row.largest_batch_size is None or row.batch_size_variation is None:
        return
    sentence = (
        f"Batches hold {format_number(row.smallest_batch_size)} to {format_number(row.largest_batch_size)} examples, "
        f"{format_number(row.mean_batch_size)} on average (coefficient of variation {row.batch_size_variation:.2f})"
    )
    hint = sweep.learning_rate
    if hint is not None:
        before = "your current config" if hint.relative_to == "current" else f"a fixed {hint.from_batch_size:g}"
        sentence += (
            f"; a learning rate tuned for {before} scales by {hint.linear:.2f} (linear) or {hint.square_root:.2f} "
            "(square root), as a hint"
        )
    yield f"{sentence}."


def _dealt(sweep: Sweep, row: Row) -> Iterator[str]:
    """What it takes that every rank has as many batches."""
    if sweep.world_size == 1 or not row.repeated_examples:
        return
    examples = f"{counted(row.repeated_examples, 'example')} {'is' if row.repeated_examples == 1 else 'are'}"
    yield (
        f"{examples} dealt twice, so that each of the {format_number(sweep.world_size)} ranks has as many batches; the "
        "second time counts as padding."
    )


def _waiting(sweep: Sweep, row: Row) -> Iterator[str]:
    ranks = row.ranks
    if ranks is None or not ranks.without_waiting_epoch_seconds:
        return
    world_size = sweep.settings.get("world_size")
    least = ranks.without_waiting_epoch_seconds
    more = [
        format_percent(max(0.0, seconds / least - 1))
        for seconds in (ranks.independent_epoch_seconds, ranks.same_bucket_epoch_seconds)
    ]
    which = "all in the same bucket" if sweep.settings.get("same_bucket") else "each with whatever batch comes"
    yield (
        f"On {world_size} ranks an epoch takes {format_seconds(ranks.independent_epoch_seconds)} where each takes "
        f"whatever batch comes ({more[0]} more than if none waited), "
        f"{format_seconds(ranks.same_bucket_epoch_seconds)} ({more[1]} more) where all take the same bucket's; "
        f"{counted(row.steps or 0, 'step')}, {which}."
    )


def _saturation(sweep: Sweep, saturation: Saturation) -> Iterator[str]:
    unit, full, row = sweep.lengths.unit, saturation.points[-1] if saturation.points else None, sweep.recommended_row
    if full is None or saturation.max_batch_length >= full.max_batch_length:
        return
    if row is not None and row.sizing == "frontier":
        return  # its batch sizes do not come from max_batch_length: a share of what that reaches says nothing of it
    enough = next(point for point in saturation.points if point.max_batch_length >= saturation.max_batch_length)
    yield (
        f"max_batch_length = {format_length(saturation.max_batch_length, unit)} already reaches "
        f"{format_percent(saturation.fraction)} of the best throughput of any max_batch_length, with "
        f"{format_number(enough.mean_batch_size)} examples a batch on average: often the better choice for training."
    )


def _two_dimensions(sweep: Sweep) -> Iterator[str]:
    rows = sweep.two_dimensional
    if not rows:
        return
    best = max(rows, key=_gain)
    if _gain(best) > 1.005:
        yield (
            f"Buckets over both lengths, as NeMo takes them, would be {_gain(best):.2f} times as fast as over the "
            f"first alone, with {best.num_buckets} buckets by the frontier, on one rank (sweep.json has the table)."
        )
    else:
        yield "Buckets over both lengths would gain nothing over the first alone."


def _gain(row: TwoDimensionalRow) -> float:
    """How many times as fast as one dimension; by the number of batches where no time is known."""
    if row.estimated_epoch_seconds and row.one_dimensional_epoch_seconds:
        return row.one_dimensional_epoch_seconds / row.estimated_epoch_seconds
    return row.one_dimensional_batches / row.batches if row.batches else 0.0


def _curve_table(sweep: Sweep, indices: list[int]) -> Table:
    shown = _spread(indices, _MAX_CURVE_POINTS, {sweep.knee, sweep.recommended})
    costs = epoch_costs(sweep.rows)
    fastest = costs[indices[0]]
    lines = []
    for index in shown:
        row = sweep.rows[index]
        name = f"{row.strategy} {len(row.boundaries)}" + ("" if row.sizing == "length" else " (frontier)")
        lines.append(
            (
                f"{name} (knee)" if index == sweep.knee else name,
                f"{row.effective_buckets:.1f}",
                f"{1 / row.effective_buckets:.3f}" if row.effective_buckets else UNKNOWN,
                format_number(row.mean_batch_size),
                UNKNOWN if row.batch_size_variation is None else f"{row.batch_size_variation:.2f}",
                format_times(costs[index], fastest) or UNKNOWN,
            )
        )
    columns = (
        Column("table", numeric=False),
        Column("effective buckets", leaves=2),
        Column("randomness", leaves=1),
        Column("mean batch", leaves=3),
        Column("variation", leaves=4),
        Column("cost", leaves=1),
    )
    notes = [
        f"Cost is a multiple ({TIMES}) of the fastest's. No table swept is cheaper and more random than one of these."
    ]
    if len(shown) < len(indices):
        notes.append(f"{len(shown)} of {len(indices)} tables on the curve shown; all are in sweep.json.")
    marked = shown.index(sweep.recommended) if sweep.recommended in shown else None
    return Table(
        title="Speed against randomness", columns=columns, rows=tuple(lines), notes=tuple(notes), marked=marked
    )


def _saturation_table(sweep: Sweep, saturation: Saturation) -> Table:
    unit, row = sweep.lengths.unit, sweep.recommended_row
    best = max(point.throughput for point in saturation.points)
    at = next(
        (
            index
            for index, point in enumerate(saturation.points)
            if point.max_batch_length == saturation.max_batch_length
        ),
        None,
    )
    shown = _spread(list(range(len(saturation.points))), _MAX_SATURATION_POINTS, {at})
    rows = tuple(
        (
            format_length(point.max_batch_length, unit),
            format_number(point.mean_batch_size),
            format_seconds(point.estimated_epoch_seconds),
            format_percent(point.throughput / best) if best else UNKNOWN,
        )
        for point in (saturation.points[index] for index in shown)
    )
    columns = (
        Column("max_batch_length"),
        Column("mean batch", leaves=2),
        Column("estimated epoch", leaves=2),
        Column("throughput", leaves=1),
    )
    notes = [
        "Throughput is true length per second, as a share of the best of these tables: "
        f"{saturation.num_buckets} optimal buckets each, sized by max_batch_length."
    ]
    if row is not None and row.sizing == "frontier" and row.estimated_epoch_seconds and best:
        share = sweep.lengths.total / row.estimated_epoch_seconds / best
        notes.append(f"The recommended table, with measured batch sizes, reaches {format_percent(share)} of that best.")
    return Table(
        title="Throughput by max_batch_length",
        columns=columns,
        rows=rows,
        notes=tuple(notes),
        marked=None if at is None else shown.index(at),
    )


def _two_dimensional_table(sweep: Sweep) -> Table:
    timed = all(row.estimated_epoch_seconds is not None for row in sweep.two_dimensional)
    rows = tuple(
        (
            format_number(row.num_buckets),
            format_number(row.batches),
            format_number(row.one_dimensional_batches),
            *([format_seconds(row.estimated_epoch_seconds or 0)] if timed else []),
            f"{_gain(row):.2f}{TIMES}",
        )
        for row in sweep.two_dimensional
    )
    columns = [Column("buckets"), Column("batches", leaves=2), Column("over length alone", leaves=3)]
    columns += [Column("estimated epoch", leaves=4)] if timed else []
    columns.append(Column("gain", leaves=1))
    return Table(
        title="Buckets over both lengths",
        columns=tuple(columns),
        rows=rows,
        notes=("Gain is by time where it is known, else by batches; from the same simulated shuffles, on one rank.",),
    )


def _spread(indices: list[int], most: int, kept: set[int | None]) -> list[int]:
    """At most about so many of them, evenly spaced, both ends and the kept ones in."""
    if len(indices) <= most:
        return indices
    chosen = {indices[round(step * (len(indices) - 1) / (most - 1))] for step in range(most)}
    chosen |= {index for index in indices if index in kept}
    return [index for index in indices if index in chosen]
