"""The recommendation for NeMo's Lhotse data loading: a fragment for `model.train_ds`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from batchtune.cost import Frontier
from batchtune.exports.base import Export, Tuned
from batchtune.exports.lhotse import covering_row, in_seconds, least_buffer, unit_remark
from batchtune.exports.text import (
    LengthLimits,
    about_data,
    about_row,
    broken,
    commented,
    flow_list,
    number,
    padded_remark,
)
from batchtune.results import Probe, Row, Sweep, unproven_sizes
from batchtune.units import counted, format_number, format_seconds

# NeMo's own default of bucket_buffer_size.
_BUFFER = 10_000
# A limit that Lhotse can express must give the longest examples this share of their proven batch size.
_USED = 0.5
_INDENT = "    "


def render(tuned: Tuned) -> str:
    """Return a YAML fragment of `model.train_ds`, with alternatives in comments.

    Source: `nemo/collections/common/data/lhotse/dataloader.py` and `sampling.py`, NeMo 3.0.0: an example belongs to the
    first bin that is not below its duration (`bisect_left`); what is longer than the last bin is dropped
    (`BucketingFilter`), as is what is longer than `max_duration`.

    Raises:
        ResultError: Nothing is recommended, or the lengths can't be turned into seconds.
    """
    sweep = tuned.sweep
    row = covering_row(sweep)
    bins = in_seconds(row.boundaries, sweep.lengths.unit, "NeMo")
    limits = LengthLimits.of(sweep).scaled(in_seconds([1.0], sweep.lengths.unit, "NeMo")[0])
    longest = bins[-1] if limits.longest is None else min(bins[-1], limits.longest)
    sizes = row.batch_sizes
    # NeMo, which repeats the data, would fill sizes that a bucket can't fill, and which were not run.
    if row is sweep.recommended_row and len(sweep.buckets) == len(sizes):
        sizes = [max(1, min(size, use.examples)) for size, use in zip(sizes, sweep.buckets, strict=True)]
    settings = [
        "use_lhotse: true",
        "batch_size: null",
        "batch_duration: null",
        "use_bucketing: true",
        f"num_buckets: {len(bins)}",
        f"bucket_duration_bins: {flow_list(bins)}",
        f"bucket_batch_size: {flow_list(sizes)}",
        f"bucket_buffer_size: {max(_BUFFER, least_buffer(sizes))}",
        *([] if limits.shortest is None else [f"min_duration: {number(limits.shortest)}"]),
        f"max_duration: {number(longest)}",
        "shuffle: true",
        "drop_last: false",
    ]
    return "".join(
        [
            commented(_remarks(sweep, row, limits)),
            "model:\n  train_ds:\n",
            *(broken(f"{_INDENT}{line}") for line in settings),
            *_duration_alternative(tuned, row, bins),
            *_two_dimensional_alternative(sweep),
        ]
    )


def _remarks(sweep: Sweep, row: Row, limits: LengthLimits) -> Iterable[str]:
    yield f"NeMo, model.train_ds: {about_row(row, sweep)}"
    yield about_data(sweep)
    yield from limits.left_out
    if limits:
        names = [("min_duration", limits.shortest), ("max_duration", limits.longest)]
        set_here = [name for name, limit in names if limit is not None]
        yield f"{' and '.join(set_here)} {'leaves' if len(set_here) == 1 else 'leave'} them out here, too"
    yield from unit_remark(sweep, "Bins", "NeMo")
    yield (
        "NeMo drops what is longer than the last bin or max_duration. What changes durations (perturb_speed, "
        "concatenate_samples, pad_min_duration) moves examples to other bins"
    )
    yield (
        "batch_duration, quadratic_duration and batch_size do nothing beside bucket_batch_size. To keep a batch_size "
        "of your own as the most examples in a batch, sweep with it: --max-batch-size"
    )
    yield (
        f"NeMo repeats the data without end unless force_finite is true. Until they end, every batch is full with "
        f"bucket_buffer_size at least {least_buffer(row.batch_sizes):,}"
    )
    yield from padded_remark(sweep, "NeMo")


class DurationLimit(NamedTuple):
    """Lhotse's limit for a batch whose examples cost more than in proportion to their length, in seconds.

    They are called C, D and Q below; without Q memory grows in proportion to the length.
    """

    batch_size: int
    batch_duration: float
    quadratic_duration: float | None

    def fitting(self, seconds: float) -> int:
        """Return how many examples of this length a batch gets."""
        return min(self.batch_size, max(1, int(self.batch_duration / _counted(seconds, self.quadratic_duration))))


def duration_limit(probe: Probe, boundaries: Sequence[float]) -> DurationLimit | None:
    """Return the limit with which every batch is proven.

    Lhotse's `TimeConstraint` ends a batch with the example after which one more as long as the longest would exceed
    D: B examples are followed by another only while (B + 1)·x(s) ≤ D, s the longest of them, with x(L) = L + L²/Q. The
    last may be longer than s, up to its bucket's boundary. So a bucket of lengths in (l, u] has batches of at most
    D / x(l) examples, which may be as long as u; they are proven where

        D < (P(u) + 1)·x(l)        or        C ≤ P(u),

    P(u) the batch size that is proven at u, and C the most examples that a batch may have. C is P of the first bucket,
    whose shortest examples would else decide; D is the largest that all buckets allow, rounded down to 3 digits.

    Q only shares the memory out: a batch of B examples of length L takes constant + B·(e + a·L + q·L²) bytes by the
    probe's model, so that Q = a / q gives batches of all lengths the same memory, but for e.

    Source: `lhotse.dataset.sampling.base.TimeConstraint` and `.dynamic.DurationBatcher`, Lhotse 1.33; NeMo 3.0.0 gives
    it `batch_size` as `max_cuts`.

    Returns:
        None where sizes are not proven at all lengths, as by an older batchtune, without a model that grows with the
        length, where it depends on target lengths, or where the longest examples would get less than half of what is
        proven.

    Raises:
        ResultError: The lengths can't be turned into seconds.
    """
    model = probe.models.peak_bytes
    if model is None or model.target_linear or model.target_quadratic or model.cross or not model.linear > 0:
        return None
    if model.quadratic < 0 or not probe.is_proven or not probe.frontier:
        return None
    (second,) = in_seconds([1.0], probe.lengths.unit, "NeMo")
    quadratic = None
    if model.quadratic * probe.lengths.max > 1e-6 * model.linear:
        quadratic = _rounded_down(second * model.linear / model.quadratic)
    ends = np.unique(np.clip(boundaries, probe.lengths.min, probe.lengths.max))
    proven = Frontier.of(probe.frontier).proven(ends)
    if proven.min() < 1:
        return None
    counted = [_counted(second * end, quadratic) for end in ends.tolist()]
    most, *others = proven.tolist()
    limits = [(size + 1) * start * (1 - 1e-9) for start, size in zip(counted, others, strict=False) if size < most]
    # Where all buckets have one size, that alone is the limit.
    limit = DurationLimit(most, _rounded_down(min([*limits, (most + 1) * counted[-1]])), quadratic)
    return limit if limit.fitting(second * probe.lengths.max) >= _USED * proven[-1] else None


def _counted(seconds: float, quadratic_duration: float | None) -> float:
    """Return what an example of this length counts: x(L)."""
    return seconds if quadratic_duration is None else seconds + seconds**2 / quadratic_duration


def _rounded_down(value: float) -> float:
    """3 digits, never more than the value: a smaller Q, too, only makes batches smaller."""
    digits = 2 - math.floor(math.log10(value))
    step = 10.0**-digits
    return min(value, round(math.floor(value / step) * step, max(0, digits)))


def _duration_alternative(tuned: Tuned, row: Row, bins: Sequence[float]) -> Iterable[str]:
    if tuned.probe is None:
        return
    limit = duration_limit(tuned.probe, row.boundaries)
    yield "\n"
    if limit is None:
        yield commented([_NO_LIMIT], indent=_INDENT)
        return
    longest = f"{limit.fitting(bins[-1]):,}. How many batches an epoch has was not counted"
    yield commented([f"{_LIMIT} {longest}"], indent=_INDENT)
    settings = {
        "bucket_batch_size": "null",
        "batch_size": f"{limit.batch_size}",
        "batch_duration": number(limit.batch_duration),
        "quadratic_duration": "null" if limit.quadratic_duration is None else number(limit.quadratic_duration),
    }
    yield from (f"{_INDENT}# {name}: {value}\n" for name, value in settings.items())


_NO_LIMIT = (
    "batch_duration with quadratic_duration can't be derived here: it needs batch sizes that are proven at all "
    "lengths, and a memory model that grows with the length alone, and hardly with the number of examples"
)
_LIMIT = (
    "Or, with a limit in place of a batch size for each bucket. By the probe's memory model an example of L seconds "
    "takes memory in proportion to L + L² / quadratic_duration. Lhotse lets a batch's last example exceed "
    "batch_duration, where that is the longest: with these bins and this batch_size every batch is still no larger "
    "than one that was run. That costs memory: the longest examples come in batches of"
)


def _two_dimensional_alternative(sweep: Sweep) -> Iterable[str]:
    if not sweep.two_dimensional:
        return
    timed = all(row.estimated_epoch_seconds is not None for row in sweep.two_dimensional)
    row = min(
        sweep.two_dimensional,
        key=lambda row: (row.estimated_epoch_seconds if timed else row.batches, len(row.buckets)),
    )
    seconds, others, instead = row.estimated_epoch_seconds, row.one_dimensional_epoch_seconds, ""
    if seconds is not None and others is not None:
        instead = f" ({format_seconds(seconds)} instead of {format_seconds(others)})"
    sizes = unproven_sizes(row)
    proof = "Whether these batches fit was not measured" if sizes is None else f"Of these, {sizes}"
    if row.unproven == 0:
        proof = "Every batch size was run, or is no larger than one that was"
    durations = in_seconds([length for length, _ in row.buckets], sweep.lengths.unit, "NeMo")
    pairs = ", ".join(
        f"[{number(duration)}, {number(tokens)}]" for duration, (_, tokens) in zip(durations, row.buckets, strict=True)
    )
    yield "\n"
    yield commented(
        [
            f"Or with bins over duration and tokens, the same token counts that the sweep had as target lengths: "
            f"{counted(len(row.buckets), 'bin')}, {format_number(row.batches)} batches an epoch, where the best table "
            "over durations alone with as many bins needs "
            f"{format_number(row.one_dimensional_batches)}{instead}. {proof}. The tokenizer must run before sampling "
            "(pretokenize: true)"
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


EXPORTS = (Export(name="nemo", title="NeMo", file="train_ds.yaml", render=render),)
