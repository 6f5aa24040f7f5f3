"""What else a sweep shows: equal rows, speed against randomness, ranks, saturation, tables over two lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchtune.reports.comparisons import time_error
from batchtune.reports.pools import faster_pools_sentence, format_correlation, randomness_sentence
from batchtune.reports.rows import format_share, knows_mates, mates_again, swept_kinds
from batchtune.reports.table import TIMES, Table, format_times, known, make_table, shown_of, spread
from batchtune.results import Row, Saturation, StreamRow, Sweep, cost_of
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

_MAX_SATURATION_POINTS = 10
_MAX_CURVE_POINTS = 12


def trade_off_sentences(sweep: Sweep) -> Iterator[str]:
    """Say what to know besides what to set, most important first."""
    row = sweep.recommended_row
    if row is not None:
        yield from _ranks(sweep, row)
    if sweep.saturation is not None and (row is None or row.sizing == "length"):
        yield from _saturation(sweep, sweep.saturation)
    if row is not None:
        equal = sum(other.equal_to_best is True for other in sweep.rows)
        of_all = f"; {equal} of {len(sweep.rows)} {swept_kinds(sweep)} are equal to the fastest within that error"
        yield from time_error(row, of_all if equal > 1 else "")
        yield from filter(None, (faster_pools_sentence(sweep, row), randomness_sentence(sweep, row)))
    if sweep.knee is not None:
        knee = sweep.rows[sweep.knee]
        costs = [cost_of(other, timed=sweep.has_times) or 0.0 for other in sweep.rows]
        times, again = format_times(costs[sweep.knee], min(costs)), mates_again(sweep, knee)
        random = f"{knee.effective_buckets:.1f} effective buckets"
        if again is not None:
            random = f"{format_share(again)} of batch mates are mates again"
        yield (
            f"The curve of speed against randomness bends at {knee.name}: {random}"
            f"{f', at {times} the cost of the fastest' if times else ''}."
        )
    if row is not None:
        yield from _batch_sizes(sweep, row)
    if sweep.two_dimensional:
        gains = _gains(sweep)
        best = max(gains)
        num_buckets = sweep.two_dimensional[gains.index(best)].num_buckets
        yield (
            f"Buckets over both lengths, as NeMo takes them, would be {best:.2f} times as fast as over the "
            f"first alone, with {num_buckets} buckets by the frontier, on one rank (sweep.json has the table)."
            if best > 1.005
            else "Buckets over both lengths would gain nothing over the first alone."
        )


def _ranks(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say how many examples are dealt twice, and how long ranks wait."""
    if sweep.world_size > 1 and row.repeated_examples:
        yield (
            f"{counted(row.repeated_examples, 'example')} {'is' if row.repeated_examples == 1 else 'are'} dealt twice, "
            f"so that each of the {format_number(sweep.world_size)} ranks has as many batches; the second time counts "
            "as padding."
        )
    ranks = row.ranks
    if ranks is None or not ranks.without_waiting_epoch_seconds:
        return
    independent, same = (
        (format_seconds(seconds), format_percent(max(0.0, seconds / ranks.without_waiting_epoch_seconds - 1)))
        for seconds in (ranks.independent_epoch_seconds, ranks.same_bucket_epoch_seconds)
    )
    alike = "of the same bucket" if row.pool_size is None else "that lie next to each other in a pool"
    which = f"all {alike}" if sweep.settings.get("same_bucket") else "each rank with any batch"
    yield (
        f"On {sweep.settings.get('world_size')} ranks an epoch takes {independent[0]} if each rank takes any batch "
        f"({independent[1]} more than if none waited), {same[0]} ({same[1]} more) if all take batches {alike}; "
        f"{counted(row.steps or 0, 'step')}, {which}."
    )


def _saturation(sweep: Sweep, saturation: Saturation) -> Iterator[str]:
    points, limit = saturation.points, saturation.max_batch_length
    if points and limit < points[-1].max_batch_length:
        enough = next(point for point in points if point.max_batch_length >= limit)
        yield (
            f"max_batch_length = {format_length(limit, sweep.lengths.unit)} already reaches "
            f"{format_percent(saturation.fraction)} of the best throughput of any max_batch_length, with "
            f"{format_number(enough.mean_batch_size)} examples a batch on average: often the better choice for "
            "training."
        )


def _batch_sizes(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say how the batch size varies, and what that means for the learning rate."""
    sizes, rate = batch_sizes(row), ""
    if sizes is None:
        return
    if (hint := sweep.learning_rate) is not None:
        before = "your current config" if hint.relative_to == "current" else f"a fixed {hint.from_batch_size:g}"
        rate = (
            f"; a learning rate tuned for {before} scales by {hint.linear:.2f} (linear) or {hint.square_root:.2f} "
            "(square root), as a hint"
        )
    yield f"{sizes}{rate}."


def batch_sizes(row: Row | StreamRow) -> str | None:
    """Say how the batch size varies, without a full stop; None in files of older versions."""
    if row.smallest_batch_size is None or row.largest_batch_size is None or row.batch_size_variation is None:
        return None
    return (
        f"Batches hold {format_number(row.smallest_batch_size)} to {format_number(row.largest_batch_size)} examples, "
        f"{format_number(row.mean_batch_size)} on average (coefficient of variation {row.batch_size_variation:.2f})"
    )


def _gains(sweep: Sweep) -> list[float]:
    """Return how many times as fast as one dimension each table is; by batches where not all times are known."""
    rows = sweep.two_dimensional
    times = [(row.one_dimensional_epoch_seconds, row.estimated_epoch_seconds) for row in rows]
    known = [one / two for one, two in times if one and two]
    return known if len(known) == len(rows) else [row.one_dimensional_batches / row.batches for row in rows]


def trade_off_tables(sweep: Sweep) -> Iterator[Table]:
    """Lay out the curve of speed against randomness, throughput by max_batch_length, tables over two lengths."""
    if len(sweep.trade_off) > 1:
        yield _curve_table(sweep)
    if sweep.saturation is not None and len(sweep.saturation.points) > 1:
        yield _saturation_table(sweep, sweep.saturation)
    if sweep.two_dimensional:
        yield _two_dimensional_table(sweep)


def _curve_table(sweep: Sweep) -> Table:
    indices, timed = sweep.trade_off, sweep.has_times
    kept = [indices.index(index) for index in (sweep.knee, sweep.recommended) if index in indices]
    shown = spread(indices, _MAX_CURVE_POINTS, kept)
    fastest = cost_of(sweep.rows[indices[0]], timed=timed)
    rows = []
    kinds, known_mates = swept_kinds(sweep), knows_mates(sweep)
    for index in shown:
        row = sweep.rows[index]
        sizing, knee = "" if row.sizing == "length" else " (frontier)", " (knee)" if index == sweep.knee else ""
        size, again = format_number(row.pool_size or len(row.boundaries)), row.mates_again
        random = f"{1 / row.effective_buckets:.3f}" if row.effective_buckets else None
        if known_mates and again is not None:  # rounded down, as --min-randomness is to be given
            random = f"{math.floor(1e4 * (1 - again)) / 1e4:.4f}"
        rows.append(
            {
                "table" if kinds == "tables" else "strategy": f"{row.strategy} {size}{sizing}{knee}",
                "effective buckets": None if known_mates else f"{row.effective_buckets:.1f}",
                "randomness": random,
                "length correlation": known(row.length_correlation, format_correlation),
                "mean batch": format_number(row.mean_batch_size),
                "variation": known(row.batch_size_variation, "{:.2f}".format),
                "cost": format_times(cost_of(row, timed=timed), fastest),
            }
        )
    notes = [
        f"Cost is a multiple ({TIMES}) of the fastest's. Nothing swept is cheaper and more random than one of these.",
        *shown_of(len(shown), len(indices), f" {kinds} on the curve", "sweep.json"),
    ]
    if known_mates:
        notes.append("Randomness is the share of batch mates that are not mates again in the next epoch.")
    marked = shown.index(sweep.recommended) if sweep.recommended in shown else None
    return make_table("Speed against randomness", rows, notes, marked)


def _saturation_table(sweep: Sweep, saturation: Saturation) -> Table:
    row, points = sweep.recommended_row, saturation.points
    best = max(point.throughput for point in points)
    limits = [point.max_batch_length for point in points]
    at = limits.index(saturation.max_batch_length) if saturation.max_batch_length in limits else None
    shown = spread(range(len(limits)), _MAX_SATURATION_POINTS, [at])
    rows = [
        {
            "max_batch_length": format_length(point.max_batch_length, sweep.lengths.unit),
            "mean batch": format_number(point.mean_batch_size),
            "estimated epoch": format_seconds(point.estimated_epoch_seconds),
            "throughput": format_percent(point.throughput / best) if best else None,
        }
        for point in (points[index] for index in shown)
    ]
    notes = [
        "Throughput is true length per second, as a share of the best of these tables: "
        f"{saturation.num_buckets} optimal buckets each, sized by max_batch_length."
    ]
    if row is not None and row.sizing == "frontier" and row.estimated_epoch_seconds and best:
        share = sweep.lengths.total / row.estimated_epoch_seconds / best
        what = "table, with measured batch sizes, reaches" if row.pool_size is None else "pools, as measured, reach"
        notes.append(f"The recommended {what} {format_percent(share)} of that best.")
    marked = None if at is None else shown.index(at)
    return make_table("Throughput by max_batch_length", rows, notes, marked)


def _two_dimensional_table(sweep: Sweep) -> Table:
    timed = all(row.estimated_epoch_seconds is not None for row in sweep.two_dimensional)
    rows = [
        {
            "buckets": format_number(row.num_buckets),
            "batches": format_number(row.batches),
            "over length alone": format_number(row.one_dimensional_batches),
            "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if timed else None,
            "gain": f"{gain:.2f}{TIMES}",
        }
        for row, gain in zip(sweep.two_dimensional, _gains(sweep), strict=True)
    ]
    note = "Gain is by time where it is known, else by batches; from the same simulated shuffles, on one rank."
    return make_table("Buckets over both lengths", rows, [note])
