"""The kinds of settings that are known, and how to tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from batchtune.lengths import Lengths
from batchtune.tuning.current import buckets, fixed, nemo, speechbrain
from batchtune.tuning.current.records import Current, CurrentTable, Kind
from batchtune.tuning.current.values import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfSettings:
    """One kind.

    Attributes:
        keys: All names that it may have.
        signs: Any of these says that the settings are of this kind.
        read: Checks settings.
        table: The batches that they make of lengths.
    """

    keys: tuple[str, ...]
    signs: tuple[str, ...]
    read: Callable[[Settings], Current]
    table: Callable[[Current, Lengths], CurrentTable]


# In the order in which they are asked: `bucket_boundaries` alone is SpeechBrain's.
KINDS: dict[Kind, KindOfSettings] = {
    "batchtune": KindOfSettings(
        keys=buckets.KEYS, signs=("bucket_batch_sizes",), read=buckets.read, table=buckets.table
    ),
    "speechbrain": KindOfSettings(
        keys=(*speechbrain.KEYS, *speechbrain.ALIASES, *speechbrain.OLD_RULES),
        signs=("max_batch_length", "max_batch_len", "bucket_boundaries", *speechbrain.OLD_RULES),
        read=speechbrain.read,
        table=speechbrain.table,
    ),
    "nemo": KindOfSettings(keys=nemo.KEYS, signs=("use_lhotse", *nemo.BUCKET_KEYS), read=nemo.read, table=nemo.table),
    "fixed": KindOfSettings(keys=fixed.KEYS, signs=("batch_size",), read=fixed.read, table=fixed.table),
}

KNOWN = (
    "Known are SpeechBrain's max_batch_length with num_buckets or bucket_boundaries (and max_batch_ex), NeMo's "
    "bucket_duration_bins with bucket_batch_size or batch_duration, bucket_boundaries with bucket_batch_sizes, "
    "and batch_size."
)


def kind_of(names: Collection[str]) -> Kind | None:
    """The kind of settings with these names; None where none of them says it."""
    return next((kind for kind, known in KINDS.items() if not set(known.signs).isdisjoint(names)), None)
