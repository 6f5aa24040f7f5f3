"""Compares strategies and bucket counts on one data set, describes its lengths, and writes `sweep.json`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs

from batchtune.buckets import (
    PACKED,
    STRATEGIES,
    Problem,
    sizes_up_to,
    two_dimensional_rows,
)
from batchtune.buckets.advice import (
    cautions,
    keeping_reason,
    keeps_current,
    kept_steps,
    learning_rate,
    recommend,
    scaled_far,
    too_few_examples,
    trade_off,
)
from batchtune.buckets.current import (
    YOURS,
    Current,
    current_batching,
    fixed_batches,
    known_current,
)
from batchtune.buckets.micro_batches import (
    Packing,
    kept,
    most_packed_steps,
    own_steps,
    refuse_to_pack,
    same_step_rows,
    sweep_packers,
    tokens_of,
    with_min_packed_steps,
)
from batchtune.epochs import RankSplit
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import expected_batches, with_equals
from batchtune.epochs.measured_costs import (
    Costs,
    batch_seconds,
    capped,
    costs_of,
    shrunk,
    shrunk_limit,
)
from batchtune.epochs.pricing import (
    Pricing,
    TimedRow,
    check_min_steps,
    fixed_baselines,
    lower_bound,
    share_for,
    share_within,
)
from batchtune.epochs.recorded import costs_of_training
from batchtune.epochs.table import BucketTable, Limits, batch_sizes_for
from batchtune.errors import ResultError, UsageError, shortened
from batchtune.lengths import Lengths, ceil_div, padded_to
from batchtune.results import (
    MOST_BUCKETS,
    PROBE_FILE,
    SWEEP_FILE,
    TRAINING_FILE,
    Drift,
    PackedRow,
    Probe,
    Proof,
    Row,
    Sizing,
    Sweep,
    SweepSettings,
    epoch_costs,
    meta_of,
    read_if_written,
    read_result,
    row_at,
    write_result,
)
from batchtune.run_folder import clear_run, holds_other_lengths
from batchtune.trust import WORST_COMPARED_ERROR
from batchtune.units import counted

NO_PACKING = Packing()
# So many sizes of pools are compared, from this many examples to all.
_POOL_SIZES = 8
_SMALLEST_POOL = 1000
# Of more examples than this, pools that take minutes to simulate are compared only if the user asks for them.
_MANY_EXAMPLES = 1 << 24
_LARGEST_OF_MANY = 1 << 17
_OF_TRAINING = (
    "costs are those of the recorded training: no padded batch is longer than the largest that it ran; run them with "
    "`batchtune verify`, or train with a smaller --max-batch-length first"
)


def run_sweep(
    lengths: Lengths,
    settings: SweepSettings,
    folder: Path,
    *,
    max_batch_length: float | None = None,
    current: Current | None = None,
    force: bool = False,
    from_training: bool = False,
    packing: Packing = NO_PACKING,
    refuted: Collection[str] = (),
    on_row: Callable[[Row | PackedRow], None] = lambda row: None,
) -> Sweep:
    """Sweep bucket counts and strategies with the run folder's probe, if it has one, and write `sweep.json`.

    `max_batch_length` goes before the probe's; `force` discards results of other data in the
    folder; `on_row` is called with each row as soon as it is known. If `from_training`, the costs
    are those of the recorded training instead of the probe's. With a token budget, of `packing` or
    of a probe of packed batches, packers are compared as well, and the budget is the
    max_batch_length of padded batches if none is given or measured. Rows with a name in `refuted`
    failed in shuffled training, so none of their sizes is proven. A proof in an earlier
    `sweep.json` stays if everything else in that file is the same.

    Raises ResultError if the folder holds results of other data, or if max_batch_length is neither given nor measured,
    and UsageError if the lengths can't be packed.
    """
    known: float | None
    if from_training:
        # Not even with `force`: the recording would be removed with the rest.
        foreign = holds_other_lengths(lengths, folder, force=False)
        costs, largest = costs_of_training(folder / TRAINING_FILE, lengths)
        known = max_batch_length or largest
    else:
        foreign, costs, known = costs_in(folder, lengths, max_batch_length, force=force)
    budget = packing.budget(costs.packed)
    if budget is not None:
        # Nothing is swept if it can't be packed.
        tokens_of(lengths, budget)
        known = known or budget.max_tokens
    else:
        refuse_to_pack(settings)
    limit = needed_limit(known, costs, folder)
    current = known_current(current, costs.script, folder, lengths)
    if current is not None and settings.accumulate is None:
        settings = structs.replace(settings, accumulate=current.settings.accumulate)
    dealing = RankSplit.of(settings, costs)
    packed_share = 1.0
    own = own_steps(current, dealing)
    packs = costs.packed is not None and costs.script is not None
    if packs and budget is not None and own is not None and settings.min_steps is None:
        if kept(settings, current, own, lengths.count) == "steps":
            most = most_packed_steps(budget, lengths, dealing)
            min_steps = min(own.steps(lengths.count), most)
            settings = structs.replace(settings, min_steps=min_steps)
    if budget is not None and settings.min_steps is not None:
        whole = budget.max_tokens
        budget = with_min_packed_steps(budget, lengths, settings.min_steps, dealing)
        packed_share = budget.max_tokens / whole
    swept = sweep(
        lengths,
        limit,
        settings,
        costs,
        current,
        on_row,
        refuted,
        packs=budget is not None,
    )
    if from_training:
        swept = structs.replace(swept, warnings=[*swept.warnings, _OF_TRAINING])
    if budget is not None:
        packers = sweep_packers(
            budget,
            lengths,
            dealing,
            structs.replace(settings, keep=swept.settings.keep),
            swept.recommended_row or swept.baselines[0],
            swept.max_batch_length,
            before=swept.current,
            own=own,
            measured=costs.packed,
            on_row=on_row,
        )
        reason = packers.reason + kept_steps(settings.min_steps, packed_share)
        swept = structs.replace(swept, packing=structs.replace(packers, reason=reason))
        if swept.gradient is not None and packers.row.keeps_examples:
            swept = structs.replace(
                swept, gradient_difference=swept.gradient.of_cut(equal_counts=False)
            )
    if foreign:
        clear_run(folder)
    swept = structs.replace(swept, proof=_earlier_proof(folder / SWEEP_FILE, swept))
    write_result(folder / SWEEP_FILE, swept)
    return swept


def _earlier_proof(path: Path, swept: Sweep) -> Proof | None:
    """Return the proof that a sweep's file holds, if the sweep in it is the same; a damaged file holds none."""
    try:
        earlier = read_result(path, Sweep)
    except ResultError:
        return None
    same = structs.replace(earlier, proof=None)
    if msgspec.json.encode(same) != msgspec.json.encode(swept):
        return None
    return earlier.proof


def costs_in(
    folder: Path,
    lengths: Lengths,
    max_batch_length: float | None,
    *,
    force: bool,
) -> tuple[bool, Costs, float | None]:
    """Return whether the folder holds results of other data, the costs of its probe, and max_batch_length.

    max_batch_length is the given one, or that of a probe of padded batches; None if unknown.
    """
    foreign = holds_other_lengths(lengths, folder, force=force)
    probe = None
    if not foreign:
        probe = read_if_written(folder / PROBE_FILE, Probe)
    if probe is None:
        return foreign, Costs(), max_batch_length
    costs = costs_of(probe)
    if max_batch_length is not None:
        return foreign, capped(costs, max_batch_length), max_batch_length
    if probe.packed is not None:
        return foreign, costs, None
    return foreign, costs, probe.max_batch_length


def needed_limit(max_batch_length: float | None, costs: Costs, folder: Path) -> float:
    """Return max_batch_length; raise ResultError if it is neither given nor measured."""
    if max_batch_length is not None:
        return max_batch_length
    why = f"{folder} holds no {PROBE_FILE}"
    remedy = (
        "Measure it with `batchtune probe-oom`, or give it with --max-batch-length."
    )
    if costs.packed is not None:
        why = f"{folder / PROBE_FILE} is about packed batches, not padded ones"
        remedy = "Give it with --max-batch-length."
    raise ResultError(f"how large a batch may be is not known: {why}", remedy)


def probed_ranks(folder: Path) -> int:
    """Return how many ranks the run folder's probe had; 1 without a probe. Raises ResultError for a damaged one."""
    probe = read_if_written(folder / PROBE_FILE, Probe)
    return 1 if probe is None else probe.device.world_size


def sweep(
    lengths: Lengths,
    max_batch_length: float,
    settings: SweepSettings,
    costs: Costs,
    current: Current | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    refuted: Collection[str] = (),
    *,
    packs: bool = False,
) -> Sweep:
    """Work out the cost of an epoch with every strategy and bucket count, and recommend one.

    Padded lengths and times of bucket tables are expectations over shuffles; those of pools, and times on several
    ranks, are means over simulated epochs, which the seed decides. `on_row` and `refuted` as for `run_sweep`. If the
    training `packs`, its steps are not cut into padded micro-batches. Raises UsageError if `max_batch_length` is not
    positive and finite.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(
            f"max_batch_length must be positive and finite, got {max_batch_length:g}"
        )
    settings = structs.replace(
        settings,
        strategies=settings.strategies or tuple(STRATEGIES),
        world_size=settings.world_size or costs.world_size,
        accumulate=settings.accumulate or costs.accumulate,
        max_batch_size=settings.max_batch_size or costs.max_batch_size,
    )
    fitting = _limits(lengths, max_batch_length, settings, costs)
    dealing = RankSplit.of(settings, costs)
    own = own_steps(current, dealing)
    keep = kept(settings, current, own, lengths.count)
    settings = structs.replace(settings, keep=keep)
    if keep == "steps" and settings.min_steps is None:
        assert current is not None
        untimed = Pricing(
            lengths=lengths,
            total=lengths.total,
            max_batch_length=max_batch_length,
            dealing=dealing,
        )
        own_row = current.settings.priced(untimed, current_batching(current, lengths))
        settings = structs.replace(settings, min_steps=own_row.row.steps)
    pricing = Pricing.of(lengths, max_batch_length, settings, costs)
    fewest = 1
    share = 1.0
    if settings.min_steps is not None:
        check_min_steps(settings.min_steps, lengths, dealing)
        fewest = dealing.fewest_batches(settings.min_steps)
        share = share_for(pricing.lengths, fitting, fewest)
    if settings.throughput_fraction is not None:
        share = share_within(settings.throughput_fraction, pricing, fitting, keep)
    limits = fitting
    if share < 1.0:
        max_batch_length = shrunk_limit(max_batch_length, share, lengths)
        costs = shrunk(costs, share)
        limits = _limits(lengths, max_batch_length, settings, costs)
        pricing = replace(pricing, max_batch_length=max_batch_length)
    made = _rows(pricing, limits, settings)
    if keep == "same" and own is not None and not packs:
        made = itertools.chain(made, same_step_rows(pricing, limits, settings, own))
    priced = []
    for priced_row in made:
        on_row(priced_row.row)
        priced.append(priced_row)
    rows = [
        structs.replace(row, unproven=row.sizes_in_use) if row.name in refuted else row
        for row in with_equals(priced)
    ]
    # Not made smaller in proportion: their sizes are those that others would take for as many steps.
    baselines = fixed_baselines(pricing, fitting, fewest)
    bound = lower_bound(pricing, limits, [*rows, *baselines], fewest)
    two_dimensional = two_dimensional_rows(pricing, limits, costs, rows)
    best_of_rows = partial(
        recommend,
        rows,
        baselines,
        min_randomness=settings.min_randomness,
        few_shapes=settings.multiple_of is not None,
        steps_kept=settings.min_steps is not None,
    )
    timed = costs.compares_times
    recommendation = best_of_rows(timed=timed)
    if timed and _is_rough(row_at(rows, recommendation.row)):
        timed = False
        recommendation = best_of_rows(timed=False)
    reason = recommendation.reason + kept_steps(settings.min_steps, share)
    if settings.throughput_fraction is not None:
        reason += (
            f"; batches are {share:.2g} times the size that fits, and reach {settings.throughput_fraction:.0%} of the "
            "best throughput"
        )
    recommended = row_at(rows, recommendation.row)
    warnings = [*cautions(lengths, limits, fitting, rows), *costs.warnings]
    if recommended is not None and not recommended.keeps_examples:
        warnings += too_few_examples(lengths, recommended)
    if keep == "same" and own is not None and own.unknown_sampler is not None:
        warnings.append(
            f"batchtune does not know how {own.unknown_sampler} orders examples: estimates assume random steps; "
            "training keeps the sampler's own"
        )
    if keep != "same" and own is not None and costs.max_batch_size == own.examples:
        warnings.append(
            f"The probe tried no batch of more than the {counted(own.examples, 'example')} of a step: larger ones may "
            f"fit. Measure them with `batchtune tune --keep {keep}`"
        )
    costs_of_rows = epoch_costs(rows, steps_kept=settings.min_steps is not None)
    swept = Sweep(
        meta=meta_of(Sweep),
        lengths=lengths.summary(),
        histogram=lengths.bins(),
        quantiles=lengths.quantiles(),
        max_batch_length=max_batch_length,
        settings=settings,
        device_name=costs.device_name,
        rows=rows,
        baselines=baselines,
        lower_bound=bound,
        recommended=recommendation.row,
        recommended_table=recommendation.portable,
        reason=reason,
        warnings=warnings,
        trade_off=trade_off(costs_of_rows, [row.known_mates_again for row in rows]),
        two_dimensional=two_dimensional,
        gradient=None if costs.script is None else costs.script.gradient,
    )
    if current is not None:
        swept = _with_current(swept, current, lengths, pricing, fitting, priced)
        if costs.unfinished and not swept.current_fits:
            swept = structs.replace(swept, current_fits=None)
        timed = timed and swept.has_times
        if recommended is not None and keeps_current(swept, recommended, timed=timed):
            reason = keeping_reason(swept, recommended, timed=timed)
            return structs.replace(
                swept, recommended=None, recommended_table=None, reason=reason
            )
    if recommended is None:
        return swept
    rate = None
    if keep == "nothing":
        rate = learning_rate(swept.current, baselines[0], recommended)
    change = None
    if swept.gradient is not None and recommended.keeps_examples:
        change = swept.gradient.of_cut(equal_counts=recommended.equal_counts)
    return structs.replace(
        swept,
        learning_rate=rate,
        warnings=[*swept.warnings, *scaled_far(rate)],
        gradient_difference=change,
        buckets=pricing.uses(recommended, lengths, costs.proven_by),
    )


def _is_rough(row: Row | None) -> bool:
    """Return whether the time of a row is not known well enough to compare it."""
    if row is None or not row.estimated_epoch_seconds:
        return False
    error = row.estimated_epoch_error_seconds or 0.0
    return 2 * error > WORST_COMPARED_ERROR * row.estimated_epoch_seconds


def _limits(
    lengths: Lengths, max_batch_length: float, settings: SweepSettings, costs: Costs
) -> Limits:
    """Return the limits on the batches that are compared."""
    limits = Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=costs.frontier,
    )
    if settings.multiple_of is None:
        return limits
    return replace(
        limits,
        frontier=costs.continued_frontier or costs.frontier,
        measured_up_to=lengths.longest,
    )


def _rows(
    pricing: Pricing, limits: Limits, settings: SweepSettings
) -> Iterator[TimedRow]:
    problems = {sizing: _problem(pricing, limits, sizing) for sizing in limits.sizings}
    for name in settings.strategies:
        # `run_sweep` compares packers.
        if name == PACKED:
            continue
        strategy = STRATEGIES[name]
        numbers = settings.num_buckets
        sizings = limits.sizings[:1]
        if strategy.depends_on_sizes:
            sizings = limits.sizings
        # A sampler of our own runs them, which takes whatever is known to fit.
        if strategy.in_pools:
            numbers = _pool_sizes(settings, pricing.lengths.count)
            sizings = limits.sizings[-1:]
        for sizing in sizings:
            tables = strategy.boundaries(problems[sizing], numbers)
            for number, boundaries in zip(numbers, tables, strict=True):
                if settings.multiple_of is not None:
                    boundaries = np.unique(padded_to(boundaries, settings.multiple_of))
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                # The table says how many examples fit, `number` how large pools are.
                if strategy.in_pools:
                    batching = Batching(table, number)
                    yield pricing.of_pools(name, sizing, batching, cheapest=True)
                else:
                    yield pricing.of_table(name, sizing, number, table)


def _problem(pricing: Pricing, limits: Limits, sizing: Sizing) -> Problem:
    histogram = pricing.lengths.histogram
    step_seconds = pricing.step_seconds
    problem = Problem(
        histogram=histogram,
        max_batch_length=limits.max_batch_length,
        batch_sizes=limits.batch_sizes(histogram.lengths, sizing),
    )
    if step_seconds is None:
        return problem

    def epoch_cost(table: BucketTable) -> float:
        expected = expected_batches(histogram, table, pricing.dealing)
        return expected.seconds(step_seconds, pricing.targets)

    return replace(
        problem,
        batch_cost=batch_seconds(step_seconds, pricing.targets),
        epoch_cost=epoch_cost,
    )


def _pool_sizes(settings: SweepSettings, count: int) -> tuple[int, ...]:
    """Return the sizes of pools to compare: those asked for, or evenly spaced in their logarithm."""
    if settings.pool_sizes:
        return tuple(sizes_up_to(count, settings.pool_sizes))
    if count <= _SMALLEST_POOL:
        return (count,)
    largest = count
    if count > _MANY_EXAMPLES:
        largest = _LARGEST_OF_MANY
    between = np.geomspace(_SMALLEST_POOL, largest, _POOL_SIZES)[:-1]
    rounded = [min(int(float(f"{size:.2g}")), largest) for size in between[::-1]]
    sizes = [largest, *rounded]
    # Two sizes that give as many pools give the same pools.
    return tuple(sorted({ceil_div(count, size): size for size in sizes}.values()))


def _with_current(
    swept: Sweep,
    current: Current,
    lengths: Lengths,
    pricing: Pricing,
    fitting: Limits,
    priced: Sequence[TimedRow],
) -> Sweep:
    """Return the sweep with the user's own settings as a row, whose batches are padded as they come.

    They may be as large as `fitting` allows.
    """
    batching = current_batching(current, lengths)
    fits = fitting.allow(*batching.largest_batches(lengths.histogram))
    as_they_come = replace(pricing, lengths=lengths)
    timed_row = current.settings.priced(as_they_come, batching)
    row = with_equals([*priced, timed_row])[-1]
    warnings = [*swept.warnings]
    if not fits:
        warnings.append(
            f"{YOURS.capitalize()} makes batches that are larger than what was found to fit (or than the "
            "max_batch_length that was given): its times are extrapolated, and it may run out of memory"
        )
    return structs.replace(
        swept,
        current=row,
        current_fits=fits,
        current_settings=current.record(
            current.settings.describe(lengths.unit), current.settings.record()
        ),
        warnings=[*warnings, *current.settings.cautions(lengths, row)],
        lower_bound=swept.lower_bound.at_most(row),
    )


# Measures drift: what a tuned table costs on other lengths than those it was tuned for.

_AGAIN = "Make sweep.json again with `batchtune sweep-buckets`."


def drift(lengths: Lengths, tuned: Sweep, costs: Costs) -> Drift:
    """Return how stale the recommended table of a sweep is on other lengths.

    The newly tuned table has the strategy, sizing and number of buckets (or pool size) of the recommended one, and the
    sweep's settings. For the sweep's own lengths staleness is 0 by definition. `costs` are those of the
    probe that the sweep was made with, `Costs()` without one.

    Raises ResultError if the sweep recommends nothing, is damaged, is of lengths in another unit, or was made with a
    probe whose costs are not given.
    """
    row = tuned.recommended_row
    unit = tuned.lengths.unit
    if row is None:
        raise ResultError(
            "the sweep recommends no table, so there is nothing to compare other lengths with",
            _AGAIN,
        )
    if lengths.unit is not None and unit is not None and lengths.unit != unit:
        raise ResultError(
            f"the manifest is in {lengths.unit}, the run in {unit}",
            "Read them with the same --length-key, or convert them with --length-scale and --unit.",
        )
    as_swept = _as_swept(costs, tuned, row)
    if row.strategy not in STRATEGIES and not row.keeps_examples:
        raise ResultError(
            f"the sweep is edited or damaged: unknown strategy {shortened(row.strategy)}",
            _AGAIN,
        )
    swept_with = msgspec.convert(tuned.settings, SweepSettings)
    own = None
    if row.keeps_examples:
        own = _own_of(row, swept_with)
        swept_with = structs.replace(swept_with, micro_batches=row.accumulate)
    settings = structs.replace(
        swept_with,
        strategies=(row.strategy if own is None else "pooled",),
        num_buckets=(min(row.num_buckets, MOST_BUCKETS),),
        pool_sizes=() if row.pool_size is None else (row.pool_size,),
    )
    changed = lengths.fingerprint != tuned.lengths.fingerprint
    pricing = Pricing.of(lengths, tuned.max_batch_length, settings, as_swept)
    if row.accumulate is not None:
        in_steps = replace(pricing.dealing, accumulate=row.accumulate)
        pricing = replace(pricing, dealing=in_steps)
    # Examples beyond its boundaries make batches of one.
    batching = Batching.of(row)
    extended = batching.table.extended_to(pricing.lengths.longest)
    now = pricing.priced(
        row.strategy, row.sizing, replace(batching, table=extended)
    ).row
    best = now
    if changed:
        retuned = sweep(lengths, tuned.max_batch_length, settings, as_swept, own)
        best = next(
            other
            for other in retuned.rows
            if other.sizing == row.sizing and other.keeps_examples == row.keeps_examples
        )
    tuned_cost, best_cost = epoch_costs([now, best], steps_kept=row.keeps_examples)
    return Drift(
        lengths=lengths.summary(),
        changed=changed,
        beyond=lengths.count_beyond(row.boundaries[-1]),
        batches=now.batches,
        retuned_batches=best.batches,
        epoch_seconds=now.estimated_epoch_seconds,
        retuned_epoch_seconds=best.estimated_epoch_seconds,
        stale=max(0.0, tuned_cost / best_cost - 1),
    )


def _own_of(row: Row, settings: SweepSettings) -> Current:
    """Return the user's own batches, of whose steps a row keeps the examples."""
    assert row.pool_size is not None
    batches = (settings.world_size or 1) * (settings.accumulate or 1)
    return fixed_batches(max(1, row.pool_size // batches), "the run")


def _as_swept(costs: Costs, tuned: Sweep, row: Row) -> Costs:
    """Return the costs without what the sweep did not know, since it may be older than the probe."""
    by_frontier = [other for other in tuned.rows if other.sizing == "frontier"]
    timed = row.estimated_epoch_seconds is not None
    if (row.sizing == "frontier" and costs.frontier is None) or (
        timed and costs.step_seconds is None
    ):
        raise ResultError(
            "the recommended table was tuned with a probe's measurements, but the run has no probe.json",
            "Put probe.json back, or probe and sweep again with `batchtune tune`.",
        )
    frontier = None
    if by_frontier:
        # The other lengths may be longer than what was measured.
        frontier = costs.continued_frontier or costs.frontier
    as_swept = replace(
        costs, joint_frontier=None, frontier=frontier, continued_frontier=frontier
    )
    if not timed:
        as_swept = replace(as_swept, step_seconds=None)
    if not by_frontier:
        return as_swept
    sizes = np.concatenate([other.batch_sizes for other in by_frontier])
    boundaries = np.concatenate([other.boundaries for other in by_frontier])
    if (sizes <= batch_sizes_for(boundaries, tuned.max_batch_length)).all():
        # The sweep may have been given a smaller --max-batch-length than the probe's.
        return capped(as_swept, tuned.max_batch_length)
    return as_swept
