"""The section on a sweep for training that packs: the token budget, the packers, and whether learning is the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from batchtune.reports import RunResults
from batchtune.reports.section import (
    CURRENT,
    Cells,
    Padded,
    Section,
    Table,
    comparison_table,
    cost_cells,
    current_name,
    known,
    left_free,
    proof_in_training,
    step_cells,
    steps_kept,
    swept_warnings,
    training_notes,
)
from batchtune.results import (
    SAMPLER_FILE,
    Baseline,
    PackedRow,
    PackingSweep,
    Row,
    StepGradient,
    Sweep,
    cost_of,
)
from batchtune.results.shared import SAME_GRADIENT
from batchtune.units import (
    counted,
    format_number,
    format_percent,
    format_ratio,
    with_full_stop,
)

# What a report says where each optimizer step keeps its examples, cut into other micro-batches.

_NOT_MEASURED = (
    "The gradient of a step is the same if the loss weighs all tokens of the step alike, as Transformers' Trainer "
    "does. If it is a mean over the examples of each micro-batch, add --equal-counts."
)
_BY_TOKENS = "by the tokens of the whole step, as Transformers' Trainer does from 4.46 on (num_items_in_batch)"
# Another accumulation is advised only if it gains more: smaller gains are within the error of the estimates.
WORTH_A_CHANGE = 1.05
# How frameworks take a loss that is a mean over the tokens of a step.
TOKEN_LOSSES = (
    "num_items_in_batch in Transformers, TRL and axolotl, loss_agg_mode=token-mean in verl, "
    "--calculate-per-token-loss in slime"
)


def of_same_steps(sweep: Sweep, row: Row | PackedRow) -> Iterator[str]:
    """Say what training needs to stay the same: its accumulation, and a gradient that does not depend on the cut."""
    own = sweep.settings.accumulate
    if own != row.accumulate:
        yield f"Train with a gradient accumulation of {row.accumulate} instead of {own}."
    gradient = sweep.gradient
    change = sweep.gradient_difference
    if isinstance(row, PackedRow) and change is None:
        yield (
            "The gradient of a step is the same if the loss is a mean over the tokens of the step, not of each "
            f"micro-batch: {TOKEN_LOSSES}."
        )
        return
    if gradient is not None and gradient.unknown is not None:
        yield f"The gradient of a step was not compared: {gradient.unknown}."
    if gradient is None or change is None:
        if isinstance(row, Row) and not row.equal_counts:
            yield _NOT_MEASURED
        return
    if change <= SAME_GRADIENT:
        yield f"A step's gradient is the same (difference {_shown(change)})."


def faster_still(
    row: Row | PackedRow, other: Row | PackedRow, times_faster: float
) -> Iterator[str]:
    """Say that another row is faster than one that keeps its steps, and what training then needs."""
    faster = f"{format_ratio(times_faster)} times faster still"
    if other.keeps_examples:
        if times_faster > WORTH_A_CHANGE:
            yield (
                f"{faster} in {other.name}: --micro-batches {other.accumulate}, with a gradient accumulation of "
                f"{other.accumulate} in training."
            )
        return
    examples = "examples"
    if isinstance(row, PackedRow):
        examples = "sequences"
    yield (
        f"{faster} with {other.name}, if you retune: {format_ratio(row.steps / other.steps)} times fewer steps, of "
        f"other {examples} (--keep nothing)."
    )


def gradient_warnings(sweep: Sweep, row: Row | PackedRow) -> Iterator[str]:
    """Warn that a step's gradient changes with its cut, and say why."""
    gradient = sweep.gradient
    change = sweep.gradient_difference
    if gradient is None or change is None or not row.keeps_examples:
        return
    if change <= SAME_GRADIENT:
        return
    if gradient.is_random:
        yield (
            f"A step's gradient differs by {_shown(change)}, and by {_shown(gradient.again)} if the same micro-batches "
            "run again: the loss or the examples are random, even with dropout off, so the effect of the cut is not "
            "known."
        )
    else:
        yield f"A step's gradient differs by {_shown(change)}: {_why(gradient, row)}."


def _why(gradient: StepGradient, row: Row | PackedRow) -> str:
    """Return why the gradient of a step depends on its cut, and what keeps it."""
    if isinstance(row, PackedRow):
        return f"your loss is a mean over the tokens of each micro-batch. Divide {_BY_TOKENS}"
    equal = gradient.equal_counts
    if equal is not None and equal <= SAME_GRADIENT:
        return (
            f"your loss is a mean over the examples of each micro-batch. --equal-counts keeps it (difference "
            f"{_shown(equal)}), or divide by the examples of the whole step"
        )
    with_equal = ""
    if equal is not None and not row.equal_counts:
        with_equal = f"; with --equal-counts it differs by {_shown(equal)}"
    if (gradient.mates or 0.0) > SAME_GRADIENT:
        why = "your loss depends on which examples share a micro-batch, as with in-batch negatives"
        if gradient.batch_norm:
            why = f"batch norm ({', '.join(gradient.batch_norm)}) takes its statistics from each micro-batch"
        return f"{why}. To train as now, keep your own batches{with_equal}"
    return f"your loss is a mean over the tokens of each micro-batch. Divide {_BY_TOKENS}{with_equal}"


def _shown(difference: float | None) -> str:
    """Return a relative difference: `12.0%`, or `3e-07` where it is below 0.1%."""
    if difference is not None and difference < 1e-3:
        return f"{difference:.0e}"
    return format_percent(difference or 0.0)


def packing_section(run: RunResults, sweep: Sweep, packing: PackingSweep) -> Section:
    """Return what to report on the packers of `sweep.json`, next to padded batches."""
    row = packing.row
    padded = sweep.recommended_row or sweep.baselines[0]
    padded_name = "the best padded batches"
    if sweep.recommended_row is None:
        padded_name = f"a fixed batch size of {sweep.baselines[0].batch_size:,}"
    before = padded_name
    if sweep.current is not None:
        before = CURRENT
    facts = [
        *_proof(run, sweep, row),
        *training_notes(run),
        *steps_kept(sweep),
        *_other_ways(sweep, packing),
    ]
    sampler = "SameStepBatchSampler"
    if not row.keeps_examples:
        sampler = "PackedBatchSampler"
        facts.append(learning(packing, before))
    next_steps = [(str(run.folder / SAMPLER_FILE), f"the config, for {sampler}")]
    if run.probe is None:
        probe = f"batchtune probe-oom {run.manifest}{run.as_option} --workload W"
        next_steps.append((probe, "measure what fits, with a workload that packs"))
    export = f"batchtune export{run.as_argument} --to FRAMEWORK"
    next_steps.append((export, "the lines for verl, TRL, axolotl, ..."))
    return Section(
        title="Sweep",
        sentences=[
            _headline(sweep, packing, padded, padded_name),
            *facts,
            f"Why: {with_full_stop(packing.reason)}",
            f"The largest of its micro-batches has {row.largest_tokens:,} of {packing.max_tokens:,} tokens; "
            f"{row.over_cap or 'none'} exceed the budget.",
            *_accuracy(run, row),
        ],
        brief=1 + len(facts),
        tables=[_comparison(sweep, packing)],
        warnings=[
            *gradient_warnings(sweep, row),
            *map(with_full_stop, packing.warnings),
            *swept_warnings(run, sweep, "sweep-buckets"),
        ],
        next_steps=next_steps,
    )


def _headline(
    sweep: Sweep, packing: PackingSweep, padded: Padded, padded_name: str
) -> str:
    """Say what to set, and what it saves."""
    row = packing.row
    if not row.keeps_examples:
        return (
            f"Set max_tokens = {packing.max_tokens:,} with {row.name}: no padding, which is "
            f"{format_percent(padded.padding_ratio)} of the tokens computed with {padded_name}."
        )
    each = " on each rank" if sweep.world_size > 1 else ""
    what = (
        f"Keep {counted(row.pool_size or 0, 'sequence')} in each optimizer step, packed into "
        f"{counted(row.accumulate or 0, 'micro-batch')}{each} of at most {packing.max_tokens:,} tokens"
    )
    own = packing.current or sweep.current
    assert own is not None
    seconds = row.estimated_epoch_seconds
    if seconds and own.estimated_epoch_seconds:
        gain = f"{format_ratio(own.estimated_epoch_seconds / seconds)} times faster than {CURRENT}"
    elif packing.current is None:
        gain = f"{format_percent(1 - row.tokens / own.padded_length)} less to compute than with {CURRENT}, which pads"
    else:
        gain = f"{row.batches:,} micro-batches an epoch, {own.batches:,} with {CURRENT}"
    change = sweep.gradient_difference
    if change is None or change <= SAME_GRADIENT:
        gain += "; the same training"
    return f"{what}: {gain}."


def _other_ways(sweep: Sweep, packing: PackingSweep) -> Iterator[str]:
    """Say what else there is where steps keep their sequences: another accumulation, the loss, or other steps."""
    row = packing.row
    if not row.keeps_examples:
        return
    yield from of_same_steps(sweep, row)
    seconds = row.estimated_epoch_seconds
    others = [other for other in packing.rows if other is not row]
    fastest = min(others, key=partial(cost_of, timed=True), default=row)
    for other in others:
        others_seconds = other.estimated_epoch_seconds
        if not seconds or not others_seconds or others_seconds >= seconds:
            continue
        if other.keeps_examples or (other is fastest and not other.unproven):
            yield from faster_still(row, other, seconds / others_seconds)


def learning(packing: PackingSweep, padded: str) -> str:
    """Say how the optimizer steps of an epoch change, and which losses weigh all tokens alike.

    `padded` is what sentences call the padded batches that are replaced.
    """
    row = packing.row
    optimizer_steps = counted(row.steps, "optimizer step")
    keeping = ""
    if padded == CURRENT and row.steps < packing.padded_steps:
        keeping = f" (--min-steps {packing.padded_steps} keeps as many)"
    return (
        f"Learning: {optimizer_steps} an epoch, {packing.padded_steps:,} with {padded}{keeping}. To weigh all "
        "tokens alike, take a loss that is a mean over the tokens of a step, not of each micro-batch: "
        f"{TOKEN_LOSSES}."
    )


def _proof(run: RunResults, sweep: Sweep, row: PackedRow) -> Iterator[str]:
    """Say whether micro-batches as large were run, and how much memory that leaves."""
    if row.unproven is None:
        yield "No micro-batch was run: whether the budget fits is not measured."
        return
    epochs = counted(row.simulated_epochs, "simulated epoch")
    simulated = f"{row.batches * row.simulated_epochs:,} micro-batches of {epochs}"
    if row.unproven:
        yield f"{row.unproven:,} of {simulated} are not proven to fit: the warnings say what to do."
    else:
        yield f"Each of {simulated} was run, or is no larger than one that was{left_free(run)}."
    yield proof_in_training(sweep.proof, "tune")


def _accuracy(run: RunResults, row: PackedRow) -> Iterator[str]:
    """Say what times and the evenness of ranks rest on."""
    if row.estimated_epoch_seconds is None:
        return
    fit = ""
    if run.probe is not None and run.probe.packed is not None:
        model = run.probe.packed.step_seconds
        if model is not None:
            fit = f", which fits its trials to within {format_percent(model.relative_error)}"
    yield f"Times, and how even ranks are, follow from the probe's time law{fit}."


def _comparison(sweep: Sweep, packing: PackingSweep) -> Table:
    """Lay out the packers, the best pools and table of padded batches, and a fixed batch size."""
    rows = [packing.row]
    rows += [row for row in packing.rows if row is not packing.row]
    compared: dict[str, PackedRow | Row | Baseline] = {}
    for row in rows:
        compared[_in_table(row)] = row
    if packing.current is not None:
        compared[f"{CURRENT}, packed"] = packing.current
    return comparison_table(
        f"Packed to {packing.max_tokens:,} tokens, and padded",
        {**compared, **_padded(sweep)},
        partial(_cells, sweep.world_size),
        timed=False,
        steps_kept=True,
        cost_name="tokens",
    )


def _padded(sweep: Sweep) -> dict[str, Padded]:
    """Return padded batches by what the table calls them: the user's, the best table and pools, and a fixed size."""
    named: dict[str, Padded] = {}
    is_packed = sweep.packed is not None and sweep.packed.current is not None
    if sweep.current is not None and not is_packed:
        named[current_name(sweep)] = sweep.current
    rows = []
    if sweep.recommended_row is not None:
        rows.append(sweep.recommended_row)
    if sweep.recommended_table is not None:
        rows.append(sweep.rows[sweep.recommended_table])
    pools = [row for row in sweep.rows if row.uses_pools]
    if pools and not any(row.uses_pools for row in rows):
        rows.append(min(pools, key=lambda row: row.batches))
    for row in rows:
        named[f"padded: {row.name}"] = row
    baseline = sweep.baselines[0]
    return {**named, f"padded: fixed size of {baseline.batch_size:,}": baseline}


def _in_table(row: PackedRow) -> str:
    """Return what the table calls a row: `packed (even)`."""
    if row.accumulate is None:
        return f"packed ({row.packer})"
    return f"packed ({counted(row.accumulate, 'micro-batch')} a step)"


def _cells(ranks: int, costed: PackedRow | Row | Baseline) -> Cells:
    """Return what an epoch costs, and what only packed batches have."""
    largest: float | None = None
    unproven = None
    cut = None
    slowest_rank = None
    if isinstance(costed, Row):
        largest = costed.largest_padded_length
    elif isinstance(costed, PackedRow):
        largest = costed.largest_tokens
        unproven = costed.unproven
        cut = costed.cut_sequences or None
        if ranks > 1:
            slowest_rank = f"+{format_percent(max(0.0, costed.slowest_rank - 1))}"
    return {
        **step_cells(costed),
        **cost_cells(costed),
        "largest": known(largest, "{:,.0f}".format),
        "unproven": known(unproven, format_number),
        "cut": known(cut, format_number),
        "slowest rank": slowest_rank,
    }
