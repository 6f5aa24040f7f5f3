"""Settings of SpeechBrain's DynamicBatchSampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.batching.batchers import Batching
from batchtune.batching.epochs import ORDERINGS
from batchtune.batching.samplers import speechbrain_table
from batchtune.batching.strategies.speechbrain import capped_by_num_buckets, single_bucket
from batchtune.configs.recipes import BUCKETS, LIMITS, OLD_RULES, Block, training_block
from batchtune.configs.references import References
from batchtune.lengths import Lengths
from batchtune.results import Row
from batchtune.tuning.current.base import OPTION, YOURS, Current, CurrentTable, Settings, TableKind, longer_than
from batchtune.units import format_length

_OPTIONAL = ("bucket_boundaries", "max_batch_ex")
_GIVE = "Give {} as SpeechBrain's DynamicBatchSampler does."


class SpeechBrainSettings(TableKind):
    """The sampler's arguments; the names in old recipes (`max_batch_len`, `shuffle_ex`) become today's."""

    name = "speechbrain"
    keys = (
        *("max_batch_length", *BUCKETS, "max_batch_ex", "shuffle", "batch_ordering", "drop_last", "seed"),
        *("feats_hop_size", "max_batch_len", "shuffle_ex", *OLD_RULES),
    )
    signs = (*LIMITS, "bucket_boundaries", *OLD_RULES)

    def find(self, references: References) -> Block | None:
        """Find the training's block; None if `dynamic_batching` turns it off."""
        switch = references.root.get("dynamic_batching")
        if switch is not None and references.plain(switch, (references.root,)) is False:
            return None
        return training_block(references.root, references.name, f"{OPTION} {references.name}:")

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings as the `DynamicBatchSampler` of SpeechBrain 1.1 and the recipes' YAML files have them."""
        limit = next((name for name in LIMITS if settings.has(name)), None)
        boundaries = settings.has("bucket_boundaries") and settings.values["bucket_boundaries"] != []
        if not boundaries and not settings.has("num_buckets"):
            for old in filter(settings.has, OLD_RULES):
                raise settings.wrong(
                    old,
                    "belongs to an old sampler of SpeechBrain, whose buckets can't be reproduced",
                    "Give the settings of today's DynamicBatchSampler: max_batch_length and num_buckets.",
                )
            raise settings.wrong(None, "needs num_buckets or bucket_boundaries", _GIVE.format("them"))
        if limit is None:
            raise settings.wrong(None, "needs max_batch_length", _GIVE.format("it"))
        shuffle = next(filter(settings.has, ("shuffle_ex", "shuffle")), None)
        return {
            "max_batch_length": settings.length(limit),
            **settings.given(settings.bucket_count, "num_buckets"),
            **({"bucket_boundaries": settings.lengths("bucket_boundaries")} if boundaries else {}),
            **settings.given(settings.count, "max_batch_ex"),
            **settings.given(settings.length, "feats_hop_size"),
            **({} if shuffle is None else {"shuffle": settings.flag(shuffle)}),
            **settings.given(settings.flag, "drop_last"),
            **settings.given(lambda name: settings.choice(name, ORDERINGS), "batch_ordering"),
        }

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the buckets that SpeechBrain makes of these lengths, exactly."""
        settings, notes = current.settings, []
        limit, boundaries, most = settings["max_batch_length"], *map(settings.get, _OPTIONAL)
        hop = settings.get("feats_hop_size")
        if hop is not None and lengths.unit != "frames":
            notes.append(
                f"max_batch_length counts frames of {hop:g} s (feats_hop_size), but the lengths are not known to "
                f"be frames: read them with --length-scale 1/{hop:g} --unit frames where they are seconds"
            )
        if settings.get("shuffle") is False:
            notes.append(
                "with shuffle off, the order of the data decides padding; figures are those of shuffled examples"
            )
        if settings.get("drop_last"):
            notes.append("drop_last leaves out each bucket's last batch where it is not full; it is counted here")
        words = f"{len(boundaries)} bucket_boundaries" if boundaries else f"num_buckets={settings['num_buckets']}"
        table = speechbrain_table(
            lengths.histogram,
            limit,
            num_buckets=settings.get("num_buckets"),
            bucket_boundaries=boundaries,
            max_batch_ex=most,
        )
        capped = "" if most is None else f", max_batch_ex={most}"
        return CurrentTable(
            batching=Batching(table),
            lengths=lengths,
            sizing="length",
            describe=f"SpeechBrain, max_batch_length={format_length(limit, lengths.unit)}, {words}{capped}",
            notes=tuple(notes),
            cap=None if most is None else ("max_batch_ex", most),
        )

    def cautions(self, settings: Mapping[str, Any], lengths: Lengths, row: Row) -> Iterator[str]:
        """Warn of examples beyond max_batch_length, and of batches that num_buckets or boundaries keep small."""
        limit, boundaries, most = settings["max_batch_length"], *map(settings.get, _OPTIONAL)
        consequence = "SpeechBrain makes {each} a batch of one"
        yield from longer_than(lengths, limit, f"max_batch_length of {YOURS},", consequence)
        # Boundaries that are given stay where they are when max_batch_length is raised.
        if boundaries is None:
            yield from capped_by_num_buckets(lengths, limit, [row], YOURS)
            yield from single_bucket([row], YOURS)
        elif max(row.batch_sizes) == 1 and most != 1 and row.boundaries[0] > limit / 2:
            smallest = format_length(row.boundaries[0], lengths.unit)
            yield (
                f"{YOURS} makes batches of one example, because its smallest boundary, {smallest}, is more than half "
                f"of max_batch_length {format_length(limit, lengths.unit)}"
            )
