"""Sentences on the trade-offs of a sweep: pools, equal rows, randomness, ranks, saturation, tables over two lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchtune.reports.rows import (
    batch_sizes,
    best_table,
    compared,
    format_correlation,
    format_share,
    mates_again,
    swept_kinds,
    time_error,
)
from batchtune.results import Row, Saturation, Sweep, cost_of
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

# The recommendation's own rule: pools are faster if they cost less than the best table by more than this share.
_FASTER = 0.01
_RANDOMNESS_DIGITS = 1e3


def trade_off_sentences(sweep: Sweep) -> Iterator[str]:
    """Say how speed is traded for other things, most important first."""
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
    if row is not None:
        yield from _batch_sizes(sweep, row)
    if sweep.two_dimensional:
        gains = two_dimensional_gains(sweep)
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
    if saturation.max_batch_length < sweep.max_batch_length:
        yield (
            f"max_batch_length = {format_length(saturation.max_batch_length, sweep.lengths.unit)} already reaches "
            f"{format_percent(saturation.fraction)} of the best throughput of any max_batch_length, with "
            f"{format_number(saturation.mean_batch_size)} examples a batch on average: often the better choice for "
            "training."
        )


def _batch_sizes(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say how the batch size varies, and what that means for the learning rate."""
    rate = ""
    if (hint := sweep.learning_rate) is not None:
        before = "your current config" if hint.relative_to == "current" else f"a fixed {hint.from_batch_size:g}"
        rate = (
            f"; a learning rate tuned for {before} scales by {hint.linear:.2f} (linear) or {hint.square_root:.2f} "
            "(square root), as a hint"
        )
    yield f"{batch_sizes(row)}{rate}."


def two_dimensional_gains(sweep: Sweep) -> list[float]:
    """Return how many times as fast as one dimension each table is; by batches where not all times are known."""
    rows = sweep.two_dimensional
    times = [(row.one_dimensional_epoch_seconds, row.estimated_epoch_seconds) for row in rows]
    known = [one / two for one, two in times if one and two]
    return known if len(known) == len(rows) else [row.one_dimensional_batches / row.batches for row in rows]


def pool_sentences(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say where recommended pools can't be used, and how they vary from epoch to epoch."""
    yield _sampler(sweep, row)
    yield (
        "Pools make batches of many shapes: if you compile a model for each shape, sweep with --multiple-of, which "
        "recommends a table of few shapes."
    )
    if row.simulated_epochs is None or row.batches_deviation is None:
        return
    batches = f"{format_number(row.batches)} in each of {row.simulated_epochs} simulated epochs"
    if row.batches_deviation:
        spread = f"{format_number(row.batches)} ± {row.batches_deviation:.2g}"
        batches = f"{spread} in {row.simulated_epochs} simulated epochs (mean and standard deviation)"
    time = ""
    if row.epoch_seconds_deviation is not None and row.estimated_epoch_seconds:
        time = f" The time varies by {format_share(row.epoch_seconds_deviation / row.estimated_epoch_seconds)}."
    yield f"How many batches pools give depends on the shuffle: {batches}; the sampler's len() is exact.{time}"


def _sampler(sweep: Sweep, row: Row) -> str:
    """Say what runs recommended pools, and what other samplers get instead."""
    own, table = "Pools need batchtune's own sampler", best_table(sweep)
    if table is None:
        return f"{own}: no bucket table is recommended for frameworks that can't take it."
    return (
        f"{own}: frameworks that can't take it get the best table, {table.name} ({_cost(sweep, table)}, "
        f"{_compared_cost(sweep, table, row)})."
    )


def randomness_sentence(sweep: Sweep, row: Row) -> str:
    """Say how often the recommended row's batch mates meet again, and how alike their lengths are."""
    others = [(name, mates_again(sweep, other)) for name, other in compared(sweep)]
    against = " and ".join(f"{format_share(share)} with {name}" for name, share in others if share is not None)
    alike = ""
    if row.length_correlation is not None:
        alike = f"; the lengths of mates correlate by {format_correlation(row.length_correlation)}"
    return (
        f"{format_share(row.mates_again)} of batch mates are mates again in the next epoch"
        f"{f', against {against}' if against else ''}{alike}."
    )


def faster_pools_sentence(sweep: Sweep, row: Row) -> str | None:
    """Say which pools are faster than the recommended table, by how much and at what randomness; None without any."""
    timed = sweep.has_times
    cost, fewest = cost_of(row, timed=timed), min((one.batches for one in sweep.baselines), default=math.inf)
    if row.pool_size is not None or cost is None:
        return None
    faster = [
        other
        for other in sweep.rows
        if other.pool_size is not None
        and not other.unproven
        and other.batches < fewest
        and (cost_of(other, timed=timed) or 0.0) < cost * (1 - _FASTER)
    ]
    if not faster:
        return None
    pools = min(faster, key=lambda other: (other.mates_again, cost_of(other, timed=timed)))
    verb = "take" if timed else "need"
    less = f"{pools.name.capitalize()} would {verb} {_cost(sweep, pools)}, {_compared_cost(sweep, pools, row)}"
    if sweep.settings.get("multiple_of") is not None:
        return f"{less}, but make batches of more shapes than --multiple-of leaves."
    least = math.floor(pools.randomness * _RANDOMNESS_DIGITS) / _RANDOMNESS_DIGITS
    return (
        f"{less}, but {format_share(pools.mates_again)} of their batch mates are mates again in the next epoch "
        f"instead of {format_share(row.mates_again)}; --min-randomness {least:g} allows that."
    )


def _cost(sweep: Sweep, row: Row) -> str:
    """Return a row's cost: `627 batches`, or `an estimated 12.3 s an epoch`."""
    seconds = row.estimated_epoch_seconds
    if sweep.has_times and seconds is not None:
        return f"an estimated {format_seconds(seconds)} an epoch"
    return f"{format_number(row.batches)} batches"


def _compared_cost(sweep: Sweep, row: Row, other: Row) -> str:
    """Return how much more or less a row costs than another: `1.5% more`."""
    ours, theirs = (cost_of(one, timed=sweep.has_times) or 0.0 for one in (row, other))
    change = ours / theirs - 1 if theirs else 0.0
    return f"{format_percent(abs(change))} {'more' if change >= 0 else 'less'}"
