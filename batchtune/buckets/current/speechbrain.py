"""Settings of SpeechBrain's DynamicBatchSampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.buckets.current.base import OPTION, YOURS, Current, CurrentTable, Settings, TableKind, longer_than
from batchtune.buckets.strategies.speechbrain import capped_by_num_buckets, single_bucket
from batchtune.configs import BUCKETS, LIMITS, OLD_RULES, Block, Recipe, entries
from batchtune.epochs.batch_order import ORDERINGS
from batchtune.epochs.batchers import Batching
from batchtune.epochs.samplers import speechbrain_table
from batchtune.lengths import Lengths
from batchtune.results import Row
from batchtune.units import format_length

_GIVE = "Give {} as SpeechBrain's DynamicBatchSampler does."


class SpeechBrainSettings(TableKind):
    """The sampler's arguments; the names in old recipes (`max_batch_len`, `shuffle_ex`) become today's."""

    name = "speechbrain"
    keys = (
        "max_batch_length",
        *BUCKETS,
        "max_batch_ex",
        "shuffle",
        "batch_ordering",
        "drop_last",
        "seed",
        "feats_hop_size",
        "max_batch_len",
        "shuffle_ex",
        *OLD_RULES,
    )
    signs = (*LIMITS, "bucket_boundaries", *OLD_RULES)

    def find(self, recipe: Recipe) -> Block | None:
        """Return the training's block; None if `dynamic_batching` turns it off."""
        switch = entries(recipe.root).get("dynamic_batching")
        if switch is not None and recipe.value(switch) is False:
            return None
        return recipe.training_block(f"{OPTION} {recipe.name}:")

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings as the `DynamicBatchSampler` of SpeechBrain 1.1 and the recipes' YAML files have them."""
        has_boundaries = settings.has("bucket_boundaries") and settings.values["bucket_boundaries"] != []
        if not has_boundaries and not settings.has("num_buckets"):
            for rule in filter(settings.has, OLD_RULES):
                raise settings.wrong(
                    rule,
                    "belongs to an old sampler of SpeechBrain, whose buckets can't be reproduced",
                    "Give the settings of today's DynamicBatchSampler: max_batch_length and num_buckets.",
                )
            raise settings.wrong(None, "needs num_buckets or bucket_boundaries", _GIVE.format("them"))
        limits = list(filter(settings.has, LIMITS))
        if not limits:
            raise settings.wrong(None, "needs max_batch_length", _GIVE.format("it"))
        checked: dict[str, object] = {"max_batch_length": settings.length(limits[0])}
        checked |= settings.given(settings.bucket_count, "num_buckets")
        if has_boundaries:
            checked["bucket_boundaries"] = settings.lengths("bucket_boundaries")
        checked |= settings.given(settings.count, "max_batch_ex")
        checked |= settings.given(settings.length, "feats_hop_size")
        for name in ("shuffle", "shuffle_ex"):
            if settings.has(name):
                checked["shuffle"] = settings.flag(name)
        checked |= settings.given(settings.flag, "drop_last")
        if settings.has("batch_ordering"):
            checked["batch_ordering"] = settings.choice("batch_ordering", ORDERINGS)
        return checked

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the buckets that SpeechBrain makes of these lengths, exactly."""
        settings = current.settings
        limit = settings["max_batch_length"]
        boundaries = settings.get("bucket_boundaries")
        max_batch_ex = settings.get("max_batch_ex")
        words = ["SpeechBrain", f"max_batch_length={format_length(limit, lengths.unit)}"]
        if boundaries:
            words.append(f"{len(boundaries)} bucket_boundaries")
        else:
            words.append(f"num_buckets={settings['num_buckets']}")
        cap = None
        if max_batch_ex is not None:
            words.append(f"max_batch_ex={max_batch_ex}")
            cap = ("max_batch_ex", max_batch_ex)
        table = speechbrain_table(
            lengths.histogram,
            limit,
            num_buckets=settings.get("num_buckets"),
            bucket_boundaries=boundaries,
            max_batch_ex=max_batch_ex,
        )
        return CurrentTable(
            batching=Batching(table),
            sizing="length",
            describe=", ".join(words),
            notes=tuple(_notes(settings, lengths)),
            cap=cap,
        )

    def cautions(self, settings: Mapping[str, Any], lengths: Lengths, row: Row) -> Iterator[str]:
        """Warn of examples beyond max_batch_length, and of batches that num_buckets or boundaries keep small."""
        limit = settings["max_batch_length"]
        consequence = "SpeechBrain makes {each} a batch of one"
        yield from longer_than(lengths, limit, f"max_batch_length of {YOURS},", consequence)
        # Boundaries that are given stay where they are when max_batch_length is raised.
        if settings.get("bucket_boundaries") is None:
            yield from capped_by_num_buckets(lengths, limit, [row], YOURS)
            yield from single_bucket([row], YOURS)
        elif max(row.batch_sizes) == 1 and settings.get("max_batch_ex") != 1 and row.boundaries[0] > limit / 2:
            smallest = format_length(row.boundaries[0], lengths.unit)
            yield (
                f"{YOURS} makes batches of one example, because its smallest boundary, {smallest}, is more than half "
                f"of max_batch_length {format_length(limit, lengths.unit)}"
            )


def _notes(settings: Mapping[str, Any], lengths: Lengths) -> Iterator[str]:
    """Yield what lengths alone don't show."""
    hop = settings.get("feats_hop_size")
    if hop is not None and lengths.unit != "frames":
        yield (
            f"max_batch_length counts frames of {hop:g} s (feats_hop_size), but the lengths are not known to "
            f"be frames: read them with --length-scale 1/{hop:g} --unit frames where they are seconds"
        )
    if settings.get("shuffle") is False:
        yield "with shuffle off, the order of the data decides padding; figures are those of shuffled examples"
    if settings.get("drop_last"):
        yield "drop_last leaves out each bucket's last batch where it is not full; it is counted here"
