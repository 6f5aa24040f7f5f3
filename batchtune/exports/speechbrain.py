"""The recommendation for SpeechBrain's DynamicBatchSampler: the block of a recipe's YAML."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchtune.batching.samplers import speechbrain_boundaries
from batchtune.batching.table import batch_sizes_for
from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Export, Patched, Tuned, choose_table, recommended_row
from batchtune.exports.loader import Loading
from batchtune.exports.text import (
    LengthLimits,
    Written,
    about_data,
    about_row,
    commented,
    from_template,
    number,
    padded_remark,
)
from batchtune.results import Row, Sweep
from batchtune.units import counted, format_number


def derived_sizes(sweep: Sweep, boundaries: Sequence[float], cap: int | None) -> list[int]:
    """Return SpeechBrain's batch sizes: min(cap, max(1, int(max_batch_length / boundary)))."""
    sizes: list[int] = batch_sizes_for(np.asarray(boundaries), sweep.max_batch_length, cap).tolist()
    return sizes


def table_row(sweep: Sweep) -> Chosen:
    """Choose the best row that `bucket_boundaries` and `max_batch_length` express; raise ResultError without one."""
    cap = sweep.settings.get("max_batch_size")
    return choose_table(
        sweep,
        "SpeechBrain",
        lambda row: row.batch_sizes == derived_sizes(sweep, row.boundaries, cap),
        "SpeechBrain derives each batch size from max_batch_length and the bucket's boundary",
    )


def plain_row(sweep: Sweep) -> Chosen:
    """Choose the best row that `num_buckets` and `max_batch_length` express; raise ResultError without one."""
    cap = sweep.settings.get("max_batch_size")

    def expresses(row: Row) -> bool:
        own = speechbrain_boundaries(row.num_buckets, sweep.max_batch_length).tolist()
        return own == row.boundaries and row.batch_sizes == derived_sizes(sweep, own, cap)

    return choose_table(
        sweep,
        "SpeechBrain with num_buckets",
        expresses,
        "num_buckets makes SpeechBrain choose the boundaries, which only rows of the strategy speechbrain have",
    )


def needed_cap(sweep: Sweep, row: Row) -> int | None:
    """Return the `max_batch_ex` that a row needs for its batch sizes; None if it needs none."""
    needs = derived_sizes(sweep, row.boundaries, None) != row.batch_sizes
    return sweep.settings.get("max_batch_size") if needs else None


def kept_cap(cap: int, row: Row, sweep: Sweep, run: str) -> tuple[int, list[str]]:
    """Keep a user's `max_batch_ex`, or lower it to what the table was swept with.

    Args:
        cap: The user's, at least 1.
        row: The table that is written; its batch sizes are SpeechBrain's.
        sweep: Its sweep.
        run: The run folder, for the command that sweeps with the cap.

    Returns:
        The limit to write, and full sentences on what it changes.
    """
    sizes, needed = derived_sizes(sweep, row.boundaries, cap), needed_cap(sweep, row)
    if sizes == row.batch_sizes:
        return cap, []
    if needed is not None and cap > needed:
        lowered = f"max_batch_ex is lowered from {cap} to {needed}: the table was swept with --max-batch-size {needed}."
        return needed, [lowered]
    cut = sum(size < full for size, full in zip(sizes, row.batch_sizes, strict=True))
    cost = ""
    if row is sweep.recommended_row and len(sweep.buckets) == len(sizes):
        capped, full = (
            sum(-(-use.examples // size) for use, size in zip(sweep.buckets, batch_sizes, strict=True))
            for batch_sizes in (sizes, row.batch_sizes)
        )
        cost = f": {format_number(capped)} batches an epoch instead of {format_number(full)}"
    command = f"batchtune sweep-buckets MANIFEST --max-batch-size {cap} --run {shlex.quote(run)}"
    note = (
        f"max_batch_ex: {cap} is kept. It cuts {cut} of {counted(len(sizes), 'batch size')}, the largest from "
        f"{max(row.batch_sizes):,}{cost}. `{command}` finds the best table under it; for the "
        "larger batches take it out. Then patch again."
    )
    return cap, [note]


def length_function(unit: str | None) -> str:
    """Say what the recipe's length function must return, in a sentence without a full stop."""
    if unit == "s":
        return "Lengths are seconds, as recipes' length_func returns them"
    if unit is None:
        return "The unit of the lengths is not known: length_func must return lengths in the one that was tuned with"
    sample = ", for example x['duration'] * 1000" if unit == "ms" else ""
    return (
        f"Lengths count {unit}, where most recipes' length_func returns seconds: it must return {unit} here{sample}, "
        f"so that max_batch_length and the boundaries mean the same"
    )


def length_key(sweep: Sweep) -> str:
    """Return what recipes' data sets call the length of an example; LENGTH where that is not known."""
    return "duration" if sweep.lengths.unit in ("s", "ms") else "LENGTH"


def leaving_out(sweep: Sweep, *, indent: str = "") -> str:
    """Say how train.py leaves out what was left out at tuning, as comments; empty where nothing was.

    Source: `speechbrain.dataio.dataset.DynamicItemDataset.filtered_sorted`, SpeechBrain 1.1, whose limits are
    inclusive; recipes pass `avoid_if_longer_than` to it where `sorting` is ascending or descending.
    """
    limits = LengthLimits.of(sweep)
    if not limits:
        return commented(limits.left_out, indent=indent)
    key = length_key(sweep)
    bounds = limits.scaled(0.001) if sweep.lengths.unit == "ms" else limits
    ends = (("key_min_value", bounds.shortest), ("key_max_value", bounds.longest))
    arguments = ", ".join(f'{name}={{"{key}": {number(limit)}}}' for name, limit in ends if limit is not None)
    where = "" if key == "duration" else f", LENGTH the key of the lengths in {sweep.lengths.unit or 'their unit'}"
    recipes = "" if limits.longest is None else "; recipes' avoid_if_longer_than does it only where they sort"
    remedy = f"Leave them out in train.py, before the sampler is made{where}{recipes}:"
    code = f"{indent}# train_data = train_data.filtered_sorted({arguments})\n"
    return commented([*limits.left_out, remedy], indent=indent) + code


def render(tuned: Tuned) -> str:
    """Return the block that recipes call `dynamic_batch_sampler`, ready to paste.

    The keys are those of the constructor of `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0 and 1.1;
    what older recipes call them is what their YAML files, up to 2023, have. The form with `num_buckets` follows as
    comments.

    Raises:
        ResultError: No row can be expressed, or nothing is recommended.
    """
    sweep = tuned.needed_sweep
    chosen, recommended, key = table_row(sweep), recommended_row(sweep), length_key(sweep)
    try:
        plain = plain_row(sweep).row
    except ResultError:
        plain = None
    loading = Loading.of(tuned)
    arguments = {} if loading is None else loading.arguments
    return from_template(
        "speechbrain.yaml.j2",
        about_row=about_row(chosen.row, sweep),
        about_data=about_data(sweep),
        remarks=chosen.remarks,
        length_function=length_function(sweep.lengths.unit),
        cap=needed_cap(sweep, chosen.row),
        padded=padded_remark(sweep, "SpeechBrain"),
        leaving_out=Written(leaving_out(sweep)),
        max_batch_length=sweep.max_batch_length,
        boundaries=chosen.row.boundaries,
        plain=plain,
        about_plain="" if plain is None else about_row(plain, sweep),
        plain_cap=None if plain is None else needed_cap(sweep, plain),
        pools=recommended.sized_name if recommended.pool_size is not None else None,
        length=f'train_data.data[key]["{key}"]' + (" * 1000" if sweep.lengths.unit == "ms" else ""),
        length_key=key,
        unit=sweep.lengths.unit,
        config=tuned.config,
        workers=None if loading is None else loading.workers,
        options={name: value for name, value in arguments.items() if name != "num_workers"},
        loading=() if loading is None else loading.remarks(),
    )


def _patch(*file: Any, **options: Any) -> Patched:
    from batchtune.exports.patch import patch_speechbrain

    return patch_speechbrain(*file, **options)


EXPORTS = (
    Export(name="speechbrain", title="SpeechBrain", file="dynamic_batch_sampler.yaml", render=render, patch=_patch),
)
