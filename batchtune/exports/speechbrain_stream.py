"""The recommendation for SpeechBrain's dynamic_bucketed_batch over WebDataset: Python code that makes the loader."""

from __future__ import annotations

from typing import Any

from batchtune.exports.base import Export, Patched, Tuned
from batchtune.exports.loader import loading_fields
from batchtune.exports.stream import SPEECHBRAIN, ChosenStream, choose_stream, stream_fields, swept_workers
from batchtune.exports.text import LengthLimits, from_template, number, padded_remark

_WHO = "SpeechBrain's dynamic_bucketed_batch"
# Unit → samples of audio, by the constant SAMPLE_RATE.
_SAMPLES = {"s": "{} * SAMPLE_RATE", "ms": "{} * SAMPLE_RATE / 1000"}


def _counted_as(unit: str | None) -> str:
    """Say what the numels must count, in a sentence without a full stop."""
    if unit in _SAMPLES:
        return (
            "SpeechBrain counts the samples of decoded audio, len(signal), where the sweep counted "
            f"{'seconds' if unit == 's' else 'milliseconds'}: SAMPLE_RATE must be that of the audio"
        )
    if unit is None:
        return (
            "The unit of the lengths is not known: the numels are in the one that was tuned with, and so must len_fn be"
        )
    shown = "samples" if unit == "samples" else f"{unit}, so len_fn, which is len(signal) here, must return {unit}"
    return f"The numels count {shown}"


def choose_row(tuned: Tuned) -> ChosenStream:
    """Choose the best row of this algorithm; raise ResultError without one."""
    return choose_stream(tuned.needed_stream, _WHO, SPEECHBRAIN)


def render(tuned: Tuned) -> str:
    """Return Python code that makes the loader, as in SpeechBrain's tutorial of WebDataset.

    Source: `speechbrain.dataio.iterators.dynamic_bucketed_batch` and `.dataloader.make_dataloader`, SpeechBrain 1.1;
    WebDataset 1.0.

    Raises:
        ResultError: The run holds no sweep of a stream, or it holds no row of this algorithm.
    """
    sweep = tuned.needed_stream
    chosen = choose_row(tuned)
    row, limits, unit = chosen.row, LengthLimits.of(sweep), sweep.lengths.unit
    in_samples = _SAMPLES.get(unit or "", "{}")
    ends = (("min_sample_len", limits.shortest), ("max_sample_len", limits.longest))
    return from_template(
        "speechbrain_stream.py.j2",
        counts=_counted_as(unit),
        overshoots=row.max_batch_numel is None,
        padded=padded_remark(sweep, "SpeechBrain"),
        rate=unit in _SAMPLES,
        target=in_samples.format(number(row.target_batch_numel or 0.0)),
        most="" if row.max_batch_numel is None else in_samples.format(number(row.max_batch_numel)),
        sample_lengths=[(name, in_samples.format(number(end))) for name, end in ends if end is not None],
        **stream_fields(chosen, sweep),
        **loading_fields(tuned, swept_workers(sweep)),
    )


def _patch(*file: Any, **options: Any) -> Patched:
    from batchtune.exports.patch_stream import patch_stream

    return patch_stream(*file, **options)


EXPORTS = (
    Export(
        name="speechbrain-stream",
        title="SpeechBrain with WebDataset",
        file="speechbrain_stream.py",
        render=render,
        patch=_patch,
    ),
)
