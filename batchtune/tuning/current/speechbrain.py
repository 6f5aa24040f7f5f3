"""Settings of SpeechBrain's DynamicBatchSampler."""

from __future__ import annotations

from batchtune.batching.samplers import speechbrain_table
from batchtune.lengths import Lengths
from batchtune.tuning.current.records import Current, CurrentTable
from batchtune.tuning.current.values import MOST_BUCKETS, Settings
from batchtune.units import format_length

# What recipes before SpeechBrain 1.0 wrote, and what it is called now.
ALIASES = {"max_batch_len": "max_batch_length", "shuffle_ex": "shuffle"}
# Bucket rules of old samplers: another sampler than the one that is reproduced.
OLD_RULES = ("left_bucket_length", "left_bucket_len", "bucket_length_multiplier", "multiplier", "num_quantiles")
KEYS = (
    "max_batch_length",
    "num_buckets",
    "bucket_boundaries",
    "max_batch_ex",
    "shuffle",
    "batch_ordering",
    "drop_last",
    "seed",
    "feats_hop_size",
)
ORDERINGS = ("random", "ascending", "descending")


def read(settings: Settings) -> Current:
    """Checks the settings; names of old recipes (`max_batch_len`, `shuffle_ex`) become today's.

    Source: `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.1, and the recipes' YAML files.

    Raises:
        BatchtuneError: One is wrong or missing, or they are of an old sampler that can't be reproduced.
    """
    limit = next((name for name in ("max_batch_length", "max_batch_len") if settings.has(name)), None)
    boundaries = settings.has("bucket_boundaries") and settings.values["bucket_boundaries"] != []
    if not boundaries and not settings.has("num_buckets"):
        old = [name for name in OLD_RULES if settings.has(name)]
        if old:
            raise settings.wrong(
                old[0],
                "belongs to an old sampler of SpeechBrain, whose buckets can't be reproduced",
                "Give the settings of today's DynamicBatchSampler: max_batch_length and num_buckets.",
            )
        raise settings.wrong(
            None, "needs num_buckets or bucket_boundaries", "Give them as SpeechBrain's DynamicBatchSampler does."
        )
    if limit is None:
        raise settings.wrong(None, "needs max_batch_length", "Give it as SpeechBrain's DynamicBatchSampler does.")
    found: dict[str, object] = {"max_batch_length": settings.length(limit)}
    if settings.has("num_buckets"):
        found["num_buckets"] = settings.count("num_buckets", MOST_BUCKETS)
    if boundaries:
        found["bucket_boundaries"] = settings.lengths("bucket_boundaries")
    if settings.has("max_batch_ex"):
        found["max_batch_ex"] = settings.count("max_batch_ex")
    if settings.has("feats_hop_size"):
        found["feats_hop_size"] = settings.length("feats_hop_size")
    return Current(
        kind="speechbrain",
        settings={**found, **_order(settings)},
        source=settings.source,
        key_path=settings.key_path,
        notes=settings.notes,
    )


def _order(settings: Settings) -> dict[str, object]:
    found: dict[str, object] = {
        today: settings.flag(name, True)
        for name, today in (("shuffle", "shuffle"), ("shuffle_ex", "shuffle"), ("drop_last", "drop_last"))
        if settings.has(name)
    }
    if settings.has("batch_ordering"):
        ordering = settings.values["batch_ordering"]
        if ordering not in ORDERINGS:
            raise settings.wrong("batch_ordering", f"must be one of {', '.join(ORDERINGS)}")
        found["batch_ordering"] = ordering
    return found


def table(current: Current, lengths: Lengths) -> CurrentTable:
    """The buckets that SpeechBrain makes of these lengths, exactly.

    Raises:
        ValueError: The boundaries coincide in floating point.
    """
    settings = current.settings
    limit = settings["max_batch_length"]
    boundaries = settings.get("bucket_boundaries")
    buckets = speechbrain_table(
        lengths.histogram,
        limit,
        num_buckets=settings.get("num_buckets"),
        bucket_boundaries=boundaries,
        max_batch_ex=settings.get("max_batch_ex"),
    )
    words = f"{len(boundaries)} bucket_boundaries" if boundaries else f"num_buckets={settings['num_buckets']}"
    capped = f", max_batch_ex={settings['max_batch_ex']}" if "max_batch_ex" in settings else ""
    notes, exact = _notes(current, lengths)
    return CurrentTable(
        table=buckets,
        lengths=lengths,
        sizing="length",
        max_batch_length=limit,
        describe=f"SpeechBrain, max_batch_length={format_length(limit, lengths.unit)}, {words}{capped}",
        exact=exact,
        notes=(*current.notes, *notes),
    )


def _notes(current: Current, lengths: Lengths) -> tuple[list[str], bool]:
    notes, exact = [], True
    settings = current.settings
    hop = settings.get("feats_hop_size")
    if hop is not None and lengths.unit != "frames":
        exact = False
        notes.append(
            f"max_batch_length counts frames of {hop:g} s (feats_hop_size), but the lengths are not known to "
            f"be frames: read them with --length-scale 1/{hop:g} --unit frames where they are seconds"
        )
    if settings.get("shuffle") is False:
        notes.append("with shuffle off, the order of the data decides padding; figures are those of shuffled examples")
    if settings.get("drop_last"):
        exact = False
        notes.append("drop_last leaves out each bucket's last batch where it is not full; it is counted here")
    return notes, exact
