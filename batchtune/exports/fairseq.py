"""fairseq: `--max-tokens` and what has to be said beside it."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.exports.base import Export, Tuned, choose_row
from batchtune.exports.snippets import (
    AUDIO_UNITS,
    about_batches,
    about_data,
    about_row,
    at_least,
    at_most,
    beyond_measured,
    checked,
    commented,
    counting_remark,
)
from batchtune.results import Sweep
from batchtune.units import format_length

_NAME = "fairseq"
_WHY = "fairseq knows no bucket table, only a limit for a batch"


def render(tuned: Tuned) -> str:
    """The flags, on one line below the comments, and the same for Hydra as a comment.

    Reproduced from fairseq 0.12.2: `batch_by_size_vec` (data/data_utils_fast.pyx) adds examples, sorted by length, to
    a batch while examples × longest ≤ max_tokens and stops where an example exceeds it by itself;
    required_batch_size_multiple (8 unless given) would cut more batches.

    Raises:
        ResultError: The sweep recommends nothing, or is damaged.
    """
    sweep = checked(tuned.sweep)
    chosen = choose_row(sweep, _NAME, lambda row: row.sizing == "length", _WHY)
    unit = sweep.lengths.unit
    scale = AUDIO_UNITS.get(unit, 1.0)
    max_tokens = max(1, at_most(sweep.max_batch_length, scale))
    batch_size = _batch_size(sweep)
    name, longest = _longest(sweep, scale)
    head = [
        f'{_NAME}: flags, as in fairseq-train DATA $(grep -v "^#" {EXPORT.file}) and your other flags',
        about_data(sweep),
        f"The best table with batch sizes from max_batch_length: {about_row(chosen.row, sweep)}",
        *chosen.remarks,
        *beyond_measured(tuned),
        *_what_runs(sweep, max_tokens, scale),
        *_stops(sweep, max_tokens, scale),
        counting_remark(unit, "max-tokens"),
        f"{name}: no less than the longest example, so that none is dropped or cropped",
        "All of this holds for each GPU by itself",
    ]
    flags = {
        "max-tokens": max_tokens,
        "batch-size": batch_size,
        "required-batch-size-multiple": 1,
        name: longest,
    }
    return "".join(
        [
            commented(head),
            " ".join(f"--{flag} {value}" for flag, value in flags.items()) + "\n",
            commented(["The same for fairseq-hydra-train:"]),
            *(f"#   {line}\n" for line in _hydra(flags)),
        ]
    )


def _batch_size(sweep: Sweep) -> int:
    """The most examples of a batch: what was asked for, else what the shortest example allows."""
    allowed = max(1, int(sweep.max_batch_length / sweep.lengths.min))
    asked = sweep.settings.get("max_batch_size")
    return min(allowed, asked) if isinstance(asked, int) and asked > 0 else allowed


def _longest(sweep: Sweep, scale: float) -> tuple[str, int]:
    """The flag that must not be below the longest example, and its value."""
    longest = at_least(sweep.lengths.max, scale)
    if sweep.lengths.unit in AUDIO_UNITS:
        return "max-sample-size", longest
    # One more for the end of the sentence, which fairseq counts and a manifest of tokens may not.
    return "max-source-positions", longest if sweep.lengths.unit == "frames" else longest + 1


def _what_runs(sweep: Sweep, max_tokens: int, scale: float) -> Iterator[str]:
    most = _batch_size(sweep)
    about = about_batches(sweep, lambda length: min(most, max_tokens // (length * scale)))
    yield (
        "fairseq does not run it: it sorts the examples by length and cuts the list into batches"
        + (f", about {about} an epoch" if about else "")
    )
    yield "The same examples are together in every epoch; only the order of the batches is shuffled"


def _stops(sweep: Sweep, max_tokens: int, scale: float) -> Iterator[str]:
    longest = format_length(sweep.lengths.max, sweep.lengths.unit)
    if at_least(sweep.lengths.max, scale) > max_tokens:
        yield (
            f"fairseq WILL stop: an example must not exceed max-tokens, and the longest here, {longest}, does: leave "
            "out what does"
        )
    else:
        yield f"fairseq stops where an example exceeds max-tokens; the longest here, {longest}, does not"
    if sweep.lengths.unit not in AUDIO_UNITS and sweep.lengths.unit != "frames":
        yield (
            "fairseq counts the end of a sentence as a token, and of source and target the longer: where your lengths "
            "do not, leave some memory free"
        )


def _hydra(flags: dict[str, int]) -> Iterator[str]:
    *batches, (name, longest) = flags.items()
    yield "dataset:"
    for flag, value in batches:
        yield f"  {flag.replace('-', '_')}: {value}"
    yield "task:"
    yield f"  {name.replace('-', '_')}: {longest}"


EXPORT = Export(name="fairseq", title="fairseq", file="batchtune_fairseq.txt", render=render)
