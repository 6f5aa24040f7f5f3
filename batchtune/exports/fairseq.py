"""fairseq: `--max-tokens` and what has to be said beside it."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.exports.base import Export, Tuned, choose_row
from batchtune.exports.snippets import (
    AUDIO_UNITS,
    LengthLimits,
    about_batches,
    about_data,
    about_row,
    at_least,
    at_most,
    beyond_measured,
    checked,
    commented,
    counting_remark,
    padded_remark,
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
    limits = LengthLimits.of(sweep)
    head = [
        f'{_NAME}: flags, as in fairseq-train DATA $(grep -v "^#" {EXPORT.file}) and your other flags',
        about_data(sweep),
        f"The best table with batch sizes from max_batch_length: {about_row(chosen.row, sweep)}",
        *chosen.remarks,
        *beyond_measured(tuned),
        *padded_remark(sweep, _NAME),
        *_what_runs(sweep, max_tokens, scale),
        *_stops(sweep, max_tokens, scale),
        counting_remark(unit, "max-tokens"),
        "A lower batch-size of your own can stay: batches only get smaller. --max-batch-size sweeps with it",
        f"{name}: no less than the longest example, so that none is dropped or cropped",
        *_leaving_out(sweep, limits, longest),
        "All of this holds for each GPU by itself",
    ]
    data = {"max-tokens": str(max_tokens), "batch-size": str(batch_size), "required-batch-size-multiple": "1"}
    task = {name: str(longest)}
    if limits.shortest is not None and unit in AUDIO_UNITS:
        task["min-sample-size"] = str(at_least(limits.shortest, scale))
    if limits.longest is not None and unit not in AUDIO_UNITS:
        data["skip-invalid-size-inputs-valid-test"] = ""
    return "".join(
        [
            commented(head),
            " ".join(f"--{flag} {value}".rstrip() for flag, value in {**data, **task}.items()) + "\n",
            commented(["The same for fairseq-hydra-train:"]),
            *(f"#   {line}\n" for line in _hydra(data, task)),
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


def _leaving_out(sweep: Sweep, limits: LengthLimits, longest: int) -> Iterator[str]:
    """How to leave out what was left out at tuning.

    Source: fairseq 0.12.2. `FileAudioDataset` leaves out what is shorter than min_sample_size, and crops what is longer
    than max_sample_size; `FairseqTask.filter_indices_by_size` leaves training examples beyond max_source_positions
    out, and those of validation only with skip_invalid_size_inputs_valid_test.
    """
    yield from limits.left_out
    audio = sweep.lengths.unit in AUDIO_UNITS
    if limits.longest is not None and audio:
        yield (
            "max-sample-size does not leave longer ones out: fairseq crops them, and keeps the whole transcript. Take "
            f"the lines with more than {longest} samples out of train.tsv, and the same lines out of .ltr and .wrd. "
            f"The task hubert_pretraining has max_keep_size: {longest}, which leaves them out"
        )
    elif limits.longest is not None:
        yield (
            "max-source-positions leaves longer ones out of training, skip-invalid-size-inputs-valid-test out of "
            "validation, which would else stop with an error"
        )
    if limits.shortest is not None and audio:
        yield "min-sample-size leaves shorter ones out"
    elif limits.shortest is not None:
        shortest = format_length(limits.shortest, sweep.lengths.unit)
        yield f"fairseq can't leave out what is shorter than {shortest}: take it out of the data"


def _hydra(data: dict[str, str], task: dict[str, str]) -> Iterator[str]:
    for group, flags in (("dataset", data), ("task", task)):
        yield f"{group}:"
        for flag, value in flags.items():
            yield f"  {flag.replace('-', '_')}: {value or 'true'}"


EXPORT = Export(name="fairseq", title="fairseq", file="batchtune_fairseq.txt", render=render)
