"""batchtune's own table: boundaries and a batch size for each, as in `sampler.yaml`."""

from __future__ import annotations

import numpy as np

from batchtune.batching.table import BucketTable
from batchtune.errors import ResultError
from batchtune.lengths import UNITS, Lengths
from batchtune.tuning.current.records import Current, CurrentTable
from batchtune.tuning.current.values import Settings
from batchtune.units import counted, format_length

FORMAT = "batchtune/sampler"
VERSION = 1
KEYS = ("bucket_boundaries", "bucket_batch_sizes", "unit", "max_batch_length", "drop_last")


def read(settings: Settings) -> Current:
    """Checks boundaries and sizes.

    Raises:
        BatchtuneError: One is missing or wrong, or their numbers differ.
    """
    for name in ("bucket_boundaries", "bucket_batch_sizes"):
        if not settings.has(name):
            raise settings.wrong(name, "is missing", "A table needs boundaries and a batch size for each.")
    boundaries, sizes = settings.lengths("bucket_boundaries"), settings.counts("bucket_batch_sizes")
    if len(boundaries) != len(sizes):
        raise settings.wrong(
            "bucket_batch_sizes",
            f"has {counted(len(sizes), 'entry') if len(sizes) == 1 else f'{len(sizes):,} entries'} "
            f"for {len(boundaries):,} bucket_boundaries",
            "Give one batch size for each boundary.",
        )
    found: dict[str, object] = {"bucket_boundaries": boundaries, "bucket_batch_sizes": sizes}
    if settings.has("max_batch_length"):
        found["max_batch_length"] = settings.length("max_batch_length")
    if settings.has("unit"):
        if settings.values["unit"] not in UNITS:
            raise settings.wrong("unit", f"must be one of {', '.join(UNITS)}")
        found["unit"] = settings.values["unit"]
    return Current(
        kind="batchtune",
        settings=found,
        source=settings.source,
        key_path=settings.key_path,
        notes=settings.notes,
    )


def table(current: Current, lengths: Lengths) -> CurrentTable:
    """The table itself.

    Raises:
        ResultError: An example is longer than the last boundary, which batchtune's sampler refuses, or the units
            differ.
    """
    settings = current.settings
    unit = settings.get("unit")
    if unit is not None and lengths.unit is not None and unit != lengths.unit:
        raise ResultError(
            f"{current.source} counts {unit}, but the lengths count {lengths.unit}",
            "Convert the lengths with --length-scale and --unit.",
        )
    last = settings["bucket_boundaries"][-1]
    if lengths.longest > last:
        raise ResultError(
            f"{current.source}: the longest example ({format_length(lengths.longest, lengths.unit)}) is beyond the "
            f"last boundary {format_length(last, lengths.unit)}, so batchtune's sampler would refuse it",
            "The table is of other data: leave --current out, or longer examples with --max-length.",
        )
    return CurrentTable(
        table=BucketTable(np.array(settings["bucket_boundaries"]), np.array(settings["bucket_batch_sizes"])),
        lengths=lengths,
        sizing="frontier",
        max_batch_length=settings.get("max_batch_length"),
        describe=f"batchtune's sampler, {counted(len(settings['bucket_boundaries']), 'bucket')}",
        exact=True,
        notes=current.notes,
    )
