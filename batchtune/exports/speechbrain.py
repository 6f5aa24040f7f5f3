"""The recommendation for SpeechBrain's DynamicBatchSampler: the block of a recipe's YAML."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import pairwise

import numpy as np

from batchtune.batching.samplers import speechbrain_boundaries
from batchtune.batching.table import batch_sizes_for
from batchtune.errors import ResultError, shortened
from batchtune.exports.base import Chosen, Export, Tuned, choose_row
from batchtune.exports.snippets import LengthLimits, about_data, about_row, commented, padded_remark
from batchtune.results import Row, Sweep

DERIVES = "SpeechBrain derives each batch size from max_batch_length and the bucket's boundary"
NO_PLAIN_ROW = "num_buckets makes SpeechBrain choose the boundaries, which only rows of the strategy speechbrain have"

_WIDTH = 100
_AGAIN = "Make it anew with `batchtune sweep-buckets`."


def number(value: float) -> str:
    """A number that YAML 1.1 and 1.2 read as such, and that hyperpyyaml, which writes numbers anew, keeps exactly.

    That is why there is no exponent: ruamel.yaml's round trip drops a digit of numbers that have one.
    """
    if value == int(value):
        return str(int(value))
    return format(Decimal(repr(float(value))), "f")


def flow_list(values: Sequence[float]) -> str:
    """`[3.995, 5.825, 15.0]`: all of them with a point where one needs it."""
    texts = [number(value) for value in values]
    if any("." in text for text in texts):
        texts = [text if "." in text else f"{text}.0" for text in texts]
    return f"[{', '.join(texts)}]"


def broken(line: str, width: int = _WIDTH) -> str:
    """A list's line, broken between its entries and indented beneath where it is too long; with a line break."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def is_sound(row: Row) -> bool:
    """Whether a row's table can be one: `sweep.json` may have been edited."""
    boundaries, sizes = row.boundaries, row.batch_sizes
    return (
        0 < len(boundaries) == len(sizes)
        and all(math.isfinite(boundary) and boundary > 0 for boundary in boundaries)
        and all(low < high for low, high in pairwise(boundaries))
        and min(sizes) >= 1
    )


def checked(sweep: Sweep) -> Sweep:
    """The sweep itself.

    Raises:
        ResultError: What it recommends can't be a table, or its max_batch_length no length.
    """
    if not (math.isfinite(sweep.max_batch_length) and sweep.max_batch_length > 0):
        raise ResultError("The sweep is damaged: max_batch_length must be positive and finite", _AGAIN)
    if sweep.recommended is not None and not 0 <= sweep.recommended < len(sweep.rows):
        raise ResultError(f"The sweep recommends row {sweep.recommended} of {len(sweep.rows)}", _AGAIN)
    if sweep.recommended_row is not None and not is_sound(sweep.recommended_row):
        raise ResultError("The sweep's recommended row is damaged: its boundaries or batch sizes make no table", _AGAIN)
    return sweep


def cap_of(sweep: Sweep) -> int | None:
    """The most examples that the sweep allowed in a batch; None without such a limit.

    Raises:
        ResultError: It is no whole number of at least 1.
    """
    cap = sweep.settings.get("max_batch_size")
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        raise ResultError(f"The sweep's max_batch_size is no whole number of at least 1: {shortened(cap)}", _AGAIN)
    return cap


def derived_sizes(sweep: Sweep, boundaries: Sequence[float], cap: int | None) -> list[int]:
    """SpeechBrain's batch sizes: min(cap, max(1, int(max_batch_length / boundary)))."""
    sizes: list[int] = batch_sizes_for(np.asarray(boundaries), sweep.max_batch_length, cap).tolist()
    return sizes


def table_row(sweep: Sweep) -> Chosen:
    """The best row that `bucket_boundaries` and `max_batch_length` express.

    Raises:
        ResultError: Nothing is recommended, there is no such row, or the sweep is damaged.
    """
    cap = cap_of(checked(sweep))

    def expresses(row: Row) -> bool:
        return is_sound(row) and row.batch_sizes == derived_sizes(sweep, row.boundaries, cap)

    return choose_row(sweep, "SpeechBrain", expresses, DERIVES)


def plain_row(sweep: Sweep) -> Chosen:
    """The best row that `num_buckets` and `max_batch_length` express.

    Raises:
        ResultError: Nothing is recommended, there is no such row, or the sweep is damaged.
    """
    cap = cap_of(checked(sweep))

    def expresses(row: Row) -> bool:
        if row.strategy != "speechbrain" or not is_sound(row) or row.num_buckets != len(row.boundaries):
            return False
        own = speechbrain_boundaries(row.num_buckets, sweep.max_batch_length).tolist()
        return own == row.boundaries and row.batch_sizes == derived_sizes(sweep, own, cap)

    return choose_row(sweep, "SpeechBrain with num_buckets", expresses, NO_PLAIN_ROW)


def needed_cap(sweep: Sweep, row: Row) -> int | None:
    """The `max_batch_ex` that a row needs for its batch sizes; None where it needs none."""
    return None if derived_sizes(sweep, row.boundaries, None) == row.batch_sizes else cap_of(sweep)


def length_function(unit: str | None) -> str:
    """What the recipe's length function must return, a sentence without a full stop."""
    if unit == "s":
        return "Lengths are seconds, as recipes' length_func returns them"
    if unit is None:
        return "The unit of the lengths is not known: length_func must return lengths in the one that was tuned with"
    sample = ", for example x['duration'] * 1000" if unit == "ms" else ""
    return (
        f"Lengths count {unit}, where most recipes' length_func returns seconds: it must return {unit} here{sample}, "
        f"so that max_batch_length and the boundaries mean the same"
    )


def leaving_out(sweep: Sweep, *, indent: str = "") -> str:
    """How train.py leaves out what was left out at tuning, as comments; empty where nothing was.

    Source: `speechbrain.dataio.dataset.DynamicItemDataset.filtered_sorted`, SpeechBrain 1.1, whose limits are
    inclusive; recipes pass `avoid_if_longer_than` to it where `sorting` is ascending or descending.
    """
    limits = LengthLimits.of(sweep)
    if not limits:
        return commented(limits.left_out, indent=indent)
    key = "duration" if sweep.lengths.unit in ("s", "ms") else "LENGTH"
    bounds = limits.scaled(0.001) if sweep.lengths.unit == "ms" else limits
    ends = (("key_min_value", bounds.shortest), ("key_max_value", bounds.longest))
    arguments = ", ".join(f'{name}={{"{key}": {number(limit)}}}' for name, limit in ends if limit is not None)
    where = "" if key == "duration" else f", LENGTH the key of the lengths in {sweep.lengths.unit or 'their unit'}"
    recipes = "" if limits.longest is None else "; recipes' avoid_if_longer_than does it only where they sort"
    remedy = f"Leave them out in train.py, before the sampler is made{where}{recipes}:"
    code = f"{indent}# train_data = train_data.filtered_sorted({arguments})\n"
    return commented([*limits.left_out, remedy], indent=indent) + code


def _block(sweep: Sweep, row: Row, own: str) -> Iterable[str]:
    cap = needed_cap(sweep, row)
    yield "dynamic_batch_sampler:\n"
    yield f"    max_batch_length: {number(sweep.max_batch_length)}\n"
    yield broken(f"    {own}")
    if cap is not None:
        yield f"    max_batch_ex: {cap}\n"
    yield "    shuffle: True\n"
    yield "    batch_ordering: random\n"


def render(tuned: Tuned) -> str:
    """The block that recipes call `dynamic_batch_sampler`, ready to paste.

    The keys are those of the constructor of `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0 and 1.1;
    what older recipes call them is what their YAML files, up to 2023, have.

    Raises:
        ResultError: No row can be expressed, or nothing is recommended.
    """
    sweep = tuned.sweep
    chosen = table_row(sweep)
    remarks = [
        f"SpeechBrain's DynamicBatchSampler: {about_row(chosen.row, sweep)}",
        about_data(sweep),
        *chosen.remarks,
        length_function(sweep.lengths.unit),
        *_unsaid(sweep, chosen.row),
        "It takes the place of the block of the same name; newer recipes call it dynamic_batch_sampler_train. train.py "
        "must pass all of it on: DynamicBatchSampler(train_data, **dynamic_hparams, length_func=...)",
    ]
    block = _block(sweep, chosen.row, f"bucket_boundaries: {flow_list(chosen.row.boundaries)}")
    comments = commented(remarks) + leaving_out(sweep)
    return "".join([comments, "dynamic_batching: True\n", *block, "\n", *_plain_alternative(sweep)])


def _unsaid(sweep: Sweep, row: Row) -> Iterable[str]:
    """What SpeechBrain can't be told."""
    if needed_cap(sweep, row) is None:
        yield "A max_batch_ex of your own can stay: batches only get smaller. --max-batch-size sweeps with it"
    yield "An example longer than the last boundary is not dropped: it becomes a batch of one"
    yield from padded_remark(sweep, "SpeechBrain")


def _plain_alternative(sweep: Sweep) -> Iterable[str]:
    """The form with `num_buckets` and the names of old recipes, as comments."""
    try:
        row = plain_row(sweep).row
    except ResultError:
        yield commented(["With num_buckets, and so SpeechBrain's own boundaries, this sweep has no row"])
        return
    yield commented(
        [
            "Where train.py picks settings by name and knows no bucket_boundaries, num_buckets is all that can be set. "
            f"The best with it is {about_row(row, sweep)}:"
        ]
    )
    yield from (f"# {line}" for line in _block(sweep, row, f"num_buckets: {row.num_buckets}"))
    yield commented(
        [
            "Recipes before SpeechBrain 1.0 write max_batch_len for max_batch_length and shuffle_ex for shuffle; with "
            "feats_hop_size they count frames. left_bucket_len, multiplier and num_quantiles belong to a sampler that "
            "is gone: no table can be expressed with them"
        ]
    )


EXPORT = Export(name="speechbrain", title="SpeechBrain", file="dynamic_batch_sampler.yaml", render=render)
