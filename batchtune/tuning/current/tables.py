"""Settings that are a table themselves: batchtune's own, as in `sampler.yaml`, and a fixed batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from batchtune.batching.batchers import Batching
from batchtune.batching.table import BucketTable
from batchtune.configs.recipes import Block, block_at
from batchtune.configs.references import References
from batchtune.errors import ResultError, shortened
from batchtune.lengths import UNITS, Lengths
from batchtune.results import SAMPLER_FILE, SamplerConfig, StreamConfig
from batchtune.tuning.current.base import Current, CurrentTable, Settings, TableKind
from batchtune.units import counted, format_length

_LOADERS = (
    *("train_dataloader_opts", "train_dataloader_options", "dataloader_options", "dataloader_opts"),
    "train_loader_kwargs",
)


def own_file(references: References, kind: type[SamplerConfig | StreamConfig], file: str) -> Block | None:
    """Return the whole file if it declares itself batchtune's; raise ResultError if it is another kind, or newer."""
    root, name = references.root, references.name
    declared, version = (None if node is None else node.value for node in (root.get("format"), root.get("version")))
    if not isinstance(declared, str) or not declared.startswith("batchtune/"):
        return None
    if declared != kind.FORMAT:
        raise ResultError(
            f"{name} has the format {shortened(declared)}", f"Of batchtune's files, only {file} is settings here."
        )
    if isinstance(version, int) and version > kind.VERSION:
        raise ResultError(
            f"{name} has version {version}; this batchtune knows versions up to {kind.VERSION}",
            "Install a newer batchtune.",
        )
    return Block((root,), ())


def table_for(settings: Mapping[str, Any], source: str, lengths: Lengths) -> BucketTable:
    """Return boundaries and batch sizes as a table.

    Raises ResultError if they are in another unit than the lengths or end before the longest, ValueError for no table.
    """
    unit, last = settings.get("unit"), settings["bucket_boundaries"][-1]
    if unit is not None and lengths.unit is not None and unit != lengths.unit:
        raise ResultError(
            f"{source} counts {unit}, but the lengths count {lengths.unit}",
            "Convert the lengths with --length-scale and --unit.",
        )
    if lengths.longest > last:
        raise ResultError(
            f"{source}: the longest example ({format_length(lengths.longest, lengths.unit)}) is beyond the "
            f"last boundary {format_length(last, lengths.unit)}, so batchtune's sampler would refuse it",
            "The table is of other data: leave --current out, or longer examples with --max-length.",
        )
    return BucketTable(np.array(settings["bucket_boundaries"]), np.array(settings["bucket_batch_sizes"]))


def checked_table(settings: Settings) -> dict[str, object]:
    """Check boundaries, batch sizes, and the settings that go with them."""
    for name in ("bucket_boundaries", "bucket_batch_sizes"):
        if not settings.has(name):
            raise settings.wrong(name, "is missing", "A table needs boundaries and a batch size for each.")
    boundaries, sizes = settings.lengths("bucket_boundaries"), settings.counts("bucket_batch_sizes")
    if len(boundaries) != len(sizes):
        problem = f"has {counted(len(sizes), 'number')} for {len(boundaries):,} bucket_boundaries"
        raise settings.wrong("bucket_batch_sizes", problem, "Give one batch size for each boundary.")
    return {
        "bucket_boundaries": boundaries,
        "bucket_batch_sizes": sizes,
        **settings.given(settings.length, "max_batch_length"),
        **settings.given(lambda name: settings.choice(name, UNITS), "unit"),
    }


class OwnTable(TableKind):
    """Boundaries and a batch size for each."""

    name = "batchtune"
    keys = (
        *("bucket_boundaries", "bucket_batch_sizes", "unit", "max_batch_length", "drop_last"),
        *("sampler", "pool_size", "batch_overhead"),
    )
    signs = ("bucket_batch_sizes",)

    def find(self, references: References) -> Block | None:
        """Take the file itself if it declares itself batchtune's."""
        return own_file(references, SamplerConfig, SAMPLER_FILE)

    def read(self, settings: Settings) -> dict[str, object]:
        """Check boundaries and sizes."""
        table = checked_table(settings)
        if (settings.values.get("sampler") == "pooled") != settings.has("pool_size"):
            raise settings.wrong("pool_size", "goes with sampler: pooled", "Give both, or neither.")
        pools = settings.given(settings.count, "pool_size") | settings.given(settings.amount, "batch_overhead")
        return pools | table

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the table itself; an example beyond its last boundary, which the sampler refuses, is an error."""
        settings, pool_size = current.settings, current.settings.get("pool_size")
        made = counted(len(settings["bucket_boundaries"]), "bucket")
        if pool_size is not None:
            made = f"pools of {counted(pool_size, 'example')}"
        table = table_for(settings, current.given.source, lengths)
        return CurrentTable(
            batching=Batching(table, pool_size, settings.get("batch_overhead")),
            lengths=lengths,
            describe=f"batchtune's sampler, {made}",
        )


class FixedSize(TableKind):
    """A fixed batch size."""

    name = "fixed"
    keys = ("batch_size", "sorting", "drop_last", "shuffle")
    signs = ("batch_size",)
    inherited = ("sorting",)

    def find(self, references: References) -> Block | None:
        """Find the batch size of the training's loader, or at the top."""
        root = references.root
        loaders = [block for loader in _LOADERS if (block := block_at(root, (loader,))) is not None]
        found = next((block for block in loaders if "batch_size" in block.settings), None)
        return Block((root,), ()) if found is None and root.get("batch_size") is not None else found

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the batch size."""
        if not settings.has("batch_size"):
            raise settings.wrong(None, "needs batch_size", "Give it as a whole number.")
        found: dict[str, object] = {"batch_size": settings.count("batch_size")}
        if settings.values.get("sorting") in ("ascending", "descending"):
            found["sorting"] = settings.values["sorting"]
        return found

    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return one bucket up to the longest length."""
        size, sorting = current.settings["batch_size"], current.settings.get("sorting")
        note = f"the examples are sorted (sorting: {sorting}), which pads less than the shuffled batches counted here"
        return CurrentTable(
            batching=Batching(BucketTable(np.array([lengths.longest]), np.array([size], dtype=np.int64))),
            lengths=lengths,
            describe=f"fixed batches of {size:,}",
            notes=() if sorting is None else (note,),
        )
