"""Sentences on the trade-offs of a sweep: pools, randomness, ranks, throughput, tables over two lengths."""

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
    time_error_sentence,
)
from batchtune.results import Row, Saturation, Sweep, cost_of
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

# The recommendation's own rule: pools are faster if they cost less than the best table by more than this share.
_FASTER = 0.01
_RANDOMNESS_DIGITS = 1e3


def trade_off_sentences(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say how speed is traded for other things, most important first."""
    yield from _ranks(sweep, row)
    if sweep.saturation is not None and row.sizing == "length":
        yield from _saturation(sweep, sweep.saturation)
    yield from time_error_sentence(row)
    pools = faster_pools_sentence(sweep, row)
    if pools is not None:
        yield pools
    yield randomness_sentence(sweep, row)
    yield _batch_sizes(sweep, row)
    if sweep.two_dimensional:
        yield _two_dimensional(sweep)


def _ranks(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say how many examples are dealt twice, and how long ranks wait."""
    if sweep.world_size > 1 and row.repeated_examples:
        verb = "is" if row.repeated_examples == 1 else "are"
        yield (
            f"{counted(row.repeated_examples, 'example')} {verb} dealt twice, so that each of the "
            f"{format_number(sweep.world_size)} ranks has as many batches; the second time counts as padding."
        )
    ranks = row.ranks
    if ranks is None or not ranks.without_waiting_epoch_seconds:
        return
    any_batch = _waiting(ranks.independent_epoch_seconds, ranks.without_waiting_epoch_seconds)
    same_bucket = _waiting(ranks.same_bucket_epoch_seconds, ranks.without_waiting_epoch_seconds)
    alike = "of the same bucket" if row.pool_size is None else "that lie next to each other in a pool"
    which = f"all {alike}" if sweep.settings.get("same_bucket") else "each rank with any batch"
    yield (
        f"On {sweep.world_size} ranks an epoch takes {any_batch} if each rank takes any batch, {same_bucket} if all "
        f"take batches {alike}; {counted(row.steps, 'step')}, {which}."
    )


def _waiting(seconds: float, seconds_without_waiting: float) -> str:
    share = format_percent(max(0.0, seconds / seconds_without_waiting - 1))
    return f"{format_seconds(seconds)} ({share} of waiting)"


def _saturation(sweep: Sweep, saturation: Saturation) -> Iterator[str]:
    limit = saturation.max_batch_length
    if limit >= sweep.max_batch_length:
        return
    yield (
        f"max_batch_length = {format_length(limit, sweep.lengths.unit)} already reaches "
        f"{format_percent(saturation.fraction)} of the best throughput of any max_batch_length, with "
        f"{format_number(saturation.mean_batch_size)} examples a batch on average: often the better choice for "
        "training."
    )


def _batch_sizes(sweep: Sweep, row: Row) -> str:
    """Say how the batch size varies, and what that means for the learning rate."""
    hint = sweep.learning_rate
    if hint is None:
        return f"{batch_sizes(row)}."
    before = "your current config" if hint.relative_to == "current" else f"a fixed {hint.from_batch_size:g}"
    return (
        f"{batch_sizes(row)}; a learning rate tuned for {before} scales by {hint.linear:.2f} (linear) or "
        f"{hint.square_root:.2f} (square root), as a hint."
    )


def _two_dimensional(sweep: Sweep) -> str:
    gains = two_dimensional_gains(sweep)
    best = max(gains)
    if best <= 1.005:
        return "Buckets over both lengths would gain nothing over the first alone."
    num_buckets = sweep.two_dimensional[gains.index(best)].num_buckets
    return (
        f"Buckets over both lengths, as NeMo takes them, would be {best:.2f} times as fast as over the first alone, "
        f"with {num_buckets} buckets by the frontier, on one rank (sweep.json has the table)."
    )


def two_dimensional_gains(sweep: Sweep) -> list[float]:
    """Return how many times as fast as one dimension each table is; by batches where not all times are known."""
    gains = []
    for row in sweep.two_dimensional:
        if not row.one_dimensional_epoch_seconds or not row.estimated_epoch_seconds:
            return [row.one_dimensional_batches / row.batches for row in sweep.two_dimensional]
        gains.append(row.one_dimensional_epoch_seconds / row.estimated_epoch_seconds)
    return gains


def pool_sentences(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say where recommended pools can't be used, and how they vary from epoch to epoch."""
    table = best_table(sweep)
    instead = "no bucket table is recommended for frameworks that can't take it"
    if table is not None:
        instead = (
            f"frameworks that can't take it get the best table, {table.name} ({_cost(sweep, table)}, "
            f"{_compared_cost(sweep, table, row)})"
        )
    yield f"Pools need batchtune's own sampler: {instead}."
    yield (
        "Pools make batches of many shapes: if you compile a model for each shape, sweep with --multiple-of, which "
        "recommends a table of few shapes."
    )
    if row.simulated_epochs is None or row.batches_deviation is None:
        return
    batches = f"{format_number(row.batches)} in each of {row.simulated_epochs} simulated epochs"
    if row.batches_deviation:
        batches = (
            f"{format_number(row.batches)} ± {row.batches_deviation:.2g} in {row.simulated_epochs} simulated epochs "
            "(mean and standard deviation)"
        )
    time = ""
    if row.epoch_seconds_deviation is not None and row.estimated_epoch_seconds:
        time = f" The time varies by {format_share(row.epoch_seconds_deviation / row.estimated_epoch_seconds)}."
    yield f"How many batches pools give depends on the shuffle: {batches}; the sampler's len() is exact.{time}"


def randomness_sentence(sweep: Sweep, row: Row) -> str:
    """Say how often the recommended row's batch mates meet again, and how alike their lengths are."""
    text = f"{format_share(row.mates_again)} of batch mates are mates again in the next epoch"
    against = []
    for name, other in compared(sweep):
        share = mates_again(sweep, other)
        if share is not None:
            against.append(f"{format_share(share)} with {name}")
    if against:
        text += f", against {' and '.join(against)}"
    if row.length_correlation is not None:
        text += f"; the lengths of mates correlate by {format_correlation(row.length_correlation)}"
    return f"{text}."


def faster_pools_sentence(sweep: Sweep, row: Row) -> str | None:
    """Say which pools are faster than the recommended table, by how much and at what randomness; None without any."""
    timed = sweep.has_times
    cost = cost_of(row, timed=timed)
    fewest = min((baseline.batches for baseline in sweep.baselines), default=math.inf)
    if row.pool_size is not None or cost is None:
        return None
    candidates = [
        pools for pools in sweep.rows if pools.pool_size is not None and not pools.unproven and pools.batches < fewest
    ]
    faster = [pools for pools in candidates if (cost_of(pools, timed=timed) or 0.0) < cost * (1 - _FASTER)]
    if not faster:
        return None
    pools = min(faster, key=lambda other: (other.mates_again, cost_of(other, timed=timed)))
    verb = "take" if timed else "need"
    less = f"{pools.name.capitalize()} would {verb} {_cost(sweep, pools)}, {_compared_cost(sweep, pools, row)}"
    if sweep.settings.get("multiple_of") is not None:
        return f"{less}, but make batches of more shapes than --multiple-of leaves."
    randomness = math.floor(pools.randomness * _RANDOMNESS_DIGITS) / _RANDOMNESS_DIGITS
    return (
        f"{less}, but {format_share(pools.mates_again)} of their batch mates are mates again in the next epoch "
        f"instead of {format_share(row.mates_again)}; --min-randomness {randomness:g} allows that."
    )


def _cost(sweep: Sweep, row: Row) -> str:
    """Return a row's cost: `627 batches`, or `an estimated 12.3 s an epoch`."""
    seconds = row.estimated_epoch_seconds
    if sweep.has_times and seconds is not None:
        return f"an estimated {format_seconds(seconds)} an epoch"
    return f"{format_number(row.batches)} batches"


def _compared_cost(sweep: Sweep, row: Row, other: Row) -> str:
    """Return how much more or less a row costs than another: `1.5% more`."""
    cost = cost_of(row, timed=sweep.has_times) or 0.0
    other_cost = cost_of(other, timed=sweep.has_times)
    change = cost / other_cost - 1 if other_cost else 0.0
    return f"{format_percent(abs(change))} {'more' if change >= 0 else 'less'}"
