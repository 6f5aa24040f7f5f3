"""SpeechBrain's dynamic_bucketed_batch over WebDataset: Python code that makes the loader, or a patched recipe."""

from __future__ import annotations

from batchtune.configs import STREAM_LIMITS, Block, Keys, Recipe, entries
from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Export, Patched, Tuned, batches_per_rank, choose_stream
from batchtune.exports.fields import LengthLimits, stream_fields
from batchtune.exports.patching import RecipePatch, Value, block_to_patch
from batchtune.exports.text import from_template, number, one_line
from batchtune.results import StreamRow
from batchtune.units import PER_SECOND, counts_samples, format_number

# Unit → samples of audio, by the constant SAMPLE_RATE.
_SAMPLES: dict[str | None, str] = {"s": "{} * SAMPLE_RATE", "ms": "{} * SAMPLE_RATE / 1000"}
_PASTE_IN = "`batchtune export --to speechbrain-stream` writes code to paste in by hand."
_SAMPLER = "sampler_kwargs"
_BUFFER = "buffersize"
_EPOCH = "looped_nominal_epoch"


def _choose_row(tuned: Tuned) -> Chosen[StreamRow]:
    return choose_stream(tuned.needed_stream, "SpeechBrain's dynamic_bucketed_batch", "speechbrain")


def render(tuned: Tuned) -> str:
    """Return Python code that makes the loader, as in SpeechBrain's tutorial of WebDataset.

    Source: `speechbrain.dataio.iterators.dynamic_bucketed_batch` and `.dataloader.make_dataloader`, SpeechBrain 1.1;
    WebDataset 1.0.
    """
    chosen = _choose_row(tuned)
    row = chosen.row
    shared = stream_fields(chosen, tuned, "SpeechBrain")
    in_samples = _SAMPLES.get(shared["unit"], "{}")
    least = shared["limits"].shortest
    shortest = _least_counted(tuned, in_samples != "{}") if least is None else in_samples.format(number(least))
    sample_lengths = [("min_sample_len", shortest)]
    if (longest := shared["limits"].longest) is not None:
        sample_lengths.append(("max_sample_len", in_samples.format(number(longest))))
    return from_template(
        "speechbrain_stream.py.j2",
        rate=shared["unit"] in _SAMPLES,
        target=in_samples.format(number(row.target_batch_numel or 0.0)),
        most="" if row.max_batch_numel is None else in_samples.format(number(row.max_batch_numel)),
        sample_lengths=sample_lengths,
        **shared,
    )


def _least_counted(tuned: Tuned, in_samples: bool) -> str:
    """Return the shortest length that is no empty example: one sample, token or millisecond; a part of a second."""
    lengths = tuned.needed_stream.lengths
    if in_samples or lengths.unit not in ("s", None):
        return "1"
    return number(0.001 if lengths.unit == "s" else min(1.0, lengths.min))


def patch_stream(text: str, tuned: Tuned, *, key_path: str | None = None, name: str = "the file") -> Patched:
    """Put the recommended numbers into the arguments of a recipe's `dynamic_bucketed_batch`.

    - `target_batch_numel`, `max_batch_numel` and `max_padding_ratio` go to the mapping that has the first, such as
      `sampler_kwargs`; a `max_batch_size` of the user's is kept.
    - `buffersize`, and limits of lengths, go where they stand, else to the mapping around `sampler_kwargs`.
    - `looped_nominal_epoch` is changed where the file has it; else a note names it.
    - Where lengths are seconds, and the file's own limits count samples, numbers are multiplied by its `sample_rate`.

    `key_path` says where the settings are, keys with dots between. `name` is what to call the file in messages.

    Raises:
        ResultError: The file is not YAML, has no such settings or several, shares them with something else, or has the
            values in a form that can't be changed; or the sweep holds no row of this algorithm.
    """
    patch = RecipePatch(text, one_line(name), _PASTE_IN)
    recipe = patch.recipe
    chosen = _choose_row(tuned)
    sweep = tuned.needed_stream
    row = chosen.row
    limits = LengthLimits.of_stream(sweep)
    block = _sampler_block(recipe, key_path)
    rate = _rate(block, recipe, tuned)
    notes = [f"{remark}." for remark in (*chosen.remarks, *limits.left_out)]
    factor = 1.0
    if rate is not None:
        notes.append(f"The numels count samples, {format_number(rate)} a second (sample_rate).")
        factor = rate / PER_SECOND[sweep.lengths.unit]
    elif sweep.lengths.unit in PER_SECOND and "sample_rate" in entries(recipe.root):
        notes.append("The numels count seconds, as the file's own seem to: its sample_rate is not applied.")

    def counted(length: float | None) -> float | None:
        return None if length is None else float(f"{length * factor:.15g}")

    sampler: dict[str, Value] = {"target_batch_numel": counted(row.target_batch_numel)}
    if row.max_batch_numel is not None or "max_batch_numel" in block.settings:
        sampler["max_batch_numel"] = counted(row.max_batch_numel)
    sampler["max_padding_ratio"] = row.max_padding_ratio
    if row.max_batch_size is not None:
        sampler["max_batch_size"] = row.max_batch_size
    elif "max_batch_size" in block.settings:
        notes.append("max_batch_size is kept: batches only get smaller. --max-batch-size sweeps with it.")
    drop_end = block.nearest("drop_end")
    if drop_end is not None and recipe.value(drop_end[0]) is True:
        notes.append("drop_end is kept: each pass leaves out what the buffer holds at its end, which the sweep counts.")
    function: dict[str, Value] = {_BUFFER: row.buffer_size}
    # The user's own limits are kept, unless the sweep was given others.
    if limits.shortest is not None:
        function["min_sample_len"] = counted(limits.shortest)
    elif block.nearest("min_sample_len") is None:
        function["min_sample_len"] = float(_least_counted(tuned, rate is not None))
    is_limited = LengthLimits.of(sweep).longest is not None
    if limits.longest is not None and (is_limited or block.nearest("max_sample_len") is None):
        function["max_sample_len"] = counted(limits.longest)
    for key, value in sampler.items():
        patch.put(block, key, value, before=STREAM_LIMITS[0])
    for key, value in function.items():
        patch.put(_place(recipe, block, key), key, value, before=_SAMPLER)
    batches = batches_per_rank(row, sweep)
    loader = recipe.the_one_for_training(recipe.blocks_with((_EPOCH,)), "--key-path ")
    if loader is not None:
        patch.put(loader, _EPOCH, batches, before=_EPOCH)
    else:
        notes.append(f"Give make_dataloader {_EPOCH}={batches}, the batches of an epoch on each rank.")
    return Patched(patch.result(), tuple(notes))


def _sampler_block(recipe: Recipe, key_path: str | None) -> Block:
    """Return the mapping with the sampler's arguments."""
    lacks = ResultError(f"{recipe.name} has no settings of dynamic_bucketed_batch (target_batch_numel)", _PASTE_IN)
    block = block_to_patch(recipe, key_path, lambda: recipe.stream_block("--key-path "), lacks)
    inner = recipe.block_at((*block.keys, _SAMPLER))
    if inner is not None and inner.has_any(STREAM_LIMITS):
        return inner
    if block.has_any(STREAM_LIMITS):
        return block
    raise lacks


def _rate(block: Block, recipe: Recipe, tuned: Tuned) -> float | None:
    """Return how many samples a second the file's limits count; None where they count what the sweep did."""
    lengths = tuned.needed_stream.lengths
    if lengths.unit not in PER_SECOND:
        return None
    limit = _number_at(block, STREAM_LIMITS[0], recipe) or _number_at(block, STREAM_LIMITS[1], recipe)
    rate = _number_at(block, "sample_rate", recipe)
    if lengths.unit != "ms" and limit is not None and not counts_samples(limit, lengths.max):
        return None
    if rate is None or rate <= 0:
        unit = "milliseconds" if lengths.unit == "ms" else "seconds"
        raise ResultError(
            f"{recipe.name}: target_batch_numel counts samples, but the sweep counted {unit}, and the file has no "
            "sample_rate",
            "Add `sample_rate: 16000` at the top, with that of the audio.",
        )
    return rate


def _number_at(block: Block, key: str, recipe: Recipe) -> float | None:
    """Return the number that a key has in the block or around it; None without one."""
    nearest = block.nearest(key)
    if nearest is None:
        return None
    try:
        value = recipe.value(nearest[0])
    except ResultError:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return None


def _place(recipe: Recipe, block: Block, key: str) -> Block:
    """Return the mapping for an argument of the function itself."""
    path: Keys = block.keys
    if path[-1:] == (_SAMPLER,):
        path = path[:-1]
    nearest = block.nearest(key)
    if nearest is not None:
        path = nearest[1]
    place = recipe.block_at(path)
    assert place is not None
    return place


EXPORTS = (
    Export(
        name="speechbrain-stream",
        title="SpeechBrain with WebDataset",
        file="speechbrain_stream.py",
        render=render,
        patch=patch_stream,
    ),
)
