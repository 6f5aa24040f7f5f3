"""SpeechBrain's DynamicBatchSampler: the block of a recipe's YAML, or a recipe with the numbers patched in."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchtune.configs import BUCKETS, LIMITS, OLD_RULES, Block
from batchtune.epochs.samplers import speechbrain_boundaries
from batchtune.epochs.table import batch_sizes_for
from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Export, Patched, Tuned, choose_table, recommended_row
from batchtune.exports.fields import LengthLimits, Loading, about_row, table_fields
from batchtune.exports.patching import RecipePatch, block_to_patch
from batchtune.exports.text import from_template, one_line
from batchtune.results import Row, Sweep, unproven_sizes
from batchtune.units import counted, format_number

_PASTE_IN = "`batchtune export --to speechbrain` writes a block to paste in by hand."
# Settings of old recipes, whose train.py picks each by its name: it can't be given new ones.
_BY_NAME = ("max_batch_len", "shuffle_ex", "max_batch_len_val")


def _derived_sizes(sweep: Sweep, boundaries: Sequence[float], cap: int | None) -> list[int]:
    """Return SpeechBrain's batch sizes: min(cap, max(1, int(max_batch_length / boundary)))."""
    sizes: list[int] = batch_sizes_for(np.asarray(boundaries), sweep.max_batch_length, cap).tolist()
    return sizes


def _table_row(sweep: Sweep) -> Chosen[Row]:
    """Choose the best row that `bucket_boundaries` and `max_batch_length` express; raise ResultError without one."""
    cap = sweep.settings.get("max_batch_size")
    return choose_table(
        sweep,
        "SpeechBrain",
        lambda row: row.batch_sizes == _derived_sizes(sweep, row.boundaries, cap),
        "SpeechBrain derives each batch size from max_batch_length and the bucket's boundary",
    )


def _plain_row(sweep: Sweep) -> Chosen[Row]:
    """Choose the best row that `num_buckets` and `max_batch_length` express; raise ResultError without one."""
    cap = sweep.settings.get("max_batch_size")

    def expresses(row: Row) -> bool:
        own = speechbrain_boundaries(row.num_buckets, sweep.max_batch_length).tolist()
        return own == row.boundaries and row.batch_sizes == _derived_sizes(sweep, own, cap)

    return choose_table(
        sweep,
        "SpeechBrain with num_buckets",
        expresses,
        "num_buckets makes SpeechBrain choose the boundaries, which only rows of the strategy speechbrain have",
    )


def _needed_cap(sweep: Sweep, row: Row) -> int | None:
    """Return the `max_batch_ex` that a row needs for its batch sizes; None if it needs none."""
    needs = _derived_sizes(sweep, row.boundaries, None) != row.batch_sizes
    return sweep.settings.get("max_batch_size") if needs else None


def _comment_fields(sweep: Sweep) -> dict[str, Any]:
    """Return what comments say of lengths and of how train.py leaves out what was left out at tuning.

    Source: `speechbrain.dataio.dataset.DynamicItemDataset.filtered_sorted`, SpeechBrain 1.1, whose limits are
    inclusive; recipes pass `avoid_if_longer_than` to it where `sorting` is ascending or descending.
    """
    unit = sweep.lengths.unit
    limits = LengthLimits.of(sweep)
    bounds = limits.scaled(0.001) if unit == "ms" else limits
    ends = (("key_min_value", bounds.shortest), ("key_max_value", bounds.longest))
    return {
        "unit": unit,
        "limits": limits,
        "ends": [(name, limit) for name, limit in ends if limit is not None],
        # Recipes' data sets call a length in seconds so.
        "length_key": "duration" if unit in ("s", "ms") else "LENGTH",
    }


def render(tuned: Tuned) -> str:
    """Return the block that recipes call `dynamic_batch_sampler`, ready to paste.

    The keys are those of the constructor of `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0 and 1.1;
    what older recipes call them is what their YAML files, up to 2023, have. The form with `num_buckets` follows as
    comments. Raises ResultError if nothing is recommended, or no row can be expressed.
    """
    sweep = tuned.needed_sweep
    chosen = _table_row(sweep)
    recommended = recommended_row(sweep)
    try:
        plain = _plain_row(sweep).row
    except ResultError:
        plain = None
    loading = Loading.of(tuned)
    return from_template(
        "speechbrain.yaml.j2",
        **{**table_fields(chosen, tuned, "SpeechBrain"), **_comment_fields(sweep), "workers": loading.workers},
        indent="",
        cap=_needed_cap(sweep, chosen.row),
        max_batch_length=sweep.max_batch_length,
        plain=plain,
        about_plain="" if plain is None else about_row(plain, sweep),
        plain_cap=None if plain is None else _needed_cap(sweep, plain),
        pools=recommended.sized_name if recommended.pool_size is not None else None,
        config=tuned.config,
        options={name: value for name, value in loading.arguments.items() if name != "num_workers"},
    )


def patch_speechbrain(text: str, tuned: Tuned, *, key_path: str | None = None, name: str = "the file") -> Patched:
    """Put the recommended numbers into the settings of a recipe's DynamicBatchSampler.

    - The table goes to `max_batch_length` and `bucket_boundaries`, which replaces `num_buckets`. If the block has the
      names of old recipes (`max_batch_len`, `shuffle_ex`), whose train.py knows no `bucket_boundaries`, `num_buckets`
      is set to that of the best row that it can express, and a comment says so.
    - The user's own `max_batch_ex` is kept if it makes batches smaller, and a note says what it costs. It is added or
      lowered if batches would otherwise be larger than those that were swept (--max-batch-size).
    - A value `!ref <key>` is changed at that key if nothing else in the file refers to it; otherwise the number
      replaces the reference. An alias is replaced by the number.
    - The layout may change; comments, tags and all other values stay.
    - A comment is added if the lengths are not seconds, which recipes' length functions return, and if examples were
      left out at tuning.

    `key_path` leads to the settings, with dots between keys; without it `Recipe.training_block` finds them. `name`
    is what messages call the file.

    Raises:
        ResultError: The file is not YAML, has no such block or several, shares it with something else, or has the
            values in a form that can't be changed; or no row can be expressed.
    """
    patch = RecipePatch(text, one_line(name), _PASTE_IN)
    block = _block_of(patch, key_path)
    sweep = tuned.needed_sweep
    _refuse_block(patch, block, sweep.lengths.unit)
    settings = block.settings
    plain = any(key in settings for key in _BY_NAME) and "bucket_boundaries" not in settings
    chosen = _plain_row(sweep) if plain else _table_row(sweep)
    limit = next((key for key in LIMITS if key in settings), LIMITS[0])
    cap, notes = _patched_cap(patch, block, chosen.row, tuned)
    patch.put(block, limit, sweep.max_batch_length, before=limit)
    if plain:
        patch.put(block, "num_buckets", chosen.row.num_buckets, before=limit)
    else:
        boundaries = list(chosen.row.boundaries)
        patch.put(block, "bucket_boundaries", boundaries, before=limit, replaces="num_buckets")
    if cap is not None:
        patch.put(block, "max_batch_ex", cap, before=limit)
    limits = LengthLimits.of(sweep)
    notes += [f"{remark}." for remark in (*chosen.remarks, *limits.left_out)]
    if limits:
        notes.append("train.py must leave them out, too: the comment in the file says how.")
    fields = {
        **_comment_fields(sweep),
        "counts": sweep.lengths.unit not in ("s", None) and "feats_hop_size" not in settings,
        "plain": plain,
        "remarks": chosen.remarks,
        "unproven": unproven_sizes(chosen.row),
    }
    patch.comment(block, limit, lambda indent: from_template("speechbrain-patch.j2", indent=indent, **fields))
    return Patched(patch.result(), tuple(notes))


def _block_of(patch: RecipePatch, key_path: str | None) -> Block:
    """Return the settings of the DynamicBatchSampler; raise ResultError without any."""
    recipe = patch.recipe
    lacks = ResultError(f"{recipe.name} has no settings of a DynamicBatchSampler (max_batch_length)", _PASTE_IN)
    block = block_to_patch(recipe, key_path, lambda: recipe.training_block("--key-path "), lacks)
    if not block.has_any((*LIMITS, *BUCKETS)):
        problem = f"{block.path} holds no settings of a DynamicBatchSampler (max_batch_length)"
        raise recipe.wrong(block.node, problem, _PASTE_IN)
    return block


def _refuse_block(patch: RecipePatch, block: Block, unit: str | None) -> None:
    """Raise ResultError if the settings are of an old sampler, or count other things than the lengths do."""
    settings = block.settings
    old_rules = [key for key in OLD_RULES if key in settings]
    if old_rules and not block.has_any(BUCKETS):
        problem = f"{old_rules[0]} belongs to an old sampler of SpeechBrain, which takes no bucket table"
        raise patch.recipe.wrong(settings[old_rules[0]], problem, _PASTE_IN)
    if "feats_hop_size" in settings and unit != "frames":
        raise patch.recipe.wrong(
            settings["feats_hop_size"],
            "max_batch_len counts frames here (feats_hop_size), but the lengths that were tuned with count "
            f"{unit or 'an unknown unit'}",
            "Sweep again with lengths in frames: --length-scale 100 --unit frames for seconds and a hop of 0.01 s.",
        )


def _patched_cap(patch: RecipePatch, block: Block, row: Row, tuned: Tuned) -> tuple[int | None, list[str]]:
    """Return the `max_batch_ex` to write, None to leave it as it is, and full sentences on what it changes."""
    sweep = tuned.needed_sweep
    node = block.settings.get("max_batch_ex")
    needed = _needed_cap(sweep, row)
    if node is None:
        return needed, []
    try:
        cap = patch.recipe.value(node)
    except ResultError:
        cap = node.value
    if cap is None and needed is None:
        return None, []
    if not isinstance(cap, int) or cap is True or not 1 <= cap < 10**15:
        text = one_line(str(node.value))[:60] or "empty"
        note = (
            f"Warning: max_batch_ex was {text!r}, which is not a number here; the largest batch size of the table "
            "takes its place."
        )
        notes = [] if node.tag == "!PLACEHOLDER" else [note]
        return needed or max(row.batch_sizes), notes
    sizes = _derived_sizes(sweep, row.boundaries, cap)
    if sizes == row.batch_sizes:
        return None, []
    if needed is not None and cap > needed:
        lowered = f"max_batch_ex is lowered from {cap} to {needed}: the table was swept with --max-batch-size {needed}."
        return needed, [lowered]
    cut = sum(size < full for size, full in zip(sizes, row.batch_sizes, strict=True))
    cost = ""
    if row is sweep.recommended_row and len(sweep.buckets) == len(sizes):
        capped = _batches(sweep, sizes)
        full = _batches(sweep, row.batch_sizes)
        cost = f": {format_number(capped)} batches an epoch instead of {format_number(full)}"
    command = f"batchtune sweep-buckets MANIFEST --max-batch-size {cap} --run {shlex.quote(tuned.run)}"
    kept = (
        f"max_batch_ex: {cap} is kept. It cuts {cut} of {counted(len(sizes), 'batch size')}, the largest from "
        f"{max(row.batch_sizes):,}{cost}. `{command}` finds the best table under it; for the "
        "larger batches take it out. Then patch again."
    )
    return None, [kept]


def _batches(sweep: Sweep, batch_sizes: Sequence[int]) -> int:
    """Return the batches of an epoch with these batch sizes in the recommended buckets."""
    return sum(-(-use.examples // size) for use, size in zip(sweep.buckets, batch_sizes, strict=True))


EXPORTS = (
    Export(
        name="speechbrain",
        title="SpeechBrain",
        file="dynamic_batch_sampler.yaml",
        render=render,
        patch=patch_speechbrain,
    ),
)
