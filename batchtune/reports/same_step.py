"""What a report says where each optimizer step keeps its examples, cut into other micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.results import PackedRow, Row, StepGradient, Sweep
from batchtune.results.devices import SAME_GRADIENT
from batchtune.units import format_percent, format_ratio

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
