"""fairseq: `--max-tokens` and the flags that go with it."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.exports.base import Export, Tuned
from batchtune.exports.cutting import AUDIO_UNITS, at_least, at_most, counting_remark, what_runs
from batchtune.exports.text import LengthLimits, commented
from batchtune.results import Sweep
from batchtune.units import format_length

_NAME = "fairseq"
_FILE = "batchtune_fairseq.txt"


def render(tuned: Tuned) -> str:
    """Return the flags, on one line below the comments, and the same for Hydra as a comment.

    Reproduced from fairseq 0.12.2: `batch_by_size_vec` (data/data_utils_fast.pyx) adds examples, sorted by length, to
    a batch while examples × longest ≤ max_tokens and stops where an example exceeds it by itself;
    required_batch_size_multiple (8 unless given) would cut more batches.

    Raises:
        ResultError: The sweep recommends nothing.
    """
    sweep = tuned.sweep
    unit = sweep.lengths.unit
    scale = AUDIO_UNITS.get(unit, 1.0)
    max_tokens = max(1, at_most(sweep.max_batch_length, scale))
    allowed = max(1, int(sweep.max_batch_length / sweep.lengths.min))
    batch_size = min(allowed, sweep.settings.get("max_batch_size") or allowed)
    longest = at_least(sweep.lengths.max, scale)
    # One more for the end of the sentence, which fairseq counts and a manifest of tokens may not.
    longest += unit not in AUDIO_UNITS and unit != "frames"
    name = "max-sample-size" if unit in AUDIO_UNITS else "max-source-positions"
    limits = LengthLimits.of(sweep)
    head = [
        f'{_NAME}: flags, as in fairseq-train DATA $(grep -v "^#" {_FILE}) and your other flags',
        *what_runs(tuned, _NAME, lambda length: min(batch_size, max_tokens // (length * scale))),
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
    line = " ".join(f"--{flag} {value}".rstrip() for flag, value in {**data, **task}.items())
    hydra = [
        line
        for group, flags in (("dataset", data), ("task", task))
        for line in (f"{group}:", *(f"  {flag.replace('-', '_')}: {value or 'true'}" for flag, value in flags.items()))
    ]
    same = commented(["The same for fairseq-hydra-train:"])
    return f"{commented(head)}{line}\n{same}" + "".join(f"#   {line}\n" for line in hydra)


def _stops(sweep: Sweep, max_tokens: int, scale: float) -> Iterator[str]:
    longest = f"the longest here, {format_length(sweep.lengths.max, sweep.lengths.unit)},"
    if at_least(sweep.lengths.max, scale) > max_tokens:
        yield f"fairseq WILL stop: an example must not exceed max-tokens, and {longest} does: leave out what does"
    else:
        yield f"fairseq stops where an example exceeds max-tokens; {longest} does not"
    if sweep.lengths.unit not in AUDIO_UNITS and sweep.lengths.unit != "frames":
        yield (
            "fairseq counts the end of a sentence as a token, and of source and target the longer: where your lengths "
            "do not, leave some memory free"
        )


def _leaving_out(sweep: Sweep, limits: LengthLimits, longest: int) -> Iterator[str]:
    """Say how to leave out what was left out at tuning.

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


EXPORTS = (Export(name="fairseq", title=_NAME, file=_FILE, render=render),)
