"""SpeechBrain's DynamicBatchSampler and dynamic_bucketed_batch: a config or code to paste, or a patched recipe."""

from __future__ import annotations

from batchtune.configs import BUCKETS, LIMITS, STREAM_LIMITS, Block
from batchtune.epochs.table import batch_sizes_for
from batchtune.errors import ResultError
from batchtune.exports.base import (
    Chosen,
    Export,
    Patched,
    Tuned,
    batches_per_rank,
    choose_stream,
    choose_table,
    recommended_row,
)
from batchtune.exports.patching import RecipePatch, Value
from batchtune.exports.templating import (
    LengthLimits,
    from_template,
    number,
    stream_fields,
    table_fields,
)
from batchtune.results import Row, StreamRow, StreamSweep, Sweep, unproven_sizes
from batchtune.units import PER_SECOND, counts_samples, format_number

_PASTE_IN = "`batchtune export --to {}` writes it to paste in by hand."
# Settings of recipes before SpeechBrain 1.0, whose train.py picks each by its name and knows no bucket_boundaries.
_OLD_NAMES = ("max_batch_len", "shuffle_ex", "max_batch_len_val")
# Unit → samples of audio, by the constant SAMPLE_RATE.
_SAMPLES: dict[str | None, str] = {
    "s": "{} * SAMPLE_RATE",
    "ms": "{} * SAMPLE_RATE / 1000",
}
_SAMPLER = "sampler_kwargs"
_EPOCH = "looped_nominal_epoch"
# The option of --patch that chooses among several blocks.
_CHOOSE = "--key-path "


def _derived_sizes(sweep: Sweep, row: Row, cap: int | None) -> list[int]:
    """Return SpeechBrain's batch sizes: min(cap, max(1, int(max_batch_length / boundary)))."""
    sizes: list[int] = batch_sizes_for(
        row.boundaries, sweep.max_batch_length, cap
    ).tolist()
    return sizes


def _chosen_table(sweep: Sweep) -> Chosen[Row]:
    """Choose the best row that `bucket_boundaries` and `max_batch_length` express; raise ResultError without one."""
    cap = sweep.settings.get("max_batch_size")
    return choose_table(
        sweep,
        "SpeechBrain",
        lambda row: row.batch_sizes == _derived_sizes(sweep, row, cap),
        "SpeechBrain derives each batch size from max_batch_length and the bucket's boundary",
    )


def _needed_cap(sweep: Sweep, row: Row) -> int | None:
    """Return the `max_batch_ex` that a row needs for its batch sizes; None if it needs none."""
    if row.batch_sizes == _derived_sizes(sweep, row, None):
        return None
    cap: int | None = sweep.settings.get("max_batch_size")
    return cap


def _length_key(sweep: Sweep) -> str:
    """Return what recipes' data sets call a length."""
    return "duration" if sweep.lengths.unit in ("s", "ms") else "LENGTH"


def _leaving_out(sweep: Sweep) -> str | None:
    """Return the call that leaves out in train.py what was left out at tuning; None if nothing was.

    Source: `speechbrain.dataio.dataset.DynamicItemDataset.filtered_sorted`, SpeechBrain 1.1, whose limits are
    inclusive; recipes pass `avoid_if_longer_than` to it where `sorting` is ascending or descending.
    """
    limits = LengthLimits.of(sweep)
    if sweep.lengths.unit == "ms":
        limits = limits.scaled(0.001)
    given = limits.named("key_min_value", "key_max_value").items()
    if not given:
        return None
    arguments = ", ".join(
        f'{name}={{"{_length_key(sweep)}": {number(limit)}}}' for name, limit in given
    )
    return f"train_data = train_data.filtered_sorted({arguments})"


def _counting(unit: str | None) -> str:
    """Say what the recipe's length function must return."""
    if unit == "s":
        return "Lengths are seconds, as recipes' length_func returns them"
    what = unit or "lengths in the unit that was tuned with"
    text = f"length_func must return {what}; most recipes' returns seconds"
    if unit == "ms":
        text += ", for example x['duration'] * 1000"
    return text


def _render_sampler(tuned: Tuned) -> str:
    """Return the block that recipes call `dynamic_batch_sampler`, ready to paste.

    The keys are those of the constructor of `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0 and 1.1.
    Raises ResultError if nothing is recommended, or no row can be expressed.
    """
    sweep = tuned.needed_sweep
    chosen = _chosen_table(sweep)
    recommended = recommended_row(sweep)
    return from_template(
        "speechbrain.yaml.j2",
        **table_fields(chosen, tuned, ("num_workers",)),
        counting=_counting(sweep.lengths.unit),
        leaving_out=_leaving_out(sweep),
        cap=_needed_cap(sweep, chosen.row),
        max_batch_length=sweep.max_batch_length,
        recommended=recommended,
        length_key=_length_key(sweep),
        config=tuned.config,
    )


def patch_speechbrain(
    text: str, tuned: Tuned, *, key_path: str | None = None, name: str = "the file"
) -> Patched:
    """Put the recommended numbers into the settings of a recipe's DynamicBatchSampler.

    - The table goes to `max_batch_length` and `bucket_boundaries`, which replaces `num_buckets`.
    - The user's own `max_batch_ex` is kept if it makes batches smaller. It is added or lowered if batches would
      otherwise be larger than those that were swept (--max-batch-size).
    - A number takes the place of a reference or an alias.

    `key_path` leads to the settings, with dots between keys; without it `Recipe.training_block` finds them. `name`
    is what messages call the file.

    Raises:
        ResultError: The file is not YAML, has no such block or several, shares it with something else, has the names
            of SpeechBrain before 1.0, or the values in a form that can't be changed; or no row can be expressed.
    """
    patch = RecipePatch(text, name, _PASTE_IN.format("speechbrain"))
    block = _sampler_block(patch, key_path)
    sweep = tuned.needed_sweep
    unit = sweep.lengths.unit
    if "feats_hop_size" in block.settings and unit != "frames":
        raise patch.recipe.wrong(
            block.settings["feats_hop_size"],
            f"lengths are frames here (feats_hop_size), but {unit or 'an unknown unit'} in the sweep",
            "Sweep again with lengths in frames: --length-scale 100 --unit frames for seconds and a hop of 0.01 s.",
        )
    chosen = _chosen_table(sweep)
    row = chosen.row
    settings: dict[str, Value] = {}
    notes = []
    needed_cap = _needed_cap(sweep, row)
    cap = None
    if "max_batch_ex" in block.settings:
        cap = patch.number_at(block, "max_batch_ex")
    if needed_cap is not None and (cap is None or cap > needed_cap):
        settings["max_batch_ex"] = needed_cap
    elif cap is not None and cap < max(row.batch_sizes):
        notes.append(
            f"max_batch_ex: {cap:g} is kept: batches only get smaller. --max-batch-size sweeps with it"
        )
    settings["max_batch_length"] = sweep.max_batch_length
    settings["bucket_boundaries"] = list(row.boundaries)
    patch.put(block, settings, before="max_batch_length")
    notes += [*tuned.training_notes, *chosen.remarks, *LengthLimits.of(sweep).left_out]
    unproven = unproven_sizes(row)
    if unproven is not None:
        notes.append(f"{unproven}: `batchtune report` says why")
    if unit not in ("s", None, "frames"):
        notes.append(_counting(unit))
    leaving_out = _leaving_out(sweep)
    if leaving_out is not None:
        notes.append(f"Leave them out in train.py, too: {leaving_out}")
    return patch.patched(notes)


def _sampler_block(patch: RecipePatch, key_path: str | None) -> Block:
    """Return the settings of the DynamicBatchSampler; raise ResultError without any."""
    recipe = patch.recipe
    problem = "has no settings of a DynamicBatchSampler (max_batch_length)"
    if key_path is None:
        block = recipe.training_block(_CHOOSE)
    else:
        block = patch.block_at(key_path)
    if block is None:
        raise ResultError(f"{recipe.name} {problem}", patch.paste_in)
    recipe.check_block(block)
    for key in _OLD_NAMES:
        if key in block.settings:
            raise recipe.wrong(
                block.settings[key],
                f"{key} is of SpeechBrain before 1.0, whose recipes pass no bucket_boundaries on",
                f"Pass all settings to DynamicBatchSampler in train.py. {patch.paste_in}",
            )
    if not block.has_any((*LIMITS, *BUCKETS)):
        raise recipe.wrong(block.node, f"{block.path} {problem}", patch.paste_in)
    return block


def _chosen_stream(sweep: StreamSweep) -> Chosen[StreamRow]:
    return choose_stream(sweep, "SpeechBrain's dynamic_bucketed_batch", "speechbrain")


def _render_stream(tuned: Tuned) -> str:
    """Return Python code that makes the loader, as in SpeechBrain's tutorial of WebDataset.

    Source: `speechbrain.dataio.iterators.dynamic_bucketed_batch` and `.dataloader.make_dataloader`, SpeechBrain 1.1;
    WebDataset 1.0.
    """
    sweep = tuned.needed_stream
    chosen = _chosen_stream(sweep)
    row = chosen.row
    fields = stream_fields(chosen, tuned)
    in_samples = _SAMPLES.get(sweep.lengths.unit, "{}")
    limits = fields["limits"]
    shortest = number(_shortest_counted(sweep, in_samples != "{}"))
    if limits.shortest is not None:
        shortest = in_samples.format(number(limits.shortest))
    lengths = {"min_sample_len": shortest}
    if limits.longest is not None:
        lengths["max_sample_len"] = in_samples.format(number(limits.longest))
    max_numel = None
    if row.max_batch_numel is not None:
        max_numel = in_samples.format(number(row.max_batch_numel))
    return from_template(
        "speechbrain_stream.py.j2",
        rate=sweep.lengths.unit in _SAMPLES,
        target=in_samples.format(number(row.target_batch_numel or 0.0)),
        most=max_numel,
        sample_lengths=lengths,
        **fields,
    )


def _shortest_counted(sweep: StreamSweep, in_samples: bool) -> float:
    """Return the shortest length that is not empty: one sample, token or millisecond; a part of a second."""
    lengths = sweep.lengths
    if in_samples or lengths.unit not in ("s", None):
        return 1
    return min(0.001, lengths.min)


def patch_stream(
    text: str, tuned: Tuned, *, key_path: str | None = None, name: str = "the file"
) -> Patched:
    """Put the recommended numbers into the arguments of a recipe's `dynamic_bucketed_batch`.

    - `target_batch_numel`, `max_batch_numel` and `max_padding_ratio` go to the mapping that has the first, such as
      `sampler_kwargs`; a `max_batch_size` of the user's is kept.
    - `buffersize`, and limits of lengths, go to the mapping around `sampler_kwargs`.
    - `looped_nominal_epoch` is changed where the file has it; else a note names it.
    - Where lengths are seconds, and the file's own limits count samples, numbers are multiplied by its `sample_rate`.

    `key_path` says where the settings are, keys with dots between. `name` is what to call the file in messages.

    Raises:
        ResultError: The file is not YAML, has no such settings or several, shares them with something else, or has the
            values in a form that can't be changed; or the sweep holds no row of this algorithm.
    """
    patch = RecipePatch(text, name, _PASTE_IN.format("speechbrain-stream"))
    sweep = tuned.needed_stream
    chosen = _chosen_stream(sweep)
    row = chosen.row
    limits = LengthLimits.of_stream(sweep)
    block = _stream_block(patch, key_path)
    rate = _rate(patch, block, sweep)
    factor = 1.0
    if rate is not None:
        factor = rate / PER_SECOND[sweep.lengths.unit]

    def scaled(length: float) -> float:
        return float(f"{length * factor:.15g}")

    sampler: dict[str, Value] = {
        "target_batch_numel": scaled(row.target_batch_numel or 0.0),
        "max_padding_ratio": row.max_padding_ratio,
    }
    if row.max_batch_numel is not None:
        sampler["max_batch_numel"] = scaled(row.max_batch_numel)
    if row.max_batch_size is not None:
        sampler["max_batch_size"] = row.max_batch_size
    patch.put(block, sampler, before=STREAM_LIMITS[0])
    outer = block
    if block.keys[-1:] == (_SAMPLER,):
        outer = Block(block.chain[:-1], block.keys[:-1])
    function: dict[str, Value] = {"buffersize": row.buffer_size}
    # The user's own limits are kept, unless the sweep was given others.
    given = LengthLimits.of(sweep)
    if given.shortest is not None:
        function["min_sample_len"] = scaled(given.shortest)
    elif "min_sample_len" not in outer.settings:
        function["min_sample_len"] = _shortest_counted(sweep, rate is not None)
    if limits.longest is not None and (
        given.longest is not None or "max_sample_len" not in outer.settings
    ):
        function["max_sample_len"] = scaled(limits.longest)
    patch.put(outer, function, before=_SAMPLER)
    notes = [*tuned.training_notes, *chosen.remarks, *limits.left_out]
    if rate is not None:
        notes.append(
            f"The numels count samples, {format_number(rate)} a second (sample_rate)"
        )
    batches = batches_per_rank(row, sweep)
    loaders = patch.recipe.blocks_with((_EPOCH,))
    loader = patch.recipe.the_one_for_training(loaders, _CHOOSE)
    if loader is not None:
        patch.put(loader, {_EPOCH: batches}, before=_EPOCH)
    else:
        notes.append(
            f"Give make_dataloader {_EPOCH}={batches}, the batches of an epoch on each rank"
        )
    return patch.patched(notes)


def _stream_block(patch: RecipePatch, key_path: str | None) -> Block:
    """Return the mapping with the sampler's arguments; raise ResultError without one."""
    recipe = patch.recipe
    if key_path is None:
        block = recipe.stream_block(_CHOOSE)
    else:
        block = patch.block_at(key_path)
    if block is not None:
        for candidate in (recipe.block_at((*block.keys, _SAMPLER)), block):
            if candidate is not None and candidate.has_any(STREAM_LIMITS):
                recipe.check_block(candidate)
                return candidate
    raise ResultError(
        f"{recipe.name} has no settings of dynamic_bucketed_batch (target_batch_numel)",
        patch.paste_in,
    )


def _rate(patch: RecipePatch, block: Block, sweep: StreamSweep) -> float | None:
    """Return how many samples a second the file's limits count; None where they count what the sweep did."""
    lengths = sweep.lengths
    if lengths.unit not in PER_SECOND:
        return None
    limit = patch.number_at(block, STREAM_LIMITS[0]) or patch.number_at(
        block, STREAM_LIMITS[1]
    )
    if (
        lengths.unit == "s"
        and limit is not None
        and not counts_samples(limit, lengths.max)
    ):
        return None
    rate = patch.number_at(block, "sample_rate")
    if rate is None or rate <= 0:
        raise ResultError(
            f"{patch.recipe.name}: target_batch_numel counts samples, but the sweep counted {lengths.unit}, and the "
            "file has no sample_rate",
            "Add `sample_rate: 16000` at the top, with that of the audio.",
        )
    return rate


EXPORTS = (
    Export(
        name="speechbrain",
        title="SpeechBrain",
        file="dynamic_batch_sampler.yaml",
        render=_render_sampler,
        patch=patch_speechbrain,
    ),
    Export(
        name="speechbrain-stream",
        title="SpeechBrain with WebDataset",
        file="speechbrain_stream.py",
        render=_render_stream,
        patch=patch_stream,
    ),
)
