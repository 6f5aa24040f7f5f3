"""Settings of NeMo's data loading, with Lhotse and without."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from batchtune.batching.batchers import Batching
from batchtune.batching.samplers import lhotse_boundaries
from batchtune.batching.table import BucketTable
from batchtune.configs.recipes import Block, block_at
from batchtune.configs.references import References
from batchtune.errors import ResultError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Row
from batchtune.tuning.current.base import YOURS, Current, CurrentTable, Settings, TableKind, longer_than
from batchtune.units import counted, format_length

# These change lengths or drop examples in ways that lengths alone don't tell.
_UNSEEN = (
    *("perturb_speed", "truncate_duration", "cut_into_windows_duration", "pad_min_duration", "concatenate_samples"),
    *("min_tps", "max_tps"),
)
# Lengths alone don't decide the batches of loaders with one of these.
_REFUSED = ("multi_config", "use_multimodal_sampling", "bucketing_batch_size")
# Values that bound nothing.
_UNBOUNDED = {"min_tps": -1, "max_tps": math.inf}
_BUCKETING = ("use_bucketing", "bucket_duration_bins", "bucket_batch_size", "batch_duration")
_TRAIN_SETS = (("model", "train_ds"), ("train_ds",), ("data", "train_ds"))
# LhotseDataLoadingConfig's.
_DEFAULT_BUCKETS = 30
_DEFAULT_CUTS = 10_000
# The largest batch size considered for a mean.
_LARGEST_MEAN = 100_000


class NemoSettings(TableKind):
    """The settings of `train_ds`.

    Source: `nemo/collections/common/data/lhotse/dataloader.py` and `sampling.py` of NVIDIA/NeMo (2025).
    """

    name = "nemo"
    keys = (
        *("use_lhotse", "batch_size", *_BUCKETING, "quadratic_duration", "num_buckets"),
        *("min_duration", "max_duration", "drop_last", *_UNSEEN, *_REFUSED),
    )
    signs = ("use_lhotse", *_BUCKETING)

    def claims(self, names: Collection[str], path: Sequence[str] = ()) -> bool:
        """Claim a `train_ds` with nothing but a batch_size, too, as it may have filters."""
        data_set = "batch_size" in names and bool(path) and path[-1].endswith("_ds")
        return data_set or super().claims(names, path)

    def find(self, references: References) -> Block | None:
        """Find the data set of the training."""
        blocks = (block_at(references.root, keys) for keys in _TRAIN_SETS)
        return next((block for block in blocks if block is not None), None)

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings, and refuse loaders that make no buckets."""
        for name in _REFUSED:
            if settings.values.get(name) not in (None, False):
                raise settings.wrong(
                    name, "makes batches that no bucket table can express", "Leave --current out, or give a batch_size."
                )
        settings.flag("drop_last", False)  # has no effect on a table, but must not be wrong
        lhotse = settings.flag("use_lhotse", any(settings.has(name) for name in _BUCKETING))
        if not lhotse and not settings.has("batch_size"):
            raise settings.wrong(None, "needs batch_size", "NeMo without Lhotse takes a fixed batch size.")
        # Values that bound nothing are left out.
        unbounded = {"min_duration": (-math.inf, 0.0), "max_duration": (math.inf, math.inf)}
        bounds = {
            name: settings.length(name)
            for name, (low, high) in unbounded.items()
            if settings.has(name) and not low <= settings.number(name) <= high
        }
        if bounds.get("min_duration", 0.0) > bounds.get("max_duration", math.inf):
            raise settings.wrong("min_duration", "is above max_duration")
        return {
            "use_lhotse": lhotse,
            **settings.given(settings.count, "batch_size"),
            **settings.given(settings.bucket_count, "num_buckets"),
            **bounds,
            **(_bucketing(settings) if lhotse else {}),
        }

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the buckets that NeMo makes of these lengths, as far as a table can express them.

        An example belongs to the first bin that is not below its duration (`bisect_left`). Bins with sizes drop longer
        examples than the last (`BucketingFilter`); bins without have one more bucket, without end. A batch under
        `batch_duration` closes when one more example, of the longest so far, would exceed it (Lhotse's
        `TimeConstraint`): its size is taken to be the mean of its bucket.
        """
        if lengths.unit not in ("s", None):
            raise ResultError(
                f"{current.given.source}: NeMo counts seconds, but the lengths count {lengths.unit}",
                "Convert the lengths with --length-scale and --unit s.",
            )
        settings, notes = current.settings, [*_notes(current.given)]
        kept, left_out = _kept(current, lengths)
        boundaries = _boundaries(settings, kept)
        if settings.get("use_bucketing") and settings.keys().isdisjoint(("bucket_duration_bins", "max_duration")):
            notes.append(
                "the bins are those of equal total length over all examples; Lhotse estimates them from the first "
                f"{_DEFAULT_CUTS:,} or so that it reads"
            )
        if "bucket_batch_size" in settings:
            sizes = np.asarray(settings["bucket_batch_size"], dtype=np.int64)
            limits = f"{counted(sizes.size, 'bin')} with bucket_batch_size"
        else:
            given = [f"{name}={settings[name]:g}" for name in ("batch_duration", "batch_size") if name in settings]
            limits = f"{counted(boundaries.size, 'bucket')}, {', '.join(given)}"
            if "batch_duration" in settings:
                sizes = _mean_sizes(settings, kept, boundaries)
                notes.append(
                    "under batch_duration Lhotse decides batch by batch; each is taken to hold as many examples as the "
                    "mean batch of its bucket, rounded"
                )
            else:
                sizes = np.full(boundaries.size, settings["batch_size"], dtype=np.int64)
        if lengths.unit is None:
            notes.append("the lengths have no unit and are taken to be seconds, as NeMo counts them")
        if not settings.get("use_bucketing"):
            limits = f"batch_size={settings['batch_size']}"
        if "quadratic_duration" in settings:
            notes.append(
                f"quadratic_duration of {YOURS} makes batches of long examples smaller, and the tables do not know it: "
                "batch sizes from a probe are measured at each length and need none, those from --max-batch-length "
                "alone may not fit where yours do"
            )
        cap = None  # where batch_duration is the limit on lengths
        if {"batch_duration", "batch_size"} <= settings.keys() and "bucket_batch_size" not in settings:
            cap = "batch_size", settings["batch_size"]
        return CurrentTable(
            batching=Batching(BucketTable(boundaries, sizes)),
            lengths=kept,
            describe=f"NeMo, {limits}",
            notes=tuple(notes),
            left_out=left_out,
            cap=cap,
        )

    def cautions(self, settings: Mapping[str, Any], lengths: Lengths, row: Row) -> Iterator[str]:
        """Warn of examples beyond batch_duration."""
        if "batch_duration" in settings:
            consequence = "batches that hold such an example exceed it"
            yield from longer_than(lengths, settings["batch_duration"], f"batch_duration of {YOURS},", consequence)


def _notes(settings: Settings) -> Iterator[str]:
    """Name settings with effects that lengths alone don't show, and what is assumed."""
    given = ((name, settings.values.get(name)) for name in _UNSEEN)
    unseen = [name for name, value in given if value not in (None, False, _UNBOUNDED.get(name))]
    if unseen:
        verb = "changes" if len(unseen) == 1 else "change"
        yield f"lengths or examples that {' and '.join(unseen)} {verb} are not reproduced"
    if settings.from_file and not settings.has("use_lhotse") and settings.has("use_bucketing"):
        yield "use_lhotse is not set: it is taken to be on, as bucket settings have no meaning without it"
    if settings.flag("drop_last", False):
        yield "drop_last leaves out batches that are not full; they are counted here"


def _bucketing(settings: Settings) -> dict[str, object]:
    values, used = settings.values, settings.flag("use_bucketing", not settings.from_file)
    bins, sizes = values.get("bucket_duration_bins"), "bucket_batch_size"
    if isinstance(bins, list) and any(isinstance(entry, list) for entry in bins):
        raise settings.wrong(
            "bucket_duration_bins",
            "is of two dimensions, (duration, tokens) pairs, which can't be compared with tables over lengths alone",
            "Give one-dimensional bins, or leave --current out.",
        )
    found = {
        "use_bucketing": used,
        **settings.given(settings.length, "batch_duration", "quadratic_duration"),
        **settings.given(settings.lengths, "bucket_duration_bins"),
    }
    if settings.has(sizes):
        if "bucket_duration_bins" not in found:
            raise settings.wrong(sizes, "needs bucket_duration_bins, too", "Give one bin for each size.")
        edges, counts = settings.lengths("bucket_duration_bins"), settings.counts(sizes)
        if len(counts) != len(edges):
            problem = f"has {len(counts):,} entries for {len(edges):,} bins"
            raise settings.wrong(sizes, problem, "Give one size for each bin.")
        found[sizes] = counts
    elif not settings.has("batch_duration") and not settings.has("batch_size"):
        raise settings.wrong(
            None, "needs batch_size, batch_duration, or bucket_batch_size with bucket_duration_bins", "Give one."
        )
    for name in (sizes, "batch_duration"):
        if name in found and not used:
            problem = "is used without use_bucketing: its batches form no bucket table"
            raise settings.wrong(name, problem, "Set use_bucketing: true if that is what you train with.")
    return found


def _kept(current: Current, lengths: Lengths) -> tuple[Lengths, dict[str, int]]:
    """Return the examples that NeMo keeps, and how many it leaves out for which reason."""
    settings = current.settings
    shortest, longest = settings.get("min_duration", 0.0), settings.get("max_duration", math.inf)
    ascending = lengths.values[::-1]
    first = int(np.searchsorted(ascending, shortest, side="left"))
    last = int(np.searchsorted(ascending, longest, side="right"))
    reasons = {
        f"shorter than min_duration {format_length(shortest, 's')}": first,
        f"longer than max_duration {format_length(longest, 's')}": lengths.count - last,
    }
    if "bucket_batch_size" in settings:
        end = settings["bucket_duration_bins"][-1]
        beyond = max(0, last - int(np.searchsorted(ascending, end, side="right")))
        reasons[f"longer than the last of bucket_duration_bins {format_length(end, 's')}"] = beyond
        last -= beyond
    left_out = {reason: count for reason, count in reasons.items() if count}
    if last <= first:
        raise ResultError(
            f"{current.given.source}: the settings leave out all {counted(lengths.count, 'example')}",
            "Check that the lengths are in seconds, as NeMo counts them (--length-scale).",
        )
    if not left_out:
        return lengths, {}
    cut = slice(lengths.count - last, lengths.count - first)
    targets = None if lengths.targets is None else lengths.targets[cut]
    return Lengths(lengths.values[cut], targets, lengths.unit, lengths.left_out, lengths.notes), left_out


def _boundaries(settings: Mapping[str, Any], kept: Lengths) -> FloatArray:
    """Return the buckets' upper edges, the last at least the longest length kept."""
    buckets, edges = settings.get("num_buckets", _DEFAULT_BUCKETS), np.empty(0)
    if not settings.get("use_bucketing"):
        return np.array([kept.longest])
    if "bucket_duration_bins" in settings:
        edges = np.array(settings["bucket_duration_bins"])
    elif "max_duration" in settings:
        # NeMo's own guess, `determine_bucket_duration_bins`.
        edges = np.linspace(settings.get("min_duration", 0.0), settings["max_duration"], buckets + 1)[1:-1]
    elif min(buckets, kept.count) > 1:
        edges = lhotse_boundaries(kept.values, min(buckets, kept.count))
    edges = np.unique(edges[edges > 0])
    return edges if edges.size and edges[-1] >= kept.longest else np.append(edges, kept.longest)


def _mean_sizes(settings: Mapping[str, Any], kept: Lengths, boundaries: FloatArray) -> IntArray:
    """Return the mean size, rounded, of the batches that Lhotse draws from each bucket.

    A batch closes with its n-th example once (n + 1) × the longest so far is above the limit. The longest only grows,
    and the bound on it only falls, so a batch holds more than n examples just where n of them are at most
    limit / (n + 1): with F the distribution of lengths in the bucket, its mean size is 1 + Σ F(limit / (n + 1))ⁿ.
    """
    limit, most, quadratic = settings["batch_duration"], settings.get("batch_size"), settings.get("quadratic_duration")
    distinct = kept.histogram.lengths
    costs = distinct if quadratic is None else distinct + distinct**2 / quadratic
    cumulative = np.concatenate(([0], kept.histogram.cumulative))
    ends = np.searchsorted(distinct, boundaries, side="right")
    sizes = np.ones(boundaries.size, dtype=np.int64)
    for bucket, (start, end) in enumerate(zip(np.concatenate(([0], ends[:-1])), ends, strict=True)):
        if start == end:
            continue
        count = int(cumulative[end] - cumulative[start])
        largest = int(min(count, limit / costs[start], most or _LARGEST_MEAN, _LARGEST_MEAN))
        n = np.arange(1, largest)
        upto = start + np.searchsorted(costs[start:end], limit / (n + 1), side="right")
        below = cumulative[upto] - cumulative[start]
        sizes[bucket] = round(1 + float(np.sum((below / count) ** n)))
    return sizes
