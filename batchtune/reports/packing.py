"""The section on a sweep of a training that packs: the token budget, the packers, and whether learning is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from batchtune.reports import RunResults
from batchtune.reports.section import (
    CURRENT,
    TIMES,
    Section,
    Table,
    format_share,
    known,
    make_table,
    swept_warnings,
)
from batchtune.results import (
    SAMPLER_FILE,
    Baseline,
    PackedRow,
    PackingSweep,
    Row,
    Sweep,
)
from batchtune.units import (
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    with_full_stop,
)


def packing_section(run: RunResults, sweep: Sweep, packing: PackingSweep) -> Section:
    """Return what to report on the packers of `sweep.json`, next to the best padded batches."""
    row = packing.row
    padded = sweep.recommended_row or sweep.baselines[0]
    facts = [*_current(packing), learning(packing, padded)]
    config = (str(run.folder / SAMPLER_FILE), "the config, for PackedBatchSampler")
    export = (
        f"batchtune export{run.as_argument} --to FRAMEWORK",
        "the lines for verl, TRL, axolotl, ...",
    )
    return Section(
        title="Sweep",
        sentences=[
            f"Set max_tokens = {packing.max_tokens:,} with {row.name}: no padding, which is "
            f"{format_percent(padded.padding_ratio)} of the tokens computed with the best padded batches.",
            *facts,
            f"Why: {with_full_stop(packing.reason)}",
            f"The largest of its micro-batches has {row.largest_tokens:,} of {packing.max_tokens:,} tokens; "
            f"{row.over_cap or 'none'} exceed the budget.",
            "No micro-batch was run: whether the budget fits is not measured.",
        ],
        brief=1 + len(facts),
        tables=[_comparison(packing, padded)],
        warnings=[
            *map(with_full_stop, packing.warnings),
            *swept_warnings(run, sweep, "sweep-buckets"),
        ],
        next_steps=[config, export],
    )


def learning(packing: PackingSweep, padded: Row | Baseline) -> str:
    """Say how the optimizer steps of an epoch and their tokens change, and which losses weigh all tokens alike."""
    row = packing.row
    before = "they are not known"
    if packing.current is not None:
        before = f"{packing.current.steps:,} with {CURRENT}"
    elif isinstance(padded, Row):
        before = f"{padded.steps:,} with the best padded batches"
    return (
        f"Learning: {row.steps:,} optimizer steps an epoch, {before}; the tokens of a step vary by "
        f"±{format_percent(row.step_tokens_deviation)}. To weigh all tokens alike, take a loss that is a mean over the "
        "tokens of a step, not of each micro-batch: num_items_in_batch in Transformers, TRL and axolotl, "
        "loss_agg_mode=token-mean in verl, --calculate-per-token-loss in slime."
    )


def _current(packing: PackingSweep) -> Iterator[str]:
    """Say what the user's own packer is, and what changing saves."""
    current = packing.current
    settings = packing.current_settings or {}
    if current is None:
        return
    row = packing.row
    yield f"{CURRENT.capitalize()} is {settings.get('describe')} ({settings.get('source')})."
    if current.max_tokens != packing.max_tokens:
        yield (
            f"Its budget is {current.max_tokens:,} tokens, so its micro-batches do not compare with those of "
            f"{packing.max_tokens:,}."
        )
        return
    change = 1 - _per_token(row) / _per_token(current)
    word = "fewer" if change >= 0 else "more"
    yield (
        f"Changing to {row.name} makes {format_percent(abs(change))} {word} micro-batches of the same tokens; the "
        f"slowest rank takes {_slower(row)} longer than the mean instead of {_slower(current)}, by FLOPs."
    )


def _per_token(row: PackedRow) -> float:
    return row.batches / row.tokens


def _slower(row: PackedRow) -> str:
    return format_percent(max(0.0, row.slowest_rank - 1))


def _comparison(packing: PackingSweep, padded: Row | Baseline) -> Table:
    """Lay out the packers, the user's own, and the best padded batches."""
    reference = packing.row
    rows = [_cells(row.packer, row, reference) for row in packing.rows]
    if packing.current is not None:
        rows.append(_cells(CURRENT, packing.current, reference))
    again = None
    name = padded.name
    if isinstance(padded, Row):
        again = padded.mates_again
    rows.append(
        {
            "": f"padded: {name}",
            "batches": format_number(padded.batches),
            "padding": format_percent(padded.padding_ratio),
            "largest": None,
            "cut": None,
            "slowest rank": None,
            "mates again": known(again, format_share),
            "tokens": _relative(padded.padded_length, reference),
            "estimated epoch": known(padded.estimated_epoch_seconds, format_seconds),
        }
    )
    return make_table(
        f"Packed to {packing.max_tokens:,} tokens, and padded",
        rows,
        left=[""],
        marked=packing.recommended,
        brief=True,
    )


def _cells(name: str, row: PackedRow, reference: PackedRow) -> Mapping[str, str | None]:
    return {
        "": name,
        "batches": format_number(row.batches),
        "padding": format_percent(0.0),
        "largest": format_number(row.largest_tokens),
        "cut": format_number(row.cut_sequences),
        "slowest rank": f"+{_slower(row)}",
        "mates again": known(row.mates_again, format_share),
        "tokens": _relative(row.tokens, reference),
        "estimated epoch": known(row.estimated_epoch_seconds, format_seconds),
    }


def _relative(tokens: float, reference: PackedRow) -> str:
    return f"{format_ratio(tokens / reference.tokens)}{TIMES}"
