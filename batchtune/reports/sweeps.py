"""The section on a sweep of bucket tables and pools: what to set, what proves that it fits, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from batchtune.allocators import NATIVE
from batchtune.buckets import STRATEGIES
from batchtune.buckets.advice import keeps_steps
from batchtune.lengths import SPEECH_UNITS
from batchtune.reports import NextStep, RunResults
from batchtune.reports.packing import (
    faster_still,
    gradient_warnings,
    of_same_steps,
    packing_section,
)
from batchtune.reports.section import (
    CURRENT,
    STEPS,
    UNKNOWN,
    Cells,
    Padded,
    Section,
    Table,
    Times,
    best_of_sweep,
    brief_facts,
    comparison_table,
    cost_cells,
    current_described,
    current_name,
    fewer_steps,
    format_shape,
    format_share,
    headline,
    known,
    left_free,
    make_table,
    proof_in_training,
    sizes_table,
    step_cells,
    swept_warnings,
)
from batchtune.results import (
    SAMPLER_FILE,
    Baseline,
    LearningRate,
    LowerBound,
    Row,
    Sweep,
    cost_of,
    unproven_sizes,
)
from batchtune.results.shared import SAME_GRADIENT
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    with_full_stop,
)

_SAMPLERS = {
    "bucket": "BucketBatchSampler",
    "pooled": "PooledBatchSampler",
    "same-step": "SameStepBatchSampler or SameStepStream",
}
_FIXED = "fixed-random"
_LENGTH_GROUPED = "length-grouped"


def sweep_section(run: RunResults) -> Section:
    """Return what to report on `sweep.json`."""
    sweep = run.sweep
    assert sweep is not None
    if sweep.packed is not None:
        return packing_section(run, sweep, sweep.packed)
    row = sweep.recommended_row
    times = Times(run, sweep)
    timed = times.are_reliable
    tables = []
    if sweep.rows:
        tables.append(_rows_table(sweep, timed=timed))
    warnings = list(swept_warnings(run, sweep, "sweep-buckets"))
    unfinished = []
    if run.probe is not None and run.probe.unfinished:
        unfinished.append(
            "The probe is unfinished: the same command goes on, and may find larger batches."
        )
    if row is None:
        reason = sweep.reason or "no reason is given"
        sentences = [
            *unfinished,
            with_full_stop(f"Nothing is recommended: {reason}"),
            *current_described(sweep),
        ]
        return Section(
            title="Sweep",
            sentences=sentences,
            brief=len(sentences),
            tables=[_comparison(sweep, None, timed=timed), *tables],
            warnings=warnings,
            next_steps=list(_sweep_again(run, sweep)),
        )
    facts = unfinished + brief_facts(run, times, sweep, _proof(run, sweep, row))
    if sweep.current is not None:
        facts += fewer_steps(row.steps, sweep.current.steps)
        facts += _other_ways(sweep, row, timed=timed)
    elif sweep.min_steps is None:
        steps = counted(row.steps, "optimizer step")
        facts.append(
            f"An epoch takes {steps} (--current batch_size=N keeps your steps)."
        )
    sizes = sizes_table(
        "Batch sizes", row, sweep.lengths.unit, SAMPLER_FILE, _proofs(run, sweep)
    )
    verify = f"batchtune verify {run.manifest}{run.as_option}{run.workload_flags}"
    config = (
        str(run.folder / SAMPLER_FILE),
        f"the config, for {_SAMPLERS[row.sampler]}",
    )
    advice = headline(
        _what_to_set(sweep, row),
        row,
        alternatives(sweep),
        sweep,
        timed=timed,
        verb="Keep" if row.keeps_examples else "Set",
    )
    change = sweep.gradient_difference
    if change is not None and change <= SAME_GRADIENT:
        advice = f"{advice[:-1]}; the same training."
    return Section(
        title="Sweep",
        sentences=[
            advice,
            *facts,
            *_support(run, sweep, row),
            *times.accuracy(),
        ],
        brief=1 + len(facts),
        tables=[_comparison(sweep, row, timed=timed), *tables, sizes],
        warnings=[*_unproven(run, row), *gradient_warnings(sweep, row), *warnings],
        next_steps=list(run.steps_after_sweep(verify, config, of_stream=False)),
    )


def _what_to_set(sweep: Sweep, row: Row) -> str:
    """Return the row and its batch sizes in words: `13 buckets (optimal) with max_batch_length = 600 s`."""
    if row.accumulate is not None:
        micro_batches = counted(row.accumulate, "micro-batch")
        if sweep.world_size > 1:
            micro_batches += " on each rank"
        return f"{counted(row.pool_size or 0, 'example')} in each optimizer step, cut into {micro_batches}"
    what = row.name
    if not row.uses_pools:
        what = f"{counted(len(row.boundaries), 'bucket')} ({row.strategy})"
    sizes = f"max_batch_length = {format_length(sweep.max_batch_length, sweep.lengths.unit)}"
    # Its batches go beyond max_batch_length, which is what fits at every length.
    if row.sizing == "frontier":
        sizes = "measured batch sizes"
    return f"{what} with {sizes}"


def alternatives(sweep: Sweep) -> dict[str, Padded]:
    """Return what the recommended row is compared with: the user's config if it fits, and a fixed batch size.

    Without the user's config today's practice takes its place: SpeechBrain's for speech, length-grouped batches for all
    else.
    """
    rivals: dict[str, Padded] = {}
    is_speech = sweep.lengths.unit in SPEECH_UNITS
    today = today_row(sweep)
    grouped = _baseline(sweep, _LENGTH_GROUPED)
    fixed = _baseline(sweep, _FIXED)
    if sweep.current is not None:
        if sweep.current_fits is not False:
            rivals[CURRENT] = sweep.current
    elif is_speech and today is not None and today is not sweep.recommended_row:
        rivals[str(_practice(today))] = today
    elif not is_speech and grouped is not None:
        rivals[
            f"Transformers' group_by_length (batch size {format_number(grouped.batch_size)})"
        ] = grouped
    if fixed is not None:
        rivals[f"a fixed batch size of {format_number(fixed.batch_size)}"] = fixed
    return rivals


def today_row(sweep: Sweep) -> Row | None:
    """Return the row of today's practice with the most buckets, if one was swept."""
    rows = [row for row in sweep.rows if _practice(row) is not None]
    return max(rows, key=lambda row: row.num_buckets, default=None)


def _practice(row: Row) -> str | None:
    return (
        STRATEGIES[row.strategy].practice(row.num_buckets)
        if row.strategy in STRATEGIES
        else None
    )


def _baseline(sweep: Sweep, name: str) -> Baseline | None:
    return next(
        (baseline for baseline in sweep.baselines if baseline.name == name), None
    )


def _proof(run: RunResults, sweep: Sweep, row: Row) -> Iterator[str]:
    """Say whether the batches were run, and how much memory that leaves."""
    unproven = unproven_sizes(row)
    if unproven is not None:
        yield f"{unproven.capitalize()}: the warnings say what to do."
    elif row.unproven is not None:
        # What smaller batches leave was not measured.
        free = ""
        if sweep.min_steps is None:
            free = left_free(run)
        yield f"Every batch size was run, or is no larger than one that was{free}."
    # What runs in shuffled training is made as what was measured.
    is_made_wrong = run.probe is not None and run.probe.why_unproven is not None
    if not is_made_wrong and (sweep.proof is not None or row.unproven == 0):
        yield proof_in_training(sweep.proof)


def _support(run: RunResults, sweep: Sweep, row: Row) -> Iterator[str]:
    """Say why the row is recommended, and how speed is traded for other things."""
    if sweep.reason:
        yield f"Why: {with_full_stop(sweep.reason)}"
    if row.uses_pools and not row.keeps_examples:
        table = "no bucket table is recommended for frameworks that can't take it"
        if sweep.recommended_table is not None:
            table = f"frameworks that can't take it get the best table, {sweep.rows[sweep.recommended_table].name}"
        yield f"Pools need batchtune's own sampler: {table}."
    yield from _ranks(sweep, row)
    sizes = (
        f"Batches hold {format_number(row.smallest_batch_size)} to {format_number(row.largest_batch_size)} examples, "
        f"{format_number(row.mean_batch_size)} on average"
    )
    hint = sweep.learning_rate
    if hint is not None:
        sizes += (
            f"; a learning rate tuned for {hint.from_batch_size:.4g} ({hint.relative_to}) scales by "
            f"{_scaled(run, hint)}, as a hint"
        )
    yield f"{sizes}."
    if sweep.two_dimensional:
        best = min(
            sweep.two_dimensional,
            key=lambda row: row.batches / row.one_dimensional_batches,
        )
        gain = best.one_dimensional_batches / best.batches
        if best.estimated_epoch_seconds and best.one_dimensional_epoch_seconds:
            gain = best.one_dimensional_epoch_seconds / best.estimated_epoch_seconds
        yield (
            f"{best.num_buckets} buckets over both lengths, as NeMo takes them, would be {gain:.2f} times as fast as "
            "over the first alone, on one rank (sweep.json has the table)."
        )
    yield (
        "In the tables, step's length is how much the total length of a step varies (standard deviation), and mates "
        "again is how likely two examples of a batch share one again in the next epoch; no bucket table can beat the "
        "lower bound."
    )


def _scaled(run: RunResults, hint: LearningRate) -> str:
    """Return by how much a learning rate scales, with the script's optimizer if one of the two rules is for it."""
    linear = f"{hint.linear:.2f} (linear, for SGD)"
    square_root = f"{hint.square_root:.2f} (square root, for Adam, with beta2 to the power of {hint.linear:.2f})"
    optimizers = ""
    if run.probe is not None and run.probe.device.script is not None:
        optimizers = " ".join(run.probe.device.script.optimizers)
    if "Adam" in optimizers:
        return square_root
    return linear if "SGD" in optimizers else f"{linear} or {square_root}"


def _other_ways(sweep: Sweep, row: Row, *, timed: bool) -> Iterator[str]:
    """Say what else there is where steps keep their examples: fewer micro-batches, or other steps."""
    if not row.keeps_examples:
        return
    yield from of_same_steps(sweep, row)
    if sweep.settings.max_batch_size == row.pool_size:
        examples = counted(row.pool_size or 0, "example")
        yield f"Batches with more than a step's {examples} were not tried: --keep nothing tries them."
    if not timed:
        return
    cost = partial(cost_of, timed=True)
    others = [other for other in sweep.rows if other is not row]
    same = [other for other in others if other.keeps_examples]
    retuned = [
        other for other in others if not other.keeps_examples and not other.unproven
    ]
    for ways in (same, retuned):
        best = min(ways, key=cost, default=row)
        if cost(best) < cost(row):
            yield from faster_still(row, best, cost(row) / cost(best))


def _ranks(sweep: Sweep, row: Row) -> Iterator[str]:
    """Say how many examples are dealt twice, and how long ranks wait."""
    if sweep.world_size > 1 and row.repeated_examples:
        verb = "is" if row.repeated_examples == 1 else "are"
        yield (
            f"{counted(row.repeated_examples, 'example')} {verb} dealt twice, so that all "
            f"{format_number(sweep.world_size)} ranks have the same number of batches; the second time counts as "
            "padding."
        )
    ranks = row.ranks
    if ranks is None or not ranks.without_waiting_epoch_seconds:
        return
    alike = (
        "of the same bucket"
        if not row.uses_pools
        else "that lie next to each other in a pool"
    )
    without = ranks.without_waiting_epoch_seconds
    saved = 1 - ranks.same_bucket_epoch_seconds / ranks.independent_epoch_seconds
    verdict = f"--same-bucket saves {format_percent(saved)} of the time"
    if saved <= 0:
        verdict = "--same-bucket saves no time"
    yield (
        f"On {sweep.world_size} ranks an epoch takes {_waiting(ranks.independent_epoch_seconds, without)} if each rank "
        f"takes any batch, {_waiting(ranks.same_bucket_epoch_seconds, without)} if all take batches {alike}: {verdict}."
    )


def _waiting(seconds: float, seconds_without: float) -> str:
    return f"{format_seconds(seconds)} ({format_percent(max(0.0, seconds / seconds_without - 1))} of waiting)"


def _comparison(sweep: Sweep, row: Row | None, *, timed: bool) -> Table:
    """Compare the recommended row with its alternatives, and with the user's own config even if it can't fit.

    Where none is recommended, the one with the fewest batches stands last.
    """
    compared: dict[str, Row | Baseline | LowerBound] = {}
    marked = None
    if row is not None:
        title, marked = best_of_sweep(sweep, row, timed=timed)
        compared[title] = row
    for name, other in alternatives(sweep).items():
        compared[name.removeprefix("a ")] = other
    if sweep.current is not None and sweep.current_fits is False:
        compared[current_name(sweep)] = sweep.current
    if sweep.recommended_table is not None:
        table = sweep.rows[sweep.recommended_table]
        if table is not row:
            compared[f"best table ({counted(len(table.boundaries), 'bucket')})"] = table
    if row is None and sweep.rows:
        fewest = min(sweep.rows, key=lambda each: each.batches)
        compared[fewest.sized_name] = fewest
    compared["lower bound"] = sweep.lower_bound
    ranks = ""
    if sweep.world_size > 1:
        ranks = f" on {format_number(sweep.world_size)} ranks"
    return comparison_table(
        f"What an epoch costs{ranks}",
        compared,
        partial(_cells, sweep, timed=timed),
        timed=timed,
        steps_kept=keeps_steps(sweep),
        marked=marked,
    )


def _cells(
    sweep: Sweep, costed: Row | Baseline | LowerBound, *, timed: bool = True
) -> Cells:
    """Return what an epoch costs; examples of a fixed batch meet by chance."""
    cells = {**step_cells(costed), **cost_cells(costed, timed=timed)}
    if isinstance(costed, Baseline) and costed.name == _FIXED:
        others = min(costed.batch_size, sweep.lengths.count) - 1
        again = others / max(1, sweep.lengths.count - 1)
        cells["mates again"] = format_share(again)
    return cells


def _rows_table(sweep: Sweep, *, timed: bool) -> Table:
    """Lay out the fastest row of each strategy, and those that trade speed for randomness best."""
    best: dict[str, int] = {}
    for index, row in enumerate(sweep.rows):
        fastest = sweep.rows[best.setdefault(series_name(row), index)]
        if cost_of(row, timed=timed) < cost_of(fastest, timed=timed):
            best[series_name(row)] = index
    chosen = {
        sweep.recommended,
        sweep.recommended_table,
        *best.values(),
        *sweep.trade_off,
    }
    shown = sorted(index for index in chosen if index is not None)
    rows = []
    for index in shown:
        row = sweep.rows[index]
        rows.append(
            {
                "strategy": series_name(row),
                "buckets": str(len(row.boundaries)) if not row.uses_pools else None,
                "pool": known(row.pool_size, format_number),
                **_cells(sweep, row),
                "unproven": known(row.unproven, str),
            }
        )
    marked = None
    if sweep.recommended is not None:
        marked = shown.index(sweep.recommended)
    return make_table(
        "Bucket tables and pools compared",
        rows,
        left=["strategy"],
        # Steps tell them, if both are known.
        spare=["batches"] if any(row[STEPS] for row in rows) else [],
        marked=marked,
        file="sweep.json",
        of=len(sweep.rows),
    )


def series_name(row: Row) -> str:
    """Return what tables and charts call a row's strategy and sizing: `optimal (frontier)`."""
    return row.strategy if row.sizing == "length" else f"{row.strategy} ({row.sizing})"


def _proofs(run: RunResults, sweep: Sweep) -> list[str]:
    """Return the trial that proves each bucket's batch size, which is no larger; empty without a probe."""
    if all(use.proven_by is None for use in sweep.buckets):
        return []
    proofs = []
    for use in sweep.buckets:
        proof = "not proven" if use.examples else UNKNOWN
        if use.proven_by is not None:
            proof = f"trial {use.proven_by}"
            if run.probe is not None and use.proven_by < len(run.probe.trials):
                trial = run.probe.trials[use.proven_by]
                proof += f": {format_shape(trial.batch_size, trial.length, sweep.lengths.unit)}"
        proofs.append(proof)
    return proofs


def _unproven(run: RunResults, row: Row) -> Iterator[str]:
    """Warn of batch sizes that are not proven."""
    if (
        run.sweep is not None
        and run.sweep.proof is not None
        and not run.sweep.proof.holds
    ):
        remedies = ["Allow more time"]
        if run.sweep.proof.ooms:
            remedies.append("leave more memory free with --memory-fraction")
        if run.probe is not None and run.probe.device.allocator == NATIVE:
            remedies.append("tune with --allocator expandable")
        yield (
            f"The table is not proven: {run.sweep.proof.reason}. {', or '.join(remedies)}, and run `batchtune tune` "
            "again."
        )
        return
    unproven = unproven_sizes(row)
    if unproven is None:
        return
    remedy = (
        "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."
    )
    if run.probe is not None and run.probe.why_unproven is not None:
        yield f"{unproven.capitalize()}: {run.probe.why_unproven}."
        return
    if run.probe is not None and not run.probe.is_proven:
        remedy = "Run the interrupted `batchtune probe-oom` again: it continues. Then run `batchtune sweep-buckets`."
    yield f"{unproven.capitalize()}: no batch as large was run, alone and interleaved with the others. {remedy}"


def _sweep_again(run: RunResults, sweep: Sweep) -> Iterator[NextStep]:
    """Yield the sweeps that may recommend something; none for equal lengths, which are one bucket."""
    command = f"batchtune sweep-buckets {run.manifest}{run.as_option}"
    if sweep.lengths.min == sweep.lengths.max:
        return
    fixed = _baseline(sweep, _FIXED)
    least_padded = min(sweep.rows, key=lambda row: row.padding_ratio, default=None)
    if (
        sweep.min_steps is None
        and fixed is not None
        and least_padded is not None
        and least_padded.padding_ratio < fixed.padding_ratio
        and all(row.batches >= fixed.batches for row in sweep.rows)
    ):
        steps = fixed.batches * least_padded.steps // least_padded.batches
        if sweep.current is not None:
            steps = sweep.current.steps
        yield f"{command} --min-steps {max(1, steps)}", "compare padding, not batches"
    if all(row.uses_pools for row in sweep.rows):
        yield command, "compare bucket tables, too"
    else:
        yield f"{command} --num-buckets 2:60", "compare other numbers"
