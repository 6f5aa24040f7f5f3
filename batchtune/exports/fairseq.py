"""fairseq: `--max-tokens` and the flags that go with it."""

from __future__ import annotations

from batchtune.exports.base import Export, Tuned
from batchtune.exports.cutting import AUDIO_UNITS, at_least, at_most, cutting_fields
from batchtune.exports.fields import LengthLimits, Loading
from batchtune.exports.text import from_template

_FILE = "batchtune_fairseq.txt"


def render(tuned: Tuned) -> str:
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
    scale = AUDIO_UNITS.get(unit, 1.0)
    audio = unit in AUDIO_UNITS
    max_tokens = max(1, at_most(sweep.max_batch_length, scale))
    allowed = max(1, int(sweep.max_batch_length / sweep.lengths.min))
    batch_size = min(allowed, sweep.settings.get("max_batch_size") or allowed)
    # One more for the end of the sentence, which fairseq counts and a manifest of tokens may not.
    counts_ends = not audio and unit != "frames"
    longest = at_least(sweep.lengths.max, scale)
    cut = "max-sample-size" if audio else "max-source-positions"
    data = {"max-tokens": str(max_tokens), "batch-size": str(batch_size), "required-batch-size-multiple": "1"}
    task = {cut: str(longest + counts_ends)}
    if limits.shortest is not None and audio:
        task["min-sample-size"] = str(at_least(limits.shortest, scale))
    if limits.longest is not None and not audio:
        data["skip-invalid-size-inputs-valid-test"] = ""
    if (workers := Loading.of(tuned).workers) is not None:
        data["num-workers"] = str(workers)

    def batch_size_at(length: float) -> float:
        return min(batch_size, max_tokens // (length * scale))

    return from_template(
        "fairseq.txt.j2",
        **cutting_fields(tuned, "fairseq", "max-tokens", ("num_workers",), batch_size_at),
        file=_FILE,
        too_long=longest > max_tokens,
        longest=sweep.lengths.max,
        counts_ends=counts_ends,
        cut=cut,
        flags=" ".join(f"--{flag} {value}".rstrip() for flag, value in {**data, **task}.items()),
        data=data,
        task=task,
    )


EXPORTS = (Export(name="fairseq", title="fairseq", file=_FILE, render=render),)
