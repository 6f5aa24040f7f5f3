"""The recommendation for NeMo's Lhotse data loading: a fragment for `model.train_ds`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from batchtune.exports.base import Chosen, Export, Tuned
from batchtune.exports.lhotse import any_row, in_seconds, least_buffer, padded_remark
from batchtune.exports.snippets import about_data, about_row, commented
from batchtune.exports.speechbrain import broken, flow_list, number
from batchtune.results import CostModel, Probe, Sweep, TwoDimensionalRow
from batchtune.units import counted, format_number, format_seconds

# NeMo's own default of bucket_buffer_size.
_BUFFER = 10_000
# A limit that Lhotse can express must let the longest batches use this share of the memory that there is for them.
_USED = 0.9
_INDENT = "    "


def render(tuned: Tuned) -> str:
    """A YAML fragment of `model.train_ds`, with alternatives in comments.

    Source: `nemo/collections/common/data/lhotse/dataloader.py` and `sampling.py`, NeMo 3.0.0: an example belongs to the
    first bin that is not below its duration (`bisect_left`); what is longer than the last bin is dropped
    (`BucketingFilter`), as is what is longer than `max_duration`.

    Raises:
        ResultError: Nothing is recommended, or the lengths can't be turned into seconds.
    """
    sweep = tuned.sweep
    chosen = any_row(sweep, "NeMo")
    bins = in_seconds(chosen.row.boundaries, sweep.lengths.unit, "NeMo")
    sizes = chosen.row.batch_sizes
    settings = [
        "use_lhotse: true",
        "batch_size: null",
        "batch_duration: null",
        "use_bucketing: true",
        f"num_buckets: {len(bins)}",
        f"bucket_duration_bins: {flow_list(bins)}",
        f"bucket_batch_size: {flow_list(sizes)}",
        f"bucket_buffer_size: {max(_BUFFER, least_buffer(sizes))}",
        f"max_duration: {number(bins[-1])}",
        "shuffle: true",
        "drop_last: false",
    ]
    return "".join(
        [
            commented(_remarks(sweep, chosen)),
            "model:\n  train_ds:\n",
            *(broken(f"{_INDENT}{line}") for line in settings),
            *_duration_alternative(tuned),
            *_two_dimensional_alternative(sweep),
        ]
    )


def _remarks(sweep: Sweep, chosen: Chosen) -> Iterable[str]:
    yield f"NeMo, model.train_ds: {about_row(chosen.row, sweep)}"
    yield about_data(sweep)
    if sweep.lengths.unit == "ms":
        yield "Bins are in seconds, as NeMo counts them; the lengths counted milliseconds"
    if sweep.lengths.unit is None:
        yield "The unit of the lengths is not known: they are taken to be seconds, as NeMo counts them"
    yield (
        "NeMo drops what is longer than the last bin or max_duration. What changes durations (perturb_speed, "
        "concatenate_samples, pad_min_duration) moves examples to other bins"
    )
    yield (
        f"NeMo repeats the data without end unless force_finite is true. Until they end, every batch is full with "
        f"bucket_buffer_size at least {least_buffer(chosen.row.batch_sizes):,}"
    )
    yield from padded_remark(sweep, "NeMo")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationLimit:
    """Lhotse's limit for a batch whose examples cost more than in proportion to their length.

    Attributes:
        batch_duration: D, in seconds.
        quadratic_duration: Q, in seconds; None where memory grows in proportion to the length.
    """

    batch_duration: float
    quadratic_duration: float | None


def duration_limit(probe: Probe) -> DurationLimit | None:
    """The limit that the probe's memory model gives.

    The model says that a batch of B examples of length L takes constant + B·(e + a·L + q·L²) bytes. Lhotse's
    `TimeConstraint` keeps B·(L + L²/Q) ≤ D, so that without e both mean the same with

        Q = a / q        and        D = (limit - constant) / a, less the model's own relative error of the limit.

    Lhotse knows no constant for each example. With x = L + L²/Q, an example takes e + a·x ≤ (a + e / x₀)·x bytes, where
    x₀ is the x of the shortest: D with a + e / x₀ for a is safe at every length, and leaves the more memory unused the
    longer the examples are. Where that is too much, there is no limit.

    D is made smaller where a batch size that was measured not to fit would else be reached: D < (B + 1)·(L + L²/Q) at
    each length L whose largest batch size B is closed by memory. It is rounded down to 3 digits.

    Source: `lhotse.dataset.sampling.base.TimeConstraint`, Lhotse 1.33.

    Returns:
        None where there is no such model, where it depends on target lengths or much on the number of examples, or
        leaves no room.

    Raises:
        ResultError: The lengths can't be turned into seconds.
    """
    model = probe.models.peak_bytes
    if model is None or _knows_targets(model) or not model.linear > 0 or model.quadratic < 0:
        return None
    (second,) = in_seconds([1.0], probe.lengths.unit, "NeMo")
    quadratic = None
    if model.quadratic * probe.lengths.max > 1e-6 * model.linear:
        quadratic = second * model.linear / model.quadratic

    def effective(length: float) -> float:
        seconds = second * length
        return seconds if quadratic is None else seconds + seconds**2 / quadratic

    room = probe.device.limit_bytes * (1 - model.relative_error) - model.constant
    slope = model.linear / second + model.example / effective(probe.lengths.min)
    if model.per_example(probe.lengths.max) < _USED * slope * effective(probe.lengths.max):
        return None
    reached = [point for point in probe.frontier if point.closed_by != "data"]
    beyond = [(point.batch_size + 1) * effective(point.length) * (1 - 1e-9) for point in reached]
    limits = [room / slope, *beyond]
    if not 0 < min(limits) < math.inf:
        return None
    return DurationLimit(
        batch_duration=_rounded_down(min(limits)),
        quadratic_duration=None if quadratic is None else _rounded_down(quadratic),
    )


def _knows_targets(model: CostModel) -> bool:
    return any((model.target_linear, model.target_quadratic, model.cross))


def _rounded_down(value: float) -> float:
    """3 digits, never more than the value: a smaller Q, too, only makes batches smaller."""
    digits = 2 - math.floor(math.log10(value))
    step = 10.0**-digits
    return min(value, round(math.floor(value / step) * step, max(0, digits)))


def _duration_alternative(tuned: Tuned) -> Iterable[str]:
    if tuned.probe is None:
        return
    limit = duration_limit(tuned.probe)
    yield "\n"
    if limit is None:
        yield commented(
            [
                "batch_duration with quadratic_duration can't be derived here: it needs a memory model that grows with "
                "the length alone, and hardly with the number of examples"
            ],
            indent=_INDENT,
        )
        return
    yield commented(
        [
            "Or, with a limit in place of a batch size for each bucket. By the probe's memory model an example of L "
            "seconds takes memory in proportion to L + L² / quadratic_duration; batch_duration is what of it fits. "
            "Lhotse lets a batch's last example exceed it, where that is the longest, so leave some memory free. These "
            "batches have not been run, and how many an epoch has was not counted"
        ],
        indent=_INDENT,
    )
    yield f"{_INDENT}# bucket_batch_size: null\n"
    yield f"{_INDENT}# batch_duration: {number(limit.batch_duration)}\n"
    quadratic = "null" if limit.quadratic_duration is None else number(limit.quadratic_duration)
    yield f"{_INDENT}# quadratic_duration: {quadratic}\n"


def _two_dimensional_alternative(sweep: Sweep) -> Iterable[str]:
    rows = [row for row in sweep.two_dimensional if _is_sound(row)]
    if not rows:
        return
    row = min(rows, key=lambda row: (_cost(row, rows), len(row.buckets)))
    durations = in_seconds([length for length, _ in row.buckets], sweep.lengths.unit, "NeMo")
    pairs = ", ".join(
        f"[{number(duration)}, {number(tokens)}]" for duration, (_, tokens) in zip(durations, row.buckets, strict=True)
    )
    yield "\n"
    yield commented(
        [
            f"Or with bins over duration and tokens, the same token counts that the sweep had as target lengths: "
            f"{_gain(row)}. Batch sizes follow the memory model and have not been run one by one. The tokenizer must "
            f"run before sampling (pretokenize: true)"
        ],
        indent=_INDENT,
    )
    lines = [
        f"num_buckets: {len(row.buckets)}",
        f"bucket_duration_bins: [{pairs}]",
        f"bucket_batch_size: {flow_list(row.batch_sizes)}",
        f"bucket_buffer_size: {max(_BUFFER, least_buffer(row.batch_sizes))}",
        # Strict, NeMo drops examples whose tokens no bin of their duration holds; else it takes the next that does.
        "bucketing_2d_strict_mode: false",
    ]
    for line in lines:
        yield from (f"{_INDENT}# {part}\n" for part in broken(line).splitlines())


def _is_sound(row: TwoDimensionalRow) -> bool:
    lengths = [value for pair in row.buckets for value in pair]
    return (
        0 < len(row.buckets) == len(row.batch_sizes)
        and all(math.isfinite(value) and value >= 0 for value in lengths)
        and row.buckets == sorted(set(row.buckets))
        and min(row.batch_sizes) >= 1
    )


def _cost(row: TwoDimensionalRow, rows: list[TwoDimensionalRow]) -> float:
    timed = all(other.estimated_epoch_seconds is not None for other in rows)
    return row.estimated_epoch_seconds if timed and row.estimated_epoch_seconds is not None else float(row.batches)


def _gain(row: TwoDimensionalRow) -> str:
    """`13 bins, 600 batches an epoch instead of 634, 10 min instead of 11 min`."""
    gain = (
        f"{counted(len(row.buckets), 'bin')}, {format_number(row.batches)} batches an epoch, where the best table over "
        f"durations alone with as many bins needs {format_number(row.one_dimensional_batches)}"
    )
    if row.estimated_epoch_seconds is not None and row.one_dimensional_epoch_seconds is not None:
        gain += (
            f" ({format_seconds(row.estimated_epoch_seconds)} instead of "
            f"{format_seconds(row.one_dimensional_epoch_seconds)})"
        )
    return gain


EXPORT = Export(name="nemo", title="NeMo", file="train_ds.yaml", render=render)
