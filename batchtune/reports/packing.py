"""The section on a sweep of a training that packs: the token budget, the packers, and whether learning is the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from batchtune.reports import RunResults
from batchtune.reports.same_step import (
    TOKEN_LOSSES,
    faster_still,
    gradient_warnings,
    of_same_steps,
)
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
    Sweep,
)
from batchtune.results.devices import SAME_GRADIENT
from batchtune.units import (
    counted,
    format_number,
    format_percent,
    format_ratio,
    with_full_stop,
)


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
    fastest = min(others, key=_seconds_of, default=row)
    for other in others:
        others_seconds = other.estimated_epoch_seconds
        if not seconds or not others_seconds or others_seconds >= seconds:
            continue
        if other.keeps_examples or (other is fastest and not other.unproven):
            yield from faster_still(row, other, seconds / others_seconds)


def _seconds_of(row: PackedRow) -> float:
    return row.estimated_epoch_seconds or 0.0


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
        return
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
