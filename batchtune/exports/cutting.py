"""Frameworks that take one limit for a batch, and no bucket table.

ESPnet and fairseq sort the examples by length and cut the list at the limit; the others pack up to it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from batchtune.errors import ResultError
from batchtune.exports import export_of
from batchtune.exports.base import Tuned, choose_table
from batchtune.exports.templating import (
    LengthLimits,
    from_template,
    packed_fields,
    table_fields,
)
from batchtune.results import Sweep

# Toolkits for speech count samples if lengths are in seconds; comments say what to multiply by at another rate.
SAMPLE_RATE = 16_000
_AUDIO_UNITS: dict[str | None, float] = {
    "s": SAMPLE_RATE,
    "ms": SAMPLE_RATE / 1000,
    "samples": 1,
}
_FAIRSEQ_FILE = "batchtune_fairseq.txt"


def _cutting_fields(
    tuned: Tuned, toolkit: str, setting: str, loads: Collection[str]
) -> dict[str, Any]:
    """Return what the templates of both have in common.

    `setting` is the toolkit's limit for a batch, `loads` are the arguments of torch's DataLoader that it can set.
    """
    sweep = tuned.needed_sweep
    why = f"{toolkit} knows no bucket table, only a limit for a batch"
    chosen = choose_table(sweep, toolkit, lambda row: row.sizing == "length", why)
    measured = math.inf if tuned.probe is None else tuned.probe.max_batch_length
    return {
        **table_fields(chosen, tuned, loads),
        "toolkit": toolkit,
        "setting": setting,
        "audio": sweep.lengths.unit in _AUDIO_UNITS,
        "rate": f"{SAMPLE_RATE:,}",
        "max_batch_length": sweep.max_batch_length,
        "measured": measured,
        "too_large": sweep.max_batch_length > measured * (1 + 1e-9),
        "longest": sweep.lengths.max,
    }


def _at_least(length: float, scale: float) -> int:
    """Return a length in whole steps of a finer unit, rounded up except for floating-point noise."""
    return math.ceil(round(length * scale, 3))


def batch_bins(sweep: Sweep, *, scale: float = 1.0) -> int:
    """Return the largest `batch_bins`, in ESPnet's unit, with which no batch can exceed max_batch_length; at least 1.

    `NumElementsBatchSampler` and `LengthBatchSampler` (espnet2/samplers/, ESPnet 202511) sort by length, ascending, and
    end a batch with the example that makes its padded length *exceed* `batch_bins`: n examples up to length L with
    (n - 1)·K ≤ batch_bins, K the length before L. So n·L ≤ max_batch_length holds if batch_bins < K·floor(
    max_batch_length / L) for all lengths K, L that follow each other. These are not in the sweep, but each lies between
    two quantiles that do occur and in neighbouring bins of the histogram that are not empty, which bounds both. Other
    features that are counted too, such as the text, only make batches smaller.

    ESPnet can't limit the number of examples. So that max_batch_size C holds too, batch_bins < K·C for every K that is
    not among the C - 1 shortest lengths: no batch goes on after its C-th example.

    `scale` is one of the lengths' units in ESPnet's; the sweep's quantiles and histogram bound the lengths.
    """
    limit = sweep.max_batch_length
    cap = sweep.settings.max_batch_size or math.inf
    bounds = [
        low * min(cap, max(1, int(limit / high)))
        for low, high, rank in _neighbours(sweep)
        if rank * high > limit or rank > cap
    ]
    # Without a bound all examples are in one batch that does not exceed it.
    return max(1, _at_least(min([*bounds, limit]), scale) - 1)


def _neighbours(sweep: Sweep) -> Iterator[tuple[float, float, int]]:
    """Yield (K, L, r): of two lengths that follow each other, a lower and an upper bound, and a bound of L's rank."""
    filled = [bin for bin in sweep.histogram if bin.count]
    starts = [bin.from_ for bin in filled]
    ends = [bin.to for bin in filled]
    steps = len(sweep.quantiles) - 1
    for index, (low, high) in enumerate(pairwise(sweep.quantiles)):
        rank = math.ceil((index + 1) * sweep.lengths.count / steps)
        first = bisect_left(ends, low)
        last = bisect_left(starts, high)
        # Without a bin between them, the histogram is damaged.
        if low == high or first >= last:
            yield low, high, rank
            continue
        for place in range(first, last):
            yield (
                max(low, starts[place]),
                min(high, ends[min(place + 1, len(ends) - 1)]),
                rank,
            )


def _render_espnet(tuned: Tuned) -> str:
    """Return the config fragment; raise ResultError if the sweep recommends nothing.

    How to leave out what was left out at tuning: stage 4 of egs2/TEMPLATE/asr1/asr.sh, which keeps
    min_wav_duration < duration < max_wav_duration.
    """
    sweep = tuned.needed_sweep
    scale = _AUDIO_UNITS.get(sweep.lengths.unit, 1.0)
    bins = batch_bins(sweep, scale=scale)
    seconds = LengthLimits.of(sweep).scaled(scale / SAMPLE_RATE)
    return from_template(
        "espnet.yaml.j2",
        # On a GPU the trainer pins memory by itself.
        **_cutting_fields(tuned, "ESPnet", "batch_bins", ("num_workers", "pin_memory")),
        bins=bins,
        share=f"{bins / (sweep.max_batch_length * scale):.1%}",
        cap=sweep.settings.max_batch_size,
        ends=seconds.named("min_wav_duration", "max_wav_duration"),
    )


def _render_fairseq(tuned: Tuned) -> str:
    """Return the flags, on one line below the comments, and the same for Hydra as a comment.

    Source: fairseq 0.12.2. `batch_by_size_vec` (data/data_utils_fast.pyx) adds examples, sorted by length, to
    a batch while examples × longest ≤ max_tokens and stops where an example exceeds it by itself;
    required_batch_size_multiple (8 unless given) would cut more batches. `FileAudioDataset` leaves out what is shorter
    than min_sample_size, and crops what is longer than max_sample_size; `FairseqTask.filter_indices_by_size` leaves
    training examples beyond max_source_positions out, and those of validation only with
    skip_invalid_size_inputs_valid_test. Raises ResultError if the sweep recommends nothing.
    """
    sweep = tuned.needed_sweep
    unit = sweep.lengths.unit
    limits = LengthLimits.of(sweep)
    fields = _cutting_fields(tuned, "fairseq", "max-tokens", ("num_workers",))
    scale = _AUDIO_UNITS.get(unit, 1.0)
    audio = fields["audio"]
    max_tokens = max(1, math.floor(round(sweep.max_batch_length * scale, 3)))
    allowed = max(1, int(sweep.max_batch_length / sweep.lengths.min))
    batch_size = min(allowed, sweep.settings.max_batch_size or allowed)
    # One more for the end of the sentence, which fairseq counts and a manifest of tokens may not.
    counts_ends = not audio and unit != "frames"
    longest = _at_least(sweep.lengths.max, scale)
    cut = "max-sample-size" if audio else "max-source-positions"
    data = {
        "max-tokens": str(max_tokens),
        "batch-size": str(batch_size),
        "required-batch-size-multiple": "1",
    }
    task = {cut: str(longest + counts_ends)}
    if limits.shortest is not None and audio:
        task["min-sample-size"] = str(_at_least(limits.shortest, scale))
    if limits.longest is not None and not audio:
        data["skip-invalid-size-inputs-valid-test"] = ""
    if "num_workers" in fields["loader"]:
        data["num-workers"] = str(fields["loader"]["num_workers"])
    return from_template(
        "fairseq.txt.j2",
        **fields,
        file=_FAIRSEQ_FILE,
        too_long=longest > max_tokens,
        counts_ends=counts_ends,
        cut=cut,
        flags=" ".join(
            f"--{flag} {value}".rstrip() for flag, value in {**data, **task}.items()
        ),
        data=data,
        task=task,
    )


def _render_packer(name: str, tuned: Tuned) -> str:
    """Return the lines to set for a framework that packs; raise ResultError without a token budget."""
    sweep = tuned.needed_sweep
    export = export_of(name)
    if sweep.packed is None:
        raise ResultError(
            f"{export.title} packs by a token budget, and the run has none",
            "Run `batchtune sweep-buckets MANIFEST --max-tokens N`.",
        )
    return from_template(
        f"{name}.{export.file.rpartition('.')[2]}.j2",
        title=export.title,
        **packed_fields(tuned, sweep.packed, ()),
    )


RENDERS = {
    "espnet": _render_espnet,
    "fairseq": _render_fairseq,
    **{
        name: partial(_render_packer, name)
        for name in ("verl", "openrlhf", "slime", "trl", "axolotl")
    },
}
