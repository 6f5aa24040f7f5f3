"""The recommendation for NeMo's Lhotse data loading: a fragment for `model.train_ds`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from batchtune.epochs.cost import Frontier
from batchtune.exports.base import Export, Tuned
from batchtune.exports.fields import Loading, stream_fields, table_fields
from batchtune.exports.lhotse import covering_stream, covering_table, in_seconds, least_buffer
from batchtune.exports.text import broken, flow_list, from_template, number
from batchtune.results import Probe, Row, Sweep, argument_text, unproven_sizes
from batchtune.units import rounded_down

_OF_LOADERS = ("num_workers", "pin_memory")
# NeMo's own default of bucket_buffer_size.
_BUFFER = 10_000
# Lhotse's limit is only worth writing if the longest examples get this share of their proven batch size.
_USED = 0.5


def render(tuned: Tuned) -> str:
    """Return a YAML fragment of `model.train_ds`, with alternatives in comments.

    Source: `nemo/collections/common/data/lhotse/dataloader.py` and `sampling.py`, NeMo 3.0.0: an example belongs to the
    first bin that is not below its duration (`bisect_left`); what is longer than the last bin is dropped
    (`BucketingFilter`), as is what is longer than `max_duration`.
    """
    sweep = tuned.needed_sweep
    chosen = covering_table(tuned, "NeMo")
    # NeMo, which repeats the data, would fill sizes that a bucket can't fill, and which were not run.
    most = _most_examples(sweep, chosen.row)
    sizes = [max(1, min(size, count)) for size, count in zip(chosen.row.batch_sizes, most, strict=True)]
    return from_template(
        "nemo.yaml.j2",
        title="NeMo, model.train_ds",
        buffer_size=max(_BUFFER, least_buffer(sizes)),
        sizes=sizes,
        joint=_two_dimensional(sweep),
        **_nemo_fields(table_fields(chosen, tuned, "NeMo"), tuned),
    )


def render_tarred(tuned: Tuned) -> str:
    """Return the same for tarred data, with the nominal epoch of `trainer`.

    Source: `dataloader.py` and `nemo_adapters.py` (`LazyNeMoTarredIterator`) there, NeMo 3.0.0; Lhotse 1.33, whose
    `DynamicBucketingSampler` adds `shuffle_buffer_size` to its buffer, and waits, where it is `concurrent`, until a
    tenth of that is full, not until a batch is; and whose `IterableDatasetWrapper` goes on in the next epoch.
    """
    chosen = covering_stream(tuned, "NeMo")
    return from_template(
        "nemo-tarred.yaml.j2",
        title="NeMo, model.train_ds with tarred data",
        buffer_size=max(chosen.row.buffer_size, least_buffer(chosen.row.batch_sizes)),
        sizes=chosen.row.batch_sizes,
        joint=None,
        last_shard=max(0, tuned.needed_stream.shards.count - 1),
        **_nemo_fields(stream_fields(chosen, tuned, "NeMo"), tuned, tarred=True),
    )


def _nemo_fields(shared: dict[str, Any], tuned: Tuned, *, tarred: bool = False) -> dict[str, Any]:
    """Return what the templates need, with bins and limits in seconds and the loader's settings in YAML."""
    row = shared["row"]
    unit = shared["unit"]
    loading = Loading.of(tuned)
    probe = tuned.probe
    bins = in_seconds(row.boundaries, unit, "NeMo")
    limits = shared["limits"].scaled(in_seconds([1.0], unit, "NeMo")[0])
    filters = (("min_duration", limits.shortest), ("max_duration", limits.longest))
    loader = {name: argument_text(value) for name, value in loading.arguments.items() if name in _OF_LOADERS}
    # For tarred data NeMo keeps workers by itself.
    remarks = loading.remarks("NeMo", (*_OF_LOADERS, "persistent_workers") if tarred else _OF_LOADERS)
    return {
        **shared,
        "limits": limits,
        "filters": [name for name, limit in filters if limit is not None],
        "buffer": least_buffer(row.batch_sizes),
        "bins": bins,
        "longest": bins[-1] if limits.longest is None else min(bins[-1], limits.longest),
        "probed": probe is not None,
        "limit": None if probe is None else duration_limit(probe, row.boundaries),
        "loader": loader or ({"num_workers": shared["workers"]} if tarred else {}),
        "loading": remarks,
    }


def _most_examples(sweep: Sweep, row: Row) -> list[int]:
    """Return an upper bound of each bucket's number of examples, exact for the recommended table."""
    if row is sweep.recommended_row and len(sweep.buckets) == len(row.boundaries):
        return [use.examples for use in sweep.buckets]
    if not sweep.histogram:
        return [sweep.lengths.count] * len(row.boundaries)
    return [
        sum(bin.count for bin in sweep.histogram if bin.to > low and bin.from_ < high)
        for low, high in pairwise([0.0, *row.boundaries])
    ]


class DurationLimit(NamedTuple):
    """Lhotse's limit for a batch if memory grows faster than the length; without Q, it grows in proportion.

    C, D (in seconds) and Q (in seconds) in the formulas below.
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
        None if sizes are not proven at all lengths, no model grows with the length alone, or the longest examples would
        get less than half of what is proven.
    """
    model = probe.models.peak_bytes
    if model is None or model.target_linear or model.target_quadratic or model.cross or not model.linear > 0:
        return None
    if model.quadratic < 0 or not probe.is_proven or not probe.frontier:
        return None
    (second,) = in_seconds([1.0], probe.lengths.unit, "NeMo")
    quadratic = None
    if model.quadratic * probe.lengths.max > 1e-6 * model.linear:
        # A smaller one only makes batches smaller.
        quadratic = rounded_down(second * model.linear / model.quadratic, 3)
    ends = np.unique(np.clip(boundaries, probe.lengths.min, probe.lengths.max))
    proven = Frontier.of(probe.frontier).proven(ends)
    if proven.min() < 1:
        return None
    counted = [_counted(second * end, quadratic) for end in ends.tolist()]
    most, *others = proven.tolist()
    limits = [(size + 1) * start * (1 - 1e-9) for start, size in zip(counted, others, strict=False) if size < most]
    # Where all buckets have one size, that alone is the limit.
    limit = DurationLimit(most, rounded_down(min([*limits, (most + 1) * counted[-1]]), 3), quadratic)
    return limit if limit.fitting(second * probe.lengths.max) >= _USED * proven[-1] else None


def _counted(seconds: float, quadratic_duration: float | None) -> float:
    """Return what an example of this length counts: x(L)."""
    return seconds if quadratic_duration is None else seconds + seconds**2 / quadratic_duration


def _two_dimensional(sweep: Sweep) -> dict[str, Any] | None:
    """Describe the best table over length and target length for the template; None without any."""
    if not sweep.two_dimensional:
        return None
    timed = all(row.estimated_epoch_seconds is not None for row in sweep.two_dimensional)
    row = min(
        sweep.two_dimensional,
        key=lambda row: (row.estimated_epoch_seconds if timed else row.batches, len(row.buckets)),
    )
    durations = in_seconds([length for length, _ in row.buckets], sweep.lengths.unit, "NeMo")
    pairs = ", ".join(
        f"[{number(duration)}, {number(tokens)}]" for duration, (_, tokens) in zip(durations, row.buckets, strict=True)
    )
    settings = [
        f"num_buckets: {len(row.buckets)}",
        f"bucket_duration_bins: [{pairs}]",
        f"bucket_batch_size: {flow_list(row.batch_sizes)}",
        f"bucket_buffer_size: {max(_BUFFER, least_buffer(row.batch_sizes))}",
        # Strict, NeMo drops examples whose tokens no bin of their duration holds; else it takes the next that does.
        "bucketing_2d_strict_mode: false",
    ]
    lines = "".join(map(broken, settings)).splitlines()
    return {"row": row, "unproven": unproven_sizes(row), "lines": lines}


EXPORTS = (
    Export(name="nemo", title="NeMo", file="train_ds.yaml", render=render),
    Export(name="nemo-tarred", title="NeMo with tarred data", file="tarred_train_ds.yaml", render=render_tarred),
)
